"""The executor: the loop over stages and batches, and what it predicts for each batch. It knows
stages and tensors, no model names and no policy.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import abc, deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Protocol

import torch
from torch import Tensor

from flexgen_helm.concurrency import stopped_by
from flexgen_helm.engine.attention_metadata import (
    AttentionBackend,
    LayerAttention,
    build_attention_metadata,
)
from flexgen_helm.engine.kept_states import KeptStates
from flexgen_helm.engine.logits_processors import LogitsProcessors
from flexgen_helm.engine.loop_attention import LoopAttention, attends_in_a_loop
from flexgen_helm.engine.passes import BatchState, Pass, charge, share_launch
from flexgen_helm.engine.pipeline import Pipeline
from flexgen_helm.engine.sampler import greedy_tokens, log_normalizers, most_probable, sample_tokens
from flexgen_helm.engine.segment_attention import SegmentAttention
from flexgen_helm.errors import Interrupted, MemoryLimitError
from flexgen_helm.hardware.freed_memory import ResidentMemory
from flexgen_helm.hardware.threads import ThreadGovernor
from flexgen_helm.kernels.amx import product_bytes
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.attention import has_fused_attention
from flexgen_helm.models.config import EMBED, HEAD, ModelConfig, layer_stage, stage_names
from flexgen_helm.models.decoder import LayerBatch, StageWeights
from flexgen_helm.models.transformers_backend.decoder import LayerDecoder
from flexgen_helm.offload.activations import ActivationStore
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.offload.uploads import upload
from flexgen_helm.offload.weights import TieredWeights
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.planner.workspace import Workspace, widest_matrix
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.request import DrawnToken, TopLogprobs
from flexgen_helm.scheduling.sampling_params import SamplingParams
from flexgen_helm.scheduling.sequence import Batch, PromptScores, Sequence
from flexgen_helm.scheduling.stage_visits import StageVisit, WorkItem, stage_visits

# Logits that exist at once, in elements: nothing of size tokens x vocabulary is ever materialized.
_LOGIT_ELEMENTS = 1 << 24


class Observer(Protocol):
    """What is shown the tensors of a run. Where memory runs out, a batch is computed again, and so
    shown again.
    """

    def on_hidden(self, stage: int, batch: Batch, hidden: Tensor) -> None:
        """See a batch's hidden states [T, H] after a stage; they must not be changed."""

    def on_logits(self, predictions: abc.Sequence[Prediction], logits: Tensor) -> None:
        """See the rows [predictions, V] in float32 that predict scored tokens, valid during the
        call.
        """


@dataclass
class SequenceOutput:
    """What a pass computed for one sequence.

    scores: of the prompt's tokens 1, 2, ….
    drawn: the tokens that were drawn.
    nonfinite_stage: the first stage after which a value was not finite; None if all were.
    """

    scores: PromptScores = field(default_factory=PromptScores)
    drawn: list[DrawnToken] = field(default_factory=list)
    nonfinite_stage: str | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """One prediction to make at a position of the batch: the log-probability of a target, or a
    token to draw.

    output: where it is filled in.
    target, sampling: one of the two is None.
    needs_argmax: whether the target is the most probable token is filled in, too.
    num_top: the most probable tokens that are filled in.
    sequence, index: for an `Observer`: the sequence that has the target, and its index in the
        prompt.
    """

    output: SequenceOutput
    position: int
    target: int | None
    sampling: SamplingParams | None
    needs_argmax: bool = False
    num_top: int = 0
    sequence: Sequence | None = None
    index: int = 0

    @property
    def prompts(self) -> list[int]:
        """The requests that have the target, by index in the caller's list; several if they share a
        beginning.
        """
        assert self.sequence is not None
        return [index for request in self.sequence.requests for index in request.indices]

    def fill(self, token: int, logprob: float, top: TopLogprobs) -> None:
        """Add what was predicted to the sequence's output; nothing behind a value that is not
        finite.
        """
        output = self.output
        if not math.isfinite(logprob):
            output.nonfinite_stage = output.nonfinite_stage or HEAD
        elif output.nonfinite_stage is not None:
            return
        elif self.target is None:
            output.drawn.append(DrawnToken(token, logprob, top))
        else:
            output.scores.logprobs.append(logprob)
            if self.needs_argmax:
                output.scores.greedy.append(token == self.target)
            if self.num_top:
                output.scores.top.append(top)


@dataclass(eq=False)
class BatchOutput:
    """What is predicted for a batch.

    outputs: one for each sequence of the batch.
    predictions: those of all sequences, in order.
    values: for each token of the batch the first layer after which a value was not finite, or -1;
        then of each prediction four things: the token that is drawn, or beside a target the most
        probable one where that is wanted; the log-probability of the drawn token or the target; the
        `num_top` most probable tokens; theirs.
    seconds: of its items.
    """

    batch: Batch
    outputs: list[SequenceOutput]
    predictions: list[Prediction]
    values: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, batch: Batch) -> BatchOutput:
        """Say what is to be predicted for a batch in this pass."""
        #  tokens computed   a b c      positions 0 and 1 score b and c; the last position is drawn
        #  predict           b c ?      from
        outputs, predictions = [SequenceOutput() for _ in batch.scheduled], []
        first = 0
        for item, output in zip(batch.scheduled, outputs):
            sequence, last = item.sequence, first + item.count - 1
            next_index = sequence.start + sequence.num_computed + 1
            predictions += [
                Prediction(
                    output,
                    first + i,
                    target,
                    None,
                    sequence.needs_greedy,
                    sequence.num_top,
                    sequence,
                    next_index + i,
                )
                for i, target in enumerate(sequence.targets)
            ]
            predictions += [
                Prediction(output, last, None, params, num_top=sequence.num_top)
                for params in sequence.sampling()
            ]
            first += item.count
        return cls(batch, outputs, predictions)

    @property
    def num_top(self) -> int:
        """How many of the most probable tokens are found for each prediction."""
        return max((prediction.num_top for prediction in self.predictions), default=0)

    @property
    def num_values(self) -> int:
        return self.batch.num_tokens + 2 * len(self.predictions) * (1 + self.num_top)

    def fill(self) -> None:
        """Fill the values into the outputs."""
        first, num_top = 0, self.num_top
        for item, output in zip(self.batch.scheduled, self.outputs):
            nonfinite = [layer for layer in self.values[first : first + item.count] if layer >= 0]
            output.nonfinite_stage = layer_stage(int(min(nonfinite))) if nonfinite else None
            first += item.count
        values = iter(self.values[first:])
        for prediction in self.predictions:
            token, logprob, *top = islice(values, 2 * (1 + num_top))
            ranked = zip(map(int, top[:num_top]), top[num_top:])
            prediction.fill(int(token), logprob, tuple(islice(ranked, prediction.num_top)))


@dataclass(frozen=True)
class ModelStages:
    """The stages of a model that are here, and what computes them.

    config: of the whole model.
    tiers: that have its weights.
    pipeline: the ranks that compute the other stages.
    eos_ids: tokens that end a completion.
    threads, resident: choose the threads that compute, and keep the host's memory within its limit;
        None where a device computes.
    processors: change the logits that tokens are drawn from, and no log-probability.
    nonfinite_advice: what to do where a value is not finite.
    """

    config: ModelConfig
    decoder: LayerDecoder
    weights: TieredWeights
    tiers: TransferManager
    device: torch.device
    pipeline: Pipeline
    eos_ids: abc.Collection[int]
    threads: ThreadGovernor | None
    resident: ResidentMemory | None
    processors: LogitsProcessors | None
    nonfinite_advice: str


class Executor:
    """Takes the batches of a pass through the stages of the model, in the order that a schedule
    names.
    """

    def __init__(
        self,
        model: ModelStages,
        plan: RunPlan,
        cache_format: CacheFormat | None,
        cpu_attention: bool,
        observer: Observer | None = None,
    ) -> None:
        """Open the stores of a run.

        cache_format: how older keys and values are quantized; None: not at all.
        cpu_attention: where a device computes, the host attends to caches in its memory.
        """
        self.model, decoder, tiers = model, model.decoder, model.tiers
        self.cache = KVCache(
            decoder.config,
            tiers,
            decoder.dtype,
            plan.cache,
            room=plan.cache_room,
            cpu_attention=cpu_attention and tiers.compute_tier == "gpu",
            cache_format=cache_format,
            one_layer=plan.schedule.is_single_pass,
            names_tiers=model.pipeline.is_whole,
        )
        self.activations = ActivationStore(tiers, plan.activations)
        self._config, self._decoder, self._weights = decoder.config, decoder, model.weights
        self._device, self._pipeline = model.device, model.pipeline
        self._observer, self.expert_tokens = observer, plan.expert_tokens
        self._kept: KeptStates | None = None
        self._stages = stage_names(self._config)
        self._hidden_bytes = self._config.hidden_elements * decoder.dtype.itemsize  # of a token
        self._head_positions = max(1, _LOGIT_ELEMENTS // self._config.vocab_size)
        is_host = self._device.type == "cpu"
        self._workspace = Workspace(
            self._config,
            decoder.dtype.itemsize,
            "cpu" if is_host else "gpu",
            cache_format,
            converts=model.weights.are_converted,
            has_fused_attention=has_fused_attention(
                self._device, decoder.dtype, self._config.head_dim
            ),
            product_bytes=product_bytes(widest_matrix(self._config)) if is_host else 0,
        )
        self.peak_workspace_bytes = 0
        # outputs that this rank has computed, and `collect` has not returned
        self._uncollected: dict[Batch, BatchOutput] = {}
        self._collected_at = time.perf_counter()

    def keep_states(self, fingerprint: str, on_keep: Callable[[], None]) -> None:
        """Store the hidden states of a long pass now and then, so that a stopped run goes on.

        Nothing is stored where other ranks have a part of them, an observer must see all layers, or
        a layer hands more on to the next one.
        on_keep: called when all states are stored.
        """
        config, tiers = self.model.config, self.model.tiers
        numbers = [number for number in config.cache_layers if number is not None]
        hands_on = any(config.layer_states) or len(numbers) > len({*numbers})
        if self._pipeline.is_whole and self._observer is None and not hands_on:
            self._kept = KeptStates(tiers.folder, fingerprint, tiers.ledgers["disk"], on_keep)

    @property
    def num_resumed(self) -> int:
        """Sequences that went on from stored hidden states."""
        return 0 if self._kept is None else self._kept.num_read

    def close(self, is_done: bool) -> None:
        """Close the stores; is_done: nothing goes on from stored hidden states."""
        if self._kept is not None:
            self._kept.close(is_done)
        self.activations.close()
        self.cache.close()

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def first_stage(self, batches: abc.Sequence[Batch]) -> int:
        """Return the first stage of a pass that is to be computed, as items of `run`; earlier ones
        are stored.
        """
        return 0 if self._kept is None else self._kept.first_stage(batches)

    def run(self, current: Pass) -> None:
        """Run one pass.

        Where other ranks have the other stages, take the batches through those here; `collect` then
        has their outputs.

        Raises `Interrupted`. After this or another error nothing of the pass stays but hidden
        states that `keep_states` has stored.
        """
        steps = self._steps(current.items)
        visits = self._visits(steps, current)
        charged_until = time.perf_counter()
        # Not inference mode: tensors go to threads, and that mode is per thread.
        try:
            with torch.no_grad(), stopped_by(partial(self._must_stop, current)):
                for step in steps:
                    began = time.perf_counter()
                    self._weights.prefetch(visits)  # load_weight(i, j + 1, k)
                    output = self._compute(step, current)
                    # A pass's seconds are divided among its batches by what launching them took.
                    share_launch(step, current, time.perf_counter() - began)
                    if step[0].stage == self.num_stages - 1:
                        charged_until = charge(current.states.values(), charged_until)
                        for item in step:
                            self.activations.release_waiting(item.batch)
                            self._hand_on(item, current, output)
                    elif self._kept and self._kept.is_due() and current.ends_layer(step[-1]):
                        self._keep(step[-1], current, self._kept)
        except BaseException:
            self._weights.cancel()
            self.cache.cancel()
            self.activations.close()
            raise

    def _visits(
        self, steps: list[list[WorkItem]], current: Pass
    ) -> abc.Generator[StageVisit, None, None]:
        """Return the order in which weights are loaded: once for each visit of a stage, items in a
        row that use it, and the head several times.
        """
        uses = [
            self._num_head_uses(current.batches[item.batch])
            if self._stages[item.stage] == HEAD
            else int(item is step[0])
            for step in steps
            for item in step
        ]
        num_stages = self.num_stages - self._config.has_head
        return stage_visits(current.items, uses, num_stages, current.another_follows)

    def _steps(self, items: abc.Sequence[WorkItem]) -> list[list[WorkItem]]:
        """Divide the items of a pass into those that are computed together: batches that share a
        layer's experts.
        """
        steps: list[list[WorkItem]] = []
        for stage, grouped in groupby(items, key=lambda item: item.stage):
            visit = list(grouped)
            steps += (
                [visit]
                if self._weights.shares_experts(self._stages[stage])
                else [[item] for item in visit]
            )
        return steps

    def _must_stop(self, current: Pass) -> bool:
        """Keep to free threads and to the limit of memory; return whether the run is to end."""
        if self.model.threads is not None:
            self.model.threads.adapt()
        if self.model.resident is not None:
            self.model.resident.hold(self.peak_workspace_bytes)
        return current.should_stop()

    def collect(self, batch: Batch) -> BatchOutput:
        """Wait for the output of a batch that `run` has taken through this rank; in the order of
        the batches.

        The seconds since the last one was collected are charged to it.
        """
        output = self._uncollected.pop(batch, None)
        if output is None:  # the last rank computes it
            output = BatchOutput.of(batch)
            output.values = self._pipeline.receive_values(output.num_values)
        since, self._collected_at = self._collected_at, time.perf_counter()
        return self._finish(output, self._collected_at - since)

    def _hand_on(self, item: WorkItem, current: Pass, output: BatchOutput | None) -> None:
        """Send a batch's hidden states to the next rank, or its output to all others; report the
        output if there are no others.
        """
        batch, state = current.batches[item.batch], current.states.pop(item.batch)
        if output is None:
            assert state.hidden is not None
            self._pipeline.send_hidden(checksum(batch), state.hidden, state.check_finite())
        elif self._pipeline.is_whole:
            current.on_batch(self._finish(output, state.seconds))
        else:
            self._pipeline.send_values(output.values)
            self._uncollected[batch] = output

    def _begin(self, item: WorkItem, current: Pass) -> BatchState:
        """Return a batch's state with its hidden states on the compute device, and prefetch those
        of the next item.
        """
        batch, states = current.batches[item.batch], current.states
        current.on_item(batch)
        if self._must_stop(current):
            raise Interrupted("interrupted; everything finished so far is kept")
        state = states.get(item.batch)
        if state is None:
            state = states[item.batch] = self._new_state(batch)
            if self._kept is not None and item.stage:
                stored = self._kept.read(batch, self._config.hidden_elements, self._decoder.dtype)
                state.hidden, state.nonfinite_layer = (x.to(self._device) for x in stored)
                state.layers_checked += item.stage - self._config.has_embedding
            elif not self._config.has_embedding:
                shape = batch.num_tokens, self._config.hidden_elements
                state.hidden, state.nonfinite_layer = self._pipeline.receive_hidden(
                    checksum(batch), shape, self._decoder.dtype, self._device
                )
        elif state.hidden is None:  # load_activation(i, j, k), begun an item ago
            state.hidden = self.activations.load(item.batch)
        if state.rotary is None:
            state.rotary = self._decoder.rotary(state.attention.metadata.positions.on_device)
        # load_cache and load_activation(i, j, k + 1)
        self._prefetch(item, current.following.get(item), states)
        return state

    def _prefetch(
        self, item: WorkItem, following: WorkItem | None, states: dict[int, BatchState]
    ) -> None:
        """Begin to bring what the next item needs, hidden states and one layer of its caches."""
        if following is None or (state := states.get(following.batch)) is None:
            return
        if following.batch != item.batch:
            self.activations.prefetch(following.batch)
        if (layer := self._layer_of(following.stage)) is not None:
            # no room for two layers: it is brought when it is needed
            with suppress(MemoryLimitError):
                state.attention.metadata.prefetch(layer, self.cache)

    def _compute(self, step: list[WorkItem], current: Pass) -> BatchOutput | None:
        """Take the batches of a step through its stage; return what the head computed, and None
        after other stages.
        """
        stage = step[0].stage
        name, layer = self._stages[stage], self._layer_of(stage)
        if name == HEAD:
            return self._head(current.batches[step[0].batch], self._begin(step[0], current))
        # repeated: the matrices stay until all batches have used them
        with self._weights.stage(name, is_repeated=len(step) > 1) as weights:
            if layer is None:
                metadata = self._begin(step[0], current).attention.metadata
                hidden = self._decoder.embed(weights, metadata.token_ids, metadata.positions)
                self._end(step[0], current, hidden)
                return None
            remaining = deque(step)
            while remaining:
                items = [*remaining]
                batches = self._layer_batches(layer, remaining, current)
                with closing(self._decoder.layer(weights, layer, batches)) as outputs:
                    for item, hidden in zip(items, outputs):  # as many as were begun
                        state = current.states[item.batch]
                        # finite only if all elements are; `check_finite` looks at many at once
                        state.sums.append(hidden.sum(-1, dtype=torch.float32))
                        self._end(item, current, hidden)
        return None

    def _layer_batches(
        self, layer: int, remaining: deque[WorkItem], current: Pass
    ) -> abc.Iterator[LayerBatch]:
        """Begin items, and take them from `remaining`, as long as there is room for their batches
        to wait for a layer's experts; the first one is begun in any case.

        Room is `expert_tokens`, and bytes of the activation store. A waiting batch takes
        `waiting_copies` of its hidden states, but for one batch, `unclaimed`: its copies are part
        of the workspace, and only its hidden states are claimed while others wait.

        Batches of 40, 30 and 30 tokens, 2 copies, room for 70: the first is unclaimed and takes 20,
        the next 30 and fits beside its hidden states (15); the last waits for the next call.
        """
        decoder, first, free_tokens = self._decoder, remaining[0], float(self.expert_tokens)
        copies = decoder.config.waiting_copies
        unclaimed = max(remaining, key=lambda item: current.batches[item.batch].num_tokens)
        while remaining:
            item, tokens = remaining[0], current.batches[remaining[0].batch].num_tokens
            hidden_bytes, hidden_tokens = tokens * self._hidden_bytes, tokens / copies
            if item is not unclaimed:
                # Beside its copies it has its hidden states, until the layer has read them.
                fits = tokens + hidden_tokens <= free_tokens and self.activations.claim_waiting(
                    item.batch, copies * hidden_bytes
                )
                if not fits and item is not first:
                    return
                unclaimed = unclaimed if fits else item
            free_tokens -= hidden_tokens if item is unclaimed else tokens
            state = self._begin(remaining.popleft(), current)
            if item is unclaimed and (remaining or item is not first):
                self.activations.claim_waiting(item.batch, hidden_bytes)
            attend = LayerAttention(
                state.attention, layer, decoder.config.window(layer), decoder.attention, self.cache
            )
            batch, state.hidden = LayerBatch(state.hidden, state.rotary, attend), None
            yield batch

    def _end(self, item: WorkItem, current: Pass, hidden: Tensor) -> None:
        """Keep the hidden states behind a stage: where they are if the same batch is next, else in
        the activation store.
        """
        state = current.states[item.batch]
        state.hidden = hidden
        if self._observer is not None:
            self._observer.on_hidden(item.stage, current.batches[item.batch], hidden)
        if item.stage == self.num_stages - 1:
            return
        self.activations.release_waiting(item.batch)
        following = current.following.get(item)
        if following is None or following.batch != item.batch:
            # store_activation(i, j, k), done in the background
            self.activations.store(item.batch, hidden)
            state.hidden = state.rotary = None
            if state.sums:  # those of many waiting batches would be large
                state.check_finite()

    def _layer_of(self, stage: int) -> int | None:
        """Return the layer, counted from the first one here, that a stage is; None for embedding
        and head.
        """
        return None if self._stages[stage] in (EMBED, HEAD) else stage - self._config.has_embedding

    def _keep(self, last: WorkItem, current: Pass, kept: KeptStates) -> None:
        """Store the hidden states of all batches behind the stage of the last item on the disk."""

        def states() -> abc.Iterator[tuple[Batch, Tensor, Tensor]]:
            for number, batch in enumerate(current.batches):
                state = current.states[number]
                hidden = self.activations.load(number) if state.hidden is None else state.hidden
                yield batch, hidden, state.check_finite()
                if state.hidden is None:
                    self.activations.store(number, hidden)

        num_tokens = sum(batch.num_tokens for batch in current.batches)
        kept.keep(last.stage, states(), num_tokens * (self._hidden_bytes + torch.int64.itemsize))

    def _new_state(self, batch: Batch) -> BatchState:
        """Lay a batch out, and choose what attends for it."""
        decoder, dtype = self._decoder, self._decoder.dtype
        metadata = build_attention_metadata(batch, self._device, self.cache)
        attention: AttentionBackend
        if attends_in_a_loop(self.cache.codec, self._device, dtype):
            attention = LoopAttention(metadata, self.cache.codec)
        else:
            windows = {decoder.config.window(layer) for layer in range(decoder.config.num_layers)}
            attention = SegmentAttention(metadata, self.cache.codec, windows, dtype)
        num_tokens = len(metadata.token_ids.on_device)
        self._note_workspace(
            self._workspace.layer(
                num_tokens,
                metadata.longest_prompt,
                metadata.cached_positions,
                metadata.largest_prefix,
            )
        )
        return BatchState(attention, self._config.layers_before)

    def _note_workspace(self, num_bytes: int) -> None:
        self.peak_workspace_bytes = max(self.peak_workspace_bytes, num_bytes)

    def _head(self, batch: Batch, state: BatchState) -> BatchOutput:
        """Predict for a batch from its last hidden states, a slice of predictions after another."""
        output = BatchOutput.of(batch)
        assert state.hidden is not None
        # On the device until the end, so that the host waits for it once.
        values = [state.check_finite().double()]
        # The prefetcher was told that the head is used so often, before there were predictions.
        for number in range(self._num_head_uses(batch)):
            first = number * self._head_positions
            predictions = output.predictions[first : first + self._head_positions]
            with self._weights.stage(self._stages[-1]) as weights:
                values.append(self._predict(weights, state.hidden, predictions, output.num_top))
        output.values = torch.cat(values).tolist()
        return output

    def _num_head_uses(self, batch: Batch) -> int:
        """Return in how many slices of positions a batch passes the head."""
        positions = sum(
            item.sequence.num_draws + len(item.sequence.targets) for item in batch.scheduled
        )
        return -(-positions // self._head_positions)

    def _predict(
        self, weights: StageWeights, hidden: Tensor, predictions: list[Prediction], num_top: int
    ) -> Tensor:
        """Return the values of a slice of predictions (`BatchOutput.values`), in float64, which has
        them all.
        """
        positions = [prediction.position for prediction in predictions]
        targets = [prediction.target or 0 for prediction in predictions]
        drawn = {i: p.sampling for i, p in enumerate(predictions) if p.sampling is not None}
        prediction_rows, tokens, drawn_rows = upload(self._device, (positions, targets, [*drawn]))
        logits = self._decoder.head(weights, hidden.index_select(0, prediction_rows))
        self._note_workspace(self._workspace.head(len(hidden), len(predictions)))
        if self._observer is not None and len(drawn) < len(predictions):
            scored = [i for i in range(len(predictions)) if i not in drawn]
            self._observer.on_logits(
                [predictions[i] for i in scored], logits[scored] if drawn else logits
            )
        if len(drawn) == len(predictions):
            tokens = self._draw(logits, [*drawn.values()])
        elif drawn:
            tokens[drawn_rows] = self._draw(logits.index_select(0, drawn_rows), [*drawn.values()])
        normalizers = log_normalizers(logits)
        columns = [logits.gather(1, tokens[:, None]) - normalizers]
        if num_top:
            most, ids = most_probable(logits, num_top)
            columns += [ids, most - normalizers]
        if any(prediction.needs_argmax for prediction in predictions):
            greedy = greedy_tokens(logits)  # as drawn at temperature 0; drawn tokens are kept
            tokens = (
                greedy
                if not drawn
                else greedy.index_copy(0, drawn_rows, tokens.index_select(0, drawn_rows))
            )
        return torch.cat([tokens[:, None].double(), *columns], 1).flatten()  # all become float64

    def _draw(self, logits: Tensor, sampling: list[SamplingParams]) -> Tensor:
        """Draw a token from each row, by the model's generation settings and the requests'."""
        if self.model.processors is not None:
            logits, sampling = self.model.processors(logits, sampling)
        return sample_tokens(logits, sampling)

    @staticmethod
    def _finish(output: BatchOutput, seconds: float) -> BatchOutput:
        """Fill the output in, and advance the batch's sequences past what was computed."""
        output.fill()
        output.seconds = seconds
        for item in output.batch.scheduled:  # last: after an out-of-memory all is computed again
            item.sequence.num_computed += item.count
        return output


def checksum(batch: Batch) -> int:
    """Return a number that is the same on all ranks of a pipeline which compute the same tokens."""
    computed = [
        (item.sequence.start, item.sequence.num_computed, item.count, item.sequence.tokens[-1])
        for item in batch.scheduled
    ]
    return zlib.crc32(repr(computed).encode())
