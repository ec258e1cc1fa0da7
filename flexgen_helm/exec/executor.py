"""The executor: interprets work items over batches. It knows stages and tensors, no model names and no policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen_helm.core.errors import Interrupted
from flexgen_helm.core.rows import Batch, Row
from flexgen_helm.exec.layout import Layout, layout
from flexgen_helm.exec.sampling import Draw, choose
from flexgen_helm.exec.schedule import WorkItem
from flexgen_helm.models.decoder import Decoder, Rotary
from flexgen_helm.models.spec import RopeSpec, stages
from flexgen_helm.store.kv import KVCache
from flexgen_helm.store.weights import WeightStore

# Logits that exist at once, in elements: nothing of size tokens x vocabulary is ever materialized.
_LOGIT_ELEMENTS = 1 << 24


@dataclass
class RowOutcome:
    """What the head found for one row. scores: log-probabilities of the prompt's tokens 1, 2, …; drawn: tokens with
    their log-probabilities; bad_stage: the stage after which a value was not finite, None if all were."""

    scores: list[float] = field(default_factory=list)
    drawn: list[tuple[int, float]] = field(default_factory=list)
    bad_stage: str | None = None


@dataclass(frozen=True)
class BatchOutcome:
    """All rows of a batch that has passed the head, and the seconds that its items took."""

    batch: Batch
    rows: list[RowOutcome]
    seconds: float


@dataclass(eq=False)
class _Live:
    """A batch on its way through the stages."""

    layout: Layout
    rotary: dict[RopeSpec, Rotary]
    hidden: Tensor
    bad_stage: Tensor  # [T], index of the first stage with a value that is not finite, -1 while all are
    seconds: float = 0.0


class Executor:
    """Takes batches through the stages in the order that a schedule names."""

    def __init__(self, decoder: Decoder, weights: WeightStore, cache: KVCache, device: torch.device) -> None:
        self._decoder = decoder
        self._weights = weights
        self._cache = cache
        self._device = device
        self._stages = stages(decoder.spec)
        self.peak_workspace_bytes = 0

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def run(
        self,
        batches: Sequence[Batch],
        items: Iterable[WorkItem],
        draws: Callable[[Row], list[Draw]],
        on_batch: Callable[[BatchOutcome], None],
        should_stop: Callable[[], bool],
    ) -> None:
        """Interpret `items`; `on_batch` is called as soon as a batch has passed its last stage.

        draws(row): how each of the row's next tokens is drawn. Raises `Interrupted` between two items.
        """
        live: dict[int, _Live] = {}
        with torch.inference_mode():
            for item in items:
                if should_stop():
                    raise Interrupted("interrupted; everything finished so far is kept")
                began = time.perf_counter()
                if item.stage == 0:
                    live[item.batch] = self._embed(batches[item.batch])
                    outcome = None
                elif item.stage < self.num_stages - 1:
                    self._layer(live[item.batch], item.stage)
                    outcome = None
                else:
                    outcome = self._head(batches[item.batch], live[item.batch], draws)
                state = live[item.batch]
                state.seconds += time.perf_counter() - began
                if outcome is not None:
                    del live[item.batch]
                    on_batch(BatchOutcome(batches[item.batch], outcome, state.seconds))

    def _embed(self, batch: Batch) -> _Live:
        flat = layout(batch, self._decoder.spec.windows, self._device)
        with self._weights.stage(self._stages[0]) as weights:
            hidden = self._decoder.embed(weights, flat.token_ids, flat.positions)
        bad = torch.full((hidden.shape[0],), -1, device=self._device)
        return _Live(flat, self._decoder.rotary(flat.positions), hidden, bad)

    def _layer(self, state: _Live, stage: int) -> None:
        layer = stage - 1
        flat, scoring, cache = state.layout, self._decoder.scoring, self._cache
        window = self._decoder.spec.window(layer)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flat.attend(layer, window, scoring, cache, q, k, v)

        with self._weights.stage(self._stages[stage]) as weights:
            state.hidden = self._decoder.layer(weights, layer, state.hidden, state.rotary, attend)
        # One sum a token meets every element; no synchronization with an accelerator until the head.
        finite = torch.isfinite(state.hidden.sum(-1, dtype=torch.float32))
        state.bad_stage = torch.where((state.bad_stage < 0) & ~finite, stage, state.bad_stage)

    def _head(self, batch: Batch, state: _Live, draws: Callable[[Row], list[Draw]]) -> list[RowOutcome]:
        #  tokens fed   a b c      positions 0 and 1 score b and c; position 2 (the row's last) is drawn from
        #  predicts     b c ?
        asked: list[_Asked] = []
        outcomes: list[RowOutcome] = []
        first = 0
        for chunk, bad in zip(batch.chunks, self._bad_stages(batch, state)):
            row, outcome = chunk.row, RowOutcome(bad_stage=bad)
            outcomes.append(outcome)
            if bad is None:
                if row.score and row.is_prefill:
                    targets = row.tokens[row.computed + 1 : row.prompt_len]
                    asked += [_Asked(outcome, first + i, target, None) for i, target in enumerate(targets)]
                if row.draws:
                    asked += [_Asked(outcome, first + chunk.count - 1, None, draw) for draw in draws(row)]
            first += chunk.count
            row.computed += chunk.count

        step = max(1, _LOGIT_ELEMENTS // self._decoder.spec.vocab_size)
        for begin in range(0, len(asked), step):
            self._predict(state.hidden, asked[begin : begin + step])
        return outcomes

    def _predict(self, hidden: Tensor, asked: list["_Asked"]) -> None:
        """Log-probabilities of one slice of the positions asked for, from the raw logits."""
        at = torch.tensor([a.position for a in asked], device=self._device)
        with self._weights.stage(self._stages[-1]) as weights:
            logits = self._decoder.head(weights, hidden.index_select(0, at))
        self.peak_workspace_bytes = max(self.peak_workspace_bytes, logits.numel() * logits.itemsize)
        tokens = torch.tensor([0 if a.target is None else a.target for a in asked], device=self._device)
        drawing = [i for i, a in enumerate(asked) if a.target is None]
        if drawing:
            rows = torch.tensor(drawing, device=self._device)
            tokens[rows] = choose(logits.index_select(0, rows), [asked[i].draw for i in drawing])  # type: ignore[misc]
        chosen = logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        for a, token, logprob in zip(asked, tokens.tolist(), chosen.tolist()):
            if logprob != logprob:
                a.outcome.bad_stage = a.outcome.bad_stage or self._stages[-1]
            elif a.target is None:
                a.outcome.drawn.append((token, logprob))
            else:
                a.outcome.scores.append(logprob)

    def _bad_stages(self, batch: Batch, state: _Live) -> list[str | None]:
        bad = state.bad_stage.tolist()
        found: list[str | None] = []
        first = 0
        for chunk in batch.chunks:
            worst = [index for index in bad[first : first + chunk.count] if index >= 0]
            found.append(self._stages[min(worst)] if worst else None)
            first += chunk.count
        return found


@dataclass(frozen=True, eq=False)
class _Asked:
    """One position of the batch whose prediction is wanted: the score of `target`, or a token drawn by `draw`."""

    outcome: RowOutcome
    position: int
    target: int | None
    draw: Draw | None
