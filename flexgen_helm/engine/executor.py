"""The executor: interprets work items over batches. It knows stages and tensors, no model names and no policy."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen_helm.engine.attention_metadata import AttentionMetadata, build_attention_metadata
from flexgen_helm.engine.sampler import SamplingParams, sample_tokens
from flexgen_helm.engine.schedule import WorkItem
from flexgen_helm.errors import Interrupted, MemoryLimitError
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.config import RopeConfig, stage_names
from flexgen_helm.models.decoder import Decoder, Rotary, StageWeights
from flexgen_helm.offload.activations import ActivationStore
from flexgen_helm.offload.weights import WeightStore
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.sequence import Batch, Sequence

# Logits that exist at once, in elements: nothing of size tokens x vocabulary is ever materialized.
_LOGIT_ELEMENTS = 1 << 24


@dataclass
class SequenceOutput:
    """What the head found for one row. scores: log-probabilities of the prompt's tokens 1, 2, …; drawn: tokens with
    their log-probabilities; bad_stage: the stage after which a value was not finite, None if all were."""

    scores: list[float] = field(default_factory=list)
    drawn: list[tuple[int, float]] = field(default_factory=list)
    nonfinite_stage: str | None = None


@dataclass(frozen=True)
class BatchOutput:
    """All rows of a batch that has passed the head, and the seconds that its items took."""

    batch: Batch
    outputs: list[SequenceOutput]
    seconds: float


@dataclass(eq=False)
class _Live:
    """A batch on its way through the stages."""

    layout: AttentionMetadata
    rotary: dict[RopeConfig, Rotary] | None  # None, as hidden, while other batches have their turn
    hidden: Tensor | None  # None while the store keeps it
    bad_stage: Tensor  # [T], index of the first stage with a value that is not finite, -1 while all are
    seconds: float = 0.0


class Executor:
    """Takes batches through the stages in the order that a schedule names."""

    def __init__(
        self, decoder: Decoder, weights: WeightStore, cache: KVCache, hidden: ActivationStore, device: torch.device
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._cache = cache
        self._hidden = hidden
        self._device = device
        self._stages = stage_names(decoder.config)
        self._head_rows = max(1, _LOGIT_ELEMENTS // decoder.config.vocab_size)
        self._workspace: Workspace | None = None
        self.peak_workspace_bytes = 0

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def run(
        self,
        batches: abc.Sequence[Batch],
        items: Iterable[WorkItem],
        draws: Callable[[Sequence], list[SamplingParams]],
        on_batch: Callable[[BatchOutput], None],
        should_stop: Callable[[], bool],
        again: bool = False,
    ) -> None:
        """Interpret `items`; `on_batch` is called as soon as a batch has passed its last stage.

        draws(row): how each of the row's next tokens is drawn. again: another pass is certain to follow, so its first
        weights may be loaded already. Raises `Interrupted` between two items; after this or another error nothing
        of the pass is kept.
        """
        orders = list(items)
        self._weights.begin(self._visits(batches, orders), again)
        live: dict[int, _Live] = {}
        try:
            with torch.no_grad():  # not inference mode: tensors go to threads, and that mode is per thread
                for place, item in enumerate(orders):
                    if should_stop():
                        raise Interrupted("interrupted; everything finished so far is kept")
                    following = orders[place + 1] if place + 1 < len(orders) else None
                    began = time.perf_counter()
                    outcome = self._step(batches[item.batch], item, following, live, draws)
                    state = live[item.batch]
                    state.seconds += time.perf_counter() - began
                    if outcome is not None:
                        del live[item.batch]
                        for chunk in batches[item.batch].scheduled:  # last: where memory ran out, all is computed again
                            chunk.sequence.num_computed += chunk.count
                        on_batch(BatchOutput(batches[item.batch], outcome, state.seconds))
        except BaseException:
            self._weights.cancel()
            self._cache.cancel()
            self._hidden.close()
            raise

    def _step(
        self,
        batch: Batch,
        item: WorkItem,
        following: WorkItem | None,
        live: dict[int, _Live],
        draws: Callable[[Sequence], list[SamplingParams]],
    ) -> list[SequenceOutput] | None:
        """One item, while what the following one needs is on its way; the rows' outcomes after the last stage."""
        if item.stage == 0:
            live[item.batch] = self._embed(batch)
        state = live[item.batch]
        if state.hidden is None:
            state.hidden = self._hidden.load(item.batch)
        if state.rotary is None:
            state.rotary = self._decoder.rotary(state.layout.positions)
        self._look_ahead(item, following, live)
        outcome = None
        if item.stage == self.num_stages - 1:
            outcome = self._head(batch, state, draws)
        elif item.stage:
            self._layer(state, item.stage)
        if outcome is None and (following is None or following.batch != item.batch):
            self._hidden.store(item.batch, state.hidden)
            state.hidden = state.rotary = None  # of a whole data set under way, even the rotations would be many
        return outcome

    def _look_ahead(self, item: WorkItem, following: WorkItem | None, live: dict[int, _Live]) -> None:
        if following is None or (state := live.get(following.batch)) is None:
            return
        if following.batch != item.batch:
            self._hidden.prefetch(following.batch)
        if 0 < following.stage < self.num_stages - 1:
            with suppress(MemoryLimitError):  # no room for two: it is brought when it is needed
                state.layout.prefetch(following.stage - 1, self._cache)

    def _embed(self, batch: Batch) -> _Live:
        flat = build_attention_metadata(batch, self._decoder.config.windows, self._device, self._cache.codec)
        with self._weights.stage(self._stages[0]) as weights:
            hidden = self._decoder.embed(weights, flat.token_ids, flat.positions)
        bad = torch.full((hidden.shape[0],), -1, device=self._device)
        if self._workspace is None:
            fused = self._device.type == "cpu" and hidden.dtype == torch.float32
            direct = not fused or self._decoder.config.attn_softcap is not None
            fmt = None if self._cache.codec is None else self._cache.codec.cache_format
            self._workspace = Workspace(self._decoder.config, hidden.element_size(), direct, fmt)
        self._hold(
            self._workspace.layer(len(hidden), flat.longest_prompt, flat.cached_positions, flat.shared_positions)
        )
        return _Live(flat, None, hidden, bad)

    def _hold(self, num_bytes: int) -> None:
        self.peak_workspace_bytes = max(self.peak_workspace_bytes, num_bytes)

    def _layer(self, state: _Live, stage: int) -> None:
        layer = stage - 1
        flat, scoring, cache = state.layout, self._decoder.attention, self._cache
        window = self._decoder.config.window(layer)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flat.attend(layer, window, scoring, cache, q, k, v)

        assert state.hidden is not None and state.rotary is not None
        with self._weights.stage(self._stages[stage]) as weights:
            state.hidden = self._decoder.layer(weights, layer, state.hidden, state.rotary, attend)
        # One sum a token meets every element; no synchronization with an accelerator until the head.
        finite = torch.isfinite(state.hidden.sum(-1, dtype=torch.float32))
        state.bad_stage = torch.where((state.bad_stage < 0) & ~finite, stage, state.bad_stage)

    def _head(
        self, batch: Batch, state: _Live, draws: Callable[[Sequence], list[SamplingParams]]
    ) -> list[SequenceOutput]:
        #  tokens fed   a b c      positions 0 and 1 score b and c; position 2 (the row's last) is drawn from
        #  predicts     b c ?
        asked: list[_Asked] = []
        outcomes: list[SequenceOutput] = []
        first, uses = 0, self._head_uses(batch)
        for chunk, bad in zip(batch.scheduled, self._bad_stages(batch, state)):
            row, outcome = chunk.sequence, SequenceOutput(nonfinite_stage=bad)
            outcomes.append(outcome)
            if bad is None:
                if row.needs_scores and row.is_prefill:  # as `_head_uses` counts
                    asked += [_Asked(outcome, first + i, target, None) for i, target in enumerate(row.targets)]
                if row.num_draws:
                    asked += [_Asked(outcome, first + chunk.count - 1, None, draw) for draw in draws(row)]
            first += chunk.count

        assert state.hidden is not None
        # As many uses of the head as were announced, though a bad row may have left the last ones empty.
        for number in range(uses):
            with self._weights.stage(self._stages[-1]) as weights:
                some = asked[number * self._head_rows : (number + 1) * self._head_rows]
                if some:
                    self._predict(weights, state.hidden, some)
        return outcomes

    def _head_uses(self, batch: Batch) -> int:
        """Slices of positions in which a batch passes the head."""
        asked = sum(chunk.sequence.num_draws for chunk in batch.scheduled)
        for chunk in batch.scheduled:
            if chunk.sequence.needs_scores and chunk.sequence.is_prefill:
                asked += len(chunk.sequence.targets)
        return -(-asked // self._head_rows)

    def _visits(self, batches: abc.Sequence[Batch], items: abc.Sequence[WorkItem]) -> list[tuple[str, int]]:
        """The stages in order, each with the number of times in a row that its weights are used."""
        visits: list[tuple[str, int]] = []
        for item in items:
            name = self._stages[item.stage]
            uses = 1 if item.stage < self.num_stages - 1 else self._head_uses(batches[item.batch])
            if visits and visits[-1][0] == name:
                visits[-1] = name, visits[-1][1] + uses
            elif uses:
                visits.append((name, uses))
        return visits

    def _predict(self, weights: StageWeights, hidden: Tensor, asked: list["_Asked"]) -> None:
        """Log-probabilities of one slice of the positions asked for, from the raw logits."""
        at = torch.tensor([a.position for a in asked], device=self._device)
        logits = self._decoder.head(weights, hidden.index_select(0, at))
        assert self._workspace is not None
        self._hold(self._workspace.head(len(hidden), len(asked)))
        tokens = torch.tensor([0 if a.target is None else a.target for a in asked], device=self._device)
        drawing = [i for i, a in enumerate(asked) if a.target is None]
        if drawing:
            rows = torch.tensor(drawing, device=self._device)
            tokens[rows] = sample_tokens(logits.index_select(0, rows), [asked[i].draw for i in drawing])  # type: ignore[misc]
        chosen = logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        for a, token, logprob in zip(asked, tokens.tolist(), chosen.tolist()):
            if not math.isfinite(logprob):
                a.outcome.nonfinite_stage = a.outcome.nonfinite_stage or self._stages[-1]
            elif a.target is None:
                a.outcome.drawn.append((token, logprob))
            else:
                a.outcome.scores.append(logprob)

    def _bad_stages(self, batch: Batch, state: _Live) -> list[str | None]:
        bad = state.bad_stage.tolist()
        found: list[str | None] = []
        first = 0
        for chunk in batch.scheduled:
            worst = [index for index in bad[first : first + chunk.count] if index >= 0]
            found.append(self._stages[min(worst)] if worst else None)
            first += chunk.count
        return found


@dataclass(frozen=True, eq=False)
class _Asked:
    """One position of the batch whose prediction is wanted: the score of `target`, or a token drawn by `draw`."""

    outcome: SequenceOutput
    position: int
    target: int | None
    draw: SamplingParams | None
