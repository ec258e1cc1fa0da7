"""The results of one call of `Engine.run`, and the progress towards them. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flexgen_helm.request import GenerationResult, Progress

OnResult = Callable[[int, GenerationResult], None]
# Seconds between two reports of progress in the middle of a batch.
_REPORT_EVERY_S = 0.1


class Computing(Protocol):
    """Some of the requests. Tokens computed so far, and expected at the end."""

    expected_tokens: float

    @property
    def computed_tokens(self) -> float: ...


class ResultCollector:
    """The results of one call of `Engine.run`, each reported as soon as it is known, and the progress towards them."""

    def __init__(
        self, num_places: int, on_result: OnResult | None, progress: Callable[[Progress], None] | None
    ) -> None:
        self._results: list[GenerationResult | None] = [None] * num_places
        self._on_result, self._progress = on_result, progress
        self._began = time.perf_counter()
        self._num_finished = 0
        self._reported_at = 0.0
        self.runs: list[Computing] = []

    def deliver(self, place: int, result: GenerationResult) -> None:
        self._results[place] = result
        self._num_finished += 1
        if self._on_result is not None:
            self._on_result(place, result)

    def results(self) -> list[GenerationResult]:
        """Return all results, in the order of the requests."""
        missing = [place for place, result in enumerate(self._results) if result is None]
        assert not missing, f"requests {missing[:5]} were never answered"
        return [result for result in self._results if result is not None]

    def report(self, *, at_once: bool = True) -> None:
        """Report progress; at_once: even if it was reported just now."""
        now = time.perf_counter()
        if not at_once and now - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = now
        if self._progress is None:
            return
        tokens = sum(run.computed_tokens for run in self.runs)
        total = max(tokens, sum(run.expected_tokens for run in self.runs))
        self._progress(Progress(tokens, round(total), self._num_finished, len(self._results), now - self._began))
