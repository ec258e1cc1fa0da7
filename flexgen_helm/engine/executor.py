"""The executor: the loop over stages and batches. It knows stages and tensors, no model names and no policy."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from flexgen_helm.engine.attention_metadata import AttentionMetadata, build_attention_metadata
from flexgen_helm.engine.cuda_graphs import LayerGraphs
from flexgen_helm.engine.sampler import sample_tokens
from flexgen_helm.engine.small_tensors import host_and_device
from flexgen_helm.errors import Interrupted, MemoryLimitError
from flexgen_helm.hardware.threads import ThreadGovernor
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.config import RopeConfig, stage_names
from flexgen_helm.models.decoder import Decoder, Rotary, StageWeights
from flexgen_helm.offload.activations import ActivationStore
from flexgen_helm.offload.weights import TieredWeights
from flexgen_helm.planner.placement import Tier
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.scheduling.sampling import SamplingParams
from flexgen_helm.scheduling.schedule import WorkItem, stage_visits
from flexgen_helm.scheduling.sequence import Batch, Sequence

# Logits that exist at once, in elements: nothing of size tokens x vocabulary is ever materialized.
_LOGIT_ELEMENTS = 1 << 24


@dataclass
class SequenceOutput:
    """What a pass computed for one sequence.

    prompt_logprobs: log-probabilities of the prompt's tokens 1, 2, ….
    drawn: tokens with their log-probabilities.
    nonfinite_stage: the first stage after which a value was not finite; None if all were.
    """

    prompt_logprobs: list[float] = field(default_factory=list)
    drawn: list[tuple[int, float]] = field(default_factory=list)
    nonfinite_stage: str | None = None


@dataclass(frozen=True)
class BatchOutput:
    """All sequences of a batch that has passed the head, in the batch's order, and the seconds of its items."""

    batch: Batch
    outputs: list[SequenceOutput]
    seconds: float


@dataclass(eq=False)
class _BatchState:
    """A batch on its way through the stages.

    hidden: [T, H]; None while the activation store keeps it.
    rotary: cosines and sines; None together with `hidden`, because those of many batches would be large.
    sums: of the tokens' hidden states after each layer that `nonfinite_layer` does not cover yet, each [T].
    nonfinite_layer: [T], the first layer after which a value was not finite; -1 while all are.
    num_layers: covered by `nonfinite_layer`.
    seconds: charged to the batch so far; launched_s: of its items since then.
    """

    metadata: AttentionMetadata
    hidden: Tensor | None = None
    rotary: dict[RopeConfig, Rotary] | None = None
    sums: list[Tensor] = field(default_factory=list)
    nonfinite_layer: Tensor | None = None
    num_layers: int = 0
    seconds: float = 0.0
    launched_s: float = 0.0

    def check_finite(self) -> Tensor:
        """Take the sums into `nonfinite_layer`, and return that."""
        if self.sums:
            bad = ~torch.isfinite(torch.stack(self.sums))
            first = torch.where(bad.any(0), bad.byte().argmax(0) + self.num_layers, -1)
            before = self.nonfinite_layer
            self.nonfinite_layer = first if before is None else torch.where(before < 0, first, before)
            self.num_layers += len(self.sums)
            self.sums.clear()
        assert self.nonfinite_layer is not None
        return self.nonfinite_layer


@dataclass(frozen=True, eq=False)
class _Prediction:
    """One prediction to make: the log-probability of `target` at a position of the batch, or a token drawn there."""

    output: SequenceOutput
    position: int
    target: int | None
    sampling: SamplingParams | None


class Executor:
    """Takes the batches of a pass through the stages of the model, in the order that a schedule names."""

    def __init__(
        self,
        decoder: Decoder,
        weights: TieredWeights,
        cache: KVCache,
        activations: ActivationStore,
        device: torch.device,
        threads: ThreadGovernor | None = None,
        graphs: LayerGraphs | None = None,
    ) -> None:
        """threads: chooses the threads that compute; None where a device does.

        graphs: run layers of decode batches; None if none can.
        """
        self._decoder, self._weights, self._cache, self._activations = decoder, weights, cache, activations
        self._device, self._threads, self._graphs = device, threads, graphs
        self._stages = stage_names(decoder.config)
        self._head_positions = max(1, _LOGIT_ELEMENTS // decoder.config.vocab_size)
        tier: Tier = "cpu" if device.type == "cpu" else "gpu"
        self._workspace = Workspace(decoder.config, decoder.dtype.itemsize, tier, cache.codec.cache_format)
        self.peak_workspace_bytes = 0

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def run(
        self,
        batches: abc.Sequence[Batch],
        items: abc.Sequence[WorkItem],
        sampling: Callable[[Sequence], list[SamplingParams]],
        on_batch: Callable[[BatchOutput], None],
        should_stop: Callable[[Batch], bool],
        another_pass: bool = False,
    ) -> None:
        """Run one pass; call `on_batch` as soon as a batch has passed its last stage.

        items: the pass's order (the paper's Algorithm 1 for the block schedules).
        sampling: how each of a sequence's next tokens is drawn.
        should_stop: called with its batch before every item.
        another_pass: another pass is certain to follow, so its first weights may be prefetched.
        Raises `Interrupted` between two items. After this or another error nothing of the pass is kept.
        """
        uses = [self._num_uses(batches[item.batch], item) for item in items]
        visits = stage_visits(items, uses, self.num_stages, another_pass)
        states: dict[int, _BatchState] = {}
        charged_until = time.perf_counter()
        try:
            with torch.no_grad():  # not inference mode: tensors go to threads, and that mode is per thread
                for item, following in zip_longest(items, items[1:]):
                    if should_stop(batches[item.batch]):
                        raise Interrupted("interrupted; everything finished so far is kept")
                    if self._threads is not None:
                        self._threads.adapt()
                    began, batch = time.perf_counter(), batches[item.batch]
                    self._weights.prefetch(visits)  # load_weight(i, j + 1, k)
                    state = self._load(item, batch, states)  # load_activation(i, j, k), begun an item ago
                    self._prefetch(item, following, states)  # load_cache and load_activation(i, j, k + 1)
                    outputs = self._compute(item, batch, state, sampling)  # attention starts store_cache(i, j, k)
                    if outputs is None and (following is None or following.batch != item.batch):
                        self._store(item, state)  # store_activation(i, j, k), done in the background
                    state.launched_s += time.perf_counter() - began
                    if outputs is not None:
                        charged_until = _charge(states.values(), charged_until)
                        del states[item.batch]
                        for scheduled in batch.scheduled:  # last: after an out-of-memory all is computed again
                            scheduled.sequence.num_computed += scheduled.count
                        on_batch(BatchOutput(batch, outputs, state.seconds))
        except BaseException:
            self._weights.cancel()
            self._cache.cancel()
            self._activations.close()
            raise

    def _load(self, item: WorkItem, batch: Batch, states: dict[int, _BatchState]) -> _BatchState:
        """Return the batch's state with its hidden states on the compute device."""
        state = states.get(item.batch)
        if state is None:
            state = states[item.batch] = self._new_state(batch)
        elif state.hidden is None:
            state.hidden = self._activations.load(item.batch)
        if state.rotary is None:
            state.rotary = self._decoder.rotary(state.metadata.positions)
        return state

    def _prefetch(self, item: WorkItem, following: WorkItem | None, states: dict[int, _BatchState]) -> None:
        """Begin to bring what the next item needs, hidden states and one layer of its caches."""
        if following is None or (state := states.get(following.batch)) is None:
            return
        if following.batch != item.batch:
            self._activations.prefetch(following.batch)
        if 0 < following.stage < self.num_stages - 1:
            with suppress(MemoryLimitError):  # no room for two layers: it is brought when it is needed
                state.metadata.prefetch(following.stage - 1, self._cache)

    def _compute(
        self,
        item: WorkItem,
        batch: Batch,
        state: _BatchState,
        sampling: Callable[[Sequence], list[SamplingParams]],
    ) -> list[SequenceOutput] | None:
        """Take the batch through one stage; return the outputs of its sequences after the last."""
        if item.stage == self.num_stages - 1:
            return self._head(batch, state, sampling)
        with self._weights.stage(self._stages[item.stage]) as weights:
            if item.stage == 0:
                metadata = state.metadata
                state.hidden = self._decoder.embed(weights, metadata.token_ids, metadata.positions)
            else:
                state.hidden, sums = self._layer(item.stage - 1, state, weights)
                state.sums.append(sums)
        return None

    def _store(self, item: WorkItem, state: _BatchState) -> None:
        assert state.hidden is not None
        self._activations.store(item.batch, state.hidden if self._graphs is None else self._graphs.owned(state.hidden))
        state.hidden = state.rotary = None
        if state.sums:  # those of many waiting batches would be large
            state.check_finite()

    def _new_state(self, batch: Batch) -> _BatchState:
        decoder = self._decoder
        metadata = build_attention_metadata(batch, decoder.config.windows, self._device, decoder.dtype, self._cache)
        num_tokens = len(metadata.token_ids)
        self._note_workspace(
            self._workspace.layer(
                num_tokens, metadata.longest_prompt, metadata.cached_positions, metadata.largest_prefix
            )
        )
        return _BatchState(metadata)

    def _note_workspace(self, num_bytes: int) -> None:
        self.peak_workspace_bytes = max(self.peak_workspace_bytes, num_bytes)

    def _layer(self, layer: int, state: _BatchState, weights: StageWeights) -> tuple[Tensor, Tensor]:
        """Return the hidden states after a layer, and the sum of each token's, which meets every element."""
        decoder, cache, metadata = self._decoder, self._cache, state.metadata
        window = decoder.config.window(layer)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return metadata.attend(layer, window, decoder.attention, cache, q, k, v)

        assert state.hidden is not None and state.rotary is not None
        graphs = None if metadata.prompts else self._graphs
        if graphs is not None and graphs.takes(layer, len(state.hidden)):
            # What is stored in the background must not be in the graphs' buffer, which the next layer overwrites.
            own = attend if metadata.caches_on_device else lambda q, k, v: attend(q, k.clone(), v.clone())
            return graphs.layer(weights, layer, state.hidden, state.rotary, own)
        hidden = decoder.layer(weights, layer, state.hidden, state.rotary, attend)
        return hidden, hidden.sum(-1, dtype=torch.float32)

    def _head(
        self, batch: Batch, state: _BatchState, sampling: Callable[[Sequence], list[SamplingParams]]
    ) -> list[SequenceOutput]:
        #  tokens computed   a b c      positions 0 and 1 score b and c; the last position is drawn from
        #  predict           b c ?
        outputs, predictions = [SequenceOutput() for _ in batch.scheduled], []
        first = 0
        for item, output in zip(batch.scheduled, outputs):
            sequence, last = item.sequence, first + item.count - 1
            predictions += [_Prediction(output, first + i, t, None) for i, t in enumerate(_scored_targets(sequence))]
            if sequence.num_draws:
                predictions += [_Prediction(output, last, None, params) for params in sampling(sequence)]
            first += item.count

        assert state.hidden is not None
        # On the device until the end, so that the host waits for it once.
        results = [state.check_finite().double()]
        # As many uses of the head as were announced, which a sequence without predictions must not change.
        for number in range(self._num_head_uses(batch)):
            with self._weights.stage(self._stages[-1]) as weights:
                part = predictions[number * self._head_positions : (number + 1) * self._head_positions]
                results += self._predict(weights, state.hidden, part)
        values = torch.cat(results).tolist()
        self._note_nonfinite(batch, outputs, values)
        self._fill(predictions, values[first:])
        return outputs

    def _num_uses(self, batch: Batch, item: WorkItem) -> int:
        """Return how often an item uses the weights of its stage."""
        return 1 if item.stage < self.num_stages - 1 else self._num_head_uses(batch)

    def _num_head_uses(self, batch: Batch) -> int:
        """Return in how many slices of positions a batch passes the head."""
        sequences = [item.sequence for item in batch.scheduled]
        positions = sum(sequence.num_draws + len(_scored_targets(sequence)) for sequence in sequences)
        return -(-positions // self._head_positions)

    def _predict(self, weights: StageWeights, hidden: Tensor, predictions: list[_Prediction]) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of the raw logits, both in float64, which has all their values."""
        positions = [prediction.position for prediction in predictions]
        targets = [prediction.target or 0 for prediction in predictions]
        drawn = {i: p.sampling for i, p in enumerate(predictions) if p.sampling is not None}
        _, (where, tokens, rows) = host_and_device(self._device, (positions, targets, [*drawn]))
        logits = self._decoder.head(weights, hidden.index_select(0, where))
        self._note_workspace(self._workspace.head(len(hidden), len(predictions)))
        if len(drawn) == len(predictions):
            tokens = sample_tokens(logits, [*drawn.values()])
        elif drawn:
            tokens[rows] = sample_tokens(logits.index_select(0, rows), [*drawn.values()])
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        return tokens.double(), logprobs.double()

    def _note_nonfinite(self, batch: Batch, outputs: list[SequenceOutput], layers: list[float]) -> None:
        """Note the first stage of each sequence after which a value was not finite; layers: of each token, or -1."""
        first = 0
        for item, output in zip(batch.scheduled, outputs):
            bad = [layer for layer in layers[first : first + item.count] if layer >= 0]
            output.nonfinite_stage = self._stages[1 + int(min(bad))] if bad else None
            first += item.count

    def _fill(self, predictions: list[_Prediction], values: list[float]) -> None:
        """Fill tokens and log-probabilities into the outputs; values: by slice of the head, as `_predict` returns."""
        for first in range(0, len(predictions), self._head_positions):
            part = predictions[first : first + self._head_positions]
            tokens = values[2 * first : 2 * first + len(part)]
            logprobs = values[2 * first + len(part) : 2 * (first + len(part))]
            for prediction, token, logprob in zip(part, tokens, logprobs):
                output = prediction.output
                if not math.isfinite(logprob):
                    output.nonfinite_stage = output.nonfinite_stage or self._stages[-1]
                elif output.nonfinite_stage is not None:
                    continue
                elif prediction.target is None:
                    output.drawn.append((int(token), logprob))
                else:
                    output.prompt_logprobs.append(logprob)


def _charge(states: abc.Iterable[_BatchState], since: float) -> float:
    """Charge the seconds since `since` to batches in proportion to their items; return the time now.

    A device computes behind the host, which has just waited for it.
    """
    states, now = list(states), time.perf_counter()
    launched_s = sum(state.launched_s for state in states)
    for state in states:
        state.seconds += (now - since) * state.launched_s / launched_s
        state.launched_s = 0.0
    return now


def _scored_targets(sequence: Sequence) -> list[int]:
    """Return the tokens whose log-probabilities this pass computes for a prompt."""
    return sequence.targets if sequence.needs_scores and sequence.is_prefill else []
