"""Results that are computed once: a response cache on disk, one SQLite file per engine fingerprint.

Beside results it has the tokens that were drawn of answers that have not ended, until they have. An
interrupted run goes on behind them.

The fingerprint names weights, tokenizer, formats and compute type, so results of other engines are
in other files.
Values are JSON: a row that is not a well-formed result is ignored, never executed. Each `put_many`
is one durable transaction. SQLite's rollback journal is used instead of its write-ahead log, which
network disks break.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from flexgen_helm.errors import FlexgenError
from flexgen_helm.progress import Message, report
from flexgen_helm.request import (
    MAX_COMPLETIONS,
    Completion,
    Cost,
    DrawnToken,
    GenerationResult,
    TopLogprobs,
)
from flexgen_helm.shared_sizes import KEEP_EVERY_S

SCHEMA_VERSION = "1"
BUSY_TIMEOUT_S = 60.0
# A transaction is written after so many results or seconds.
MAX_PENDING_RESULTS, MAX_PENDING_S = 64, 2.0
# Where writing drawn tokens takes more than this share of the time, they wait longer, at most so
# many seconds.
_MAX_KEEP_EVERY_S, _MAX_KEEP_SHARE = 300.0, 0.01
# Takes the write lock at once: a reader that upgrades later could fail without waiting.
_BEGIN = "BEGIN IMMEDIATE"
_KEYS_PER_QUERY = 500  # below the 999 parameters of a statement that old SQLite versions allow


class ResponseCacheError(FlexgenError):
    """The response cache cannot be read or written; the message names the file.

    Next: Move the file away, and its answers are computed again; `--disable-cache` runs without it.
    """


def response_cache_path(home: Path, fingerprint: str) -> Path:
    """Return the file with the results of one engine. Its folder is called `journal`, as in version
    0.1.0.
    """
    readable = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fingerprint)
    name = fingerprint if readable else hashlib.sha256(fingerprint.encode()).hexdigest()
    return home / "journal" / f"{name}.sqlite"


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class _Row:
    """A successful `GenerationResult` as it is stored."""

    completions: tuple[Completion, ...]
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[float | None, ...] | None
    cost: Cost
    prompt_greedy: tuple[bool | None, ...] | None = None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None = None


_ROW = TypeAdapter(_Row)
_DRAWN = TypeAdapter(list[DrawnToken], config=ConfigDict(strict=True, allow_inf_nan=False))
# Tokens of an answer that has not ended: completion -> (step of the first one, tokens).
DrawnTokens = Mapping[int, tuple[int, Sequence[DrawnToken]]]
_STORED = object()
# Fields that are left out at these values: rows of versions without them stay what they were.
_LEFT_OUT = {"error": None, "prompt_greedy": None, "prompt_top_logprobs": None, "top_logprobs": ()}


def encode_result(result: GenerationResult) -> str:
    """Return the JSON of a successful result. Raises `ValueError` for an error or a value that is
    not finite.
    """
    if result.error is not None:
        raise ValueError("a failed request has no result to store")
    return json.dumps(result, default=_fields, allow_nan=False, separators=(",", ":"))


def _fields(record: object) -> dict[str, Any]:
    """Return what is stored of a result, a completion, or a cost."""
    return {
        name: value for name, value in vars(record).items() if value != _LEFT_OUT.get(name, _STORED)
    }


def decode_result(text: object) -> GenerationResult:
    """Invert `encode_result`. Raises `ValueError` for anything that it did not write."""
    if not isinstance(text, str):
        raise ValueError(f"a stored result is {type(text).__name__}, not text")
    row = _ROW.validate_json(text)
    for completion in row.completions:
        if not len(completion.tokens) == len(completion.token_ids) == len(completion.logprobs):
            raise ValueError("tokens, ids and log-probabilities differ in number")
        if len(completion.top_logprobs) not in (0, len(completion.tokens)):
            raise ValueError("tokens and their alternatives differ in number")
    return GenerationResult(**vars(row))


class ResponseCache:
    """Results, and tokens of unfinished answers, by request key in one SQLite file.

    Used by one thread at a time; safe among any number of processes.
    """

    def __init__(self, path: Path, model: str = "") -> None:
        """Open or create. Raises `ResponseCacheError` where the file is foreign, damaged or of
        another version.

        model: whose answers these are, for people.
        """
        self.path, self._model = path, model
        self._writer = uuid.uuid4().hex[:8]  # tokens of two processes do not mix
        with self._as_cache_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        """Make the tables that are missing, and check the version of the format."""
        execute = self._connection.execute
        execute("PRAGMA synchronous=FULL")
        with self._connection:
            execute(_BEGIN)
            execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
            )
            execute(
                "CREATE TABLE IF NOT EXISTS drawn (key TEXT, writer TEXT, completion INTEGER, step "
                "INTEGER, value TEXT NOT NULL, PRIMARY KEY (key, writer, completion, step)) "
                "WITHOUT ROWID"
            )
            execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (SCHEMA_VERSION,))
            if self._model:
                execute("INSERT OR IGNORE INTO meta VALUES ('model', ?)", (self._model,))
        (version,) = execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        if version != SCHEMA_VERSION:
            raise ResponseCacheError(
                f"the response cache {self.path} has format {version!r}, this version reads "
                f"{SCHEMA_VERSION!r}; move the file away, its results will be computed again"
            )

    @contextmanager
    def _as_cache_errors(self) -> Iterator[None]:
        """Raise errors of SQLite and of the system as `ResponseCacheError`."""
        try:
            yield
        except sqlite3.OperationalError as error:  # locked, full, read-only, cannot open
            raise ResponseCacheError(
                f"the response cache {self.path} cannot be used now: {error}"
            ) from error
        except sqlite3.DatabaseError as error:
            raise ResponseCacheError(
                f"the response cache {self.path} is damaged or not a response cache ({error}); "
                "move the file away, its results will be computed again"
            ) from error
        except OSError as error:
            raise ResponseCacheError(
                f"the response cache {self.path} cannot be created: {error.strerror}"
            ) from error

    def get_many(self, keys: Iterable[str]) -> dict[str, GenerationResult]:
        """Return the stored results among `keys`."""
        results = {}
        for key, value in self._select("SELECT key, value FROM answers WHERE", keys):
            try:
                results[key] = decode_result(value)
            except ValueError:
                continue  # not ours
        return results

    def take_drawn(self, keys: Iterable[str]) -> dict[str, list[list[DrawnToken]]]:
        """Return what was drawn of unfinished answers among `keys`, by completion, and go on with
        it as the writer.

        A part that is missing or not well-formed ends its completion.
        """
        found: dict[str, dict[str, list[list[DrawnToken]]]] = {}
        query = f"SELECT * FROM drawn WHERE completion BETWEEN 0 AND {MAX_COMPLETIONS - 1} AND"
        for key, writer, completion, step, value in self._select(
            query, keys, "ORDER BY key, writer, completion, step"
        ):
            completions = found.setdefault(key, {}).setdefault(writer, [])
            try:
                tokens = _DRAWN.validate_json(value)
            except ValueError:
                continue  # not ours
            completions += [[] for _ in range(completion + 1 - len(completions))]
            if step == len(completions[completion]):
                completions[completion] += tokens
        longest = {
            key: max(by_writer.values(), key=lambda drawn: sum(map(len, drawn)))
            for key, by_writer in found.items()
        }
        taken = {key: drawn for key, drawn in longest.items() if any(drawn)}
        if taken:
            rows = {
                key: {i: (0, part) for i, part in enumerate(drawn)} for key, drawn in taken.items()
            }
            self.put_many({}, rows, taken)
        return taken

    def _select(
        self, query: str, keys: Iterable[str], order: str = ""
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of `keys`."""
        wanted = list(dict.fromkeys(keys))
        with self._as_cache_errors():
            for start in range(0, len(wanted), _KEYS_PER_QUERY):
                part = wanted[start : start + _KEYS_PER_QUERY]
                marks = ",".join("?" * len(part))
                yield from self._connection.execute(
                    f"{query} key IN ({marks}) {order}", part
                ).fetchall()

    def put_many(
        self,
        results: Mapping[str, GenerationResult],
        drawn: Mapping[str, DrawnTokens] = MappingProxyType({}),
        replaced: Iterable[str] = (),
    ) -> None:
        """Store results and tokens of unfinished answers, all or none; they are on the disk when
        this returns.

        replaced: keys whose tokens so far are deleted, besides those of the results.
        """
        rows = [(key, encode_result(result)) for key, result in results.items()]
        parts = [
            (
                key,
                self._writer,
                completion,
                step,
                json.dumps(tokens, allow_nan=False, separators=(",", ":")),
            )
            for key, completions in drawn.items()
            for completion, (step, tokens) in completions.items()
            if tokens
        ]
        if rows or parts:
            with self._as_cache_errors(), self._connection:
                self._connection.execute(_BEGIN)
                self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
                self._connection.executemany(
                    "DELETE FROM drawn WHERE key = ?", [(key,) for key in (*results, *replaced)]
                )
                self._connection.executemany(
                    "INSERT OR REPLACE INTO drawn VALUES (?, ?, ?, ?, ?)", parts
                )

    def close(self) -> None:
        self._connection.close()


class ResponseWriter:
    """The response cache of one engine during a block: results are written in transactions.

    A result is on the disk `MAX_PENDING_S` after it was added, also if no other one follows. A
    cache that fails, on a full disk or another, is told once, and what is pending waits for the
    next write.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        """path: the cache's file; None stores nothing. model: as of `ResponseCache`."""
        self._pending: dict[str, GenerationResult] = {}
        self._drawn: dict[str, dict[int, tuple[int, list[DrawnToken]]]] = {}
        self._timer: threading.Timer | None = None  # runs while something is pending
        self._steps: dict[str, dict[int, int]] = {}  # the next step of each completion
        self._restarted: set[str] = set()  # keys whose stored tokens are to be deleted
        # by `time.monotonic()`: the next write, and the oldest token that is not written
        self._due = self._waits_since = 0.0
        self._fails = False  # the last access failed
        self._keep_every_s = KEEP_EVERY_S
        self._lock = threading.RLock()
        self._cache: ResponseCache | None = None
        with self._reported_once():
            self._cache = ResponseCache(path, model) if path is not None else None

    @contextmanager
    def _reported_once(self) -> Iterator[None]:
        """Report the first `ResponseCacheError` until a write succeeds again, and raise none."""
        try:
            yield
        except ResponseCacheError as error:
            if not self._fails:
                report(Message(f"results are not stored for a later run: {error}"))
            self._fails = True

    def get_many(self, keys: list[str]) -> dict[str, GenerationResult]:
        """Return the stored results among `keys`."""
        with self._lock, self._reported_once():
            return self._cache.get_many(keys) if self._cache else {}
        return {}

    def take_drawn(self, keys: list[str]) -> dict[str, list[list[DrawnToken]]]:
        """Return what was drawn of unfinished answers among `keys`, by completion."""
        with self._lock, self._reported_once():
            return self._cache.take_drawn(keys) if self._cache else {}
        return {}

    def add(self, key: str, result: GenerationResult) -> None:
        """Store a successful result with the next transaction."""
        with self._lock:
            self._pending[key] = result
            self._drawn.pop(key, None)
            self._steps.pop(key, None)
            if len(self._pending) >= MAX_PENDING_RESULTS and not self._fails:
                self._flush()
            else:
                self._flush_within(self._keep_every_s if self._fails else MAX_PENDING_S)

    def add_drawn(self, key: str, completion: int, step: int, drawn: DrawnToken) -> float | None:
        """Store a token of an answer that has not ended with the next transaction.

        step: number of the token in its completion.
        Returns the seconds that tokens wait to be written; None if they are not stored.
        """
        with self._lock:
            if self._cache is not None:
                if not self._drawn and not self._fails:
                    self._waits_since = time.monotonic()
                steps = self._steps.setdefault(key, {})
                # The answer is computed again, since a worker was lost, and may be another one.
                if step != steps.get(completion, step):
                    steps.clear()
                    self._drawn.pop(key, None)
                    self._restarted.add(key)
                steps[completion] = step + 1
                self._drawn.setdefault(key, {}).setdefault(completion, (step, []))[1].append(drawn)
                self._flush_within(self._keep_every_s)
                return max(self._keep_every_s, time.monotonic() - self._waits_since)
        return None

    def _flush_within(self, seconds: float) -> None:
        """Write what is pending at most so many seconds from now."""
        due = time.monotonic() + seconds
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due, self._timer = due, threading.Timer(seconds, self._flush)
        self._timer.daemon = True
        self._timer.start()

    def _flush(self) -> None:
        """Write what is pending; what cannot be written stays pending."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            began = time.monotonic()
            with self._reported_once():
                if self._cache is not None:
                    self._cache.put_many(self._pending, self._drawn, self._restarted)
                    if self._fails:
                        report(Message("results are stored again", is_warning=False))
                self._pending, self._drawn, self._restarted, self._fails = {}, {}, set(), False
            every_s = min(_MAX_KEEP_EVERY_S, (time.monotonic() - began) / _MAX_KEEP_SHARE)
            self._keep_every_s = max(KEEP_EVERY_S, every_s)

    def close(self) -> None:
        """Write what is pending."""
        with self._lock:
            self._flush()
            if self._cache is not None:
                self._cache.close()
                self._cache = None
