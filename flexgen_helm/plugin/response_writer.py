"""What is written to the journal, and when."""

from __future__ import annotations

import logging
import time

from flexgen_helm.engine.response_cache import ResponseCache, ResponseCacheError, response_cache_path
from flexgen_helm.errors import FlexgenError
from flexgen_helm.request import GenerationResult

logger = logging.getLogger(__name__)

JOURNAL_ROWS, JOURNAL_S = 64, 2.0  # a transaction is written after so many answers or seconds


class ResponseWriter:
    """Writes answers to the journal in transactions. A journal that fails costs the memory, never the answers."""

    def __init__(self, fingerprint: str, wanted: bool) -> None:
        self._journal: ResponseCache | None = None
        self._pending: dict[str, GenerationResult] = {}
        self._written = time.monotonic()
        if wanted:
            from flexgen_helm.checkpoint.paths import state_dir

            try:
                self._journal = ResponseCache(response_cache_path(state_dir(), fingerprint))
            except ResponseCacheError as error:
                self._give_up(error)

    def _give_up(self, error: FlexgenError) -> None:
        logger.warning("Answers are not kept for a later run: %s", error)
        self.close(flush=False)

    def get_many(self, keys: list[str]) -> dict[str, GenerationResult]:
        try:
            return self._journal.get_many(keys) if self._journal else {}
        except ResponseCacheError as error:
            self._give_up(error)
            return {}

    def add(self, key: str, result: GenerationResult) -> None:
        self._pending[key] = result
        if len(self._pending) >= JOURNAL_ROWS or time.monotonic() - self._written > JOURNAL_S:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        try:
            if self._journal and pending:
                self._journal.put_many(pending)
        except ResponseCacheError as error:
            self._give_up(error)
        self._written = time.monotonic()

    def close(self, flush: bool = True) -> None:
        if flush:
            self._flush()
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
