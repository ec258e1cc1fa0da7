"""The journal of finished answers: what was computed once is never computed again.

One SQLite file per engine fingerprint, so answers of other weights, types or formats cannot be met by accident.
Values are JSON and nothing else: a row that is not a well-formed answer is ignored, never executed. Each
`put_many` is one durable transaction. The rollback journal is used instead of WAL, which network disks break.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError
from flexgen_helm.request import Completion, Cost, GenerationResult

SCHEMA_VERSION = "1"
BUSY_TIMEOUT_S = 60.0
_KEYS_PER_QUERY = 500  # below SQLite's oldest limit of 999 parameters a statement
_FINISH_REASONS = ("length", "stop", "endoftext")
_COST_FIELDS = {field.name for field in fields(Cost)}


class ResponseCacheError(FlexgenError):
    """The journal cannot be read or written; the message names the file and what to do."""


def response_cache_path(home: Path, fingerprint: str) -> Path:
    """The file that keeps the answers of one engine."""
    readable = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fingerprint)
    name = fingerprint if readable else hashlib.sha256(fingerprint.encode()).hexdigest()
    return home / "journal" / f"{name}.sqlite"


def encode_result(result: GenerationResult) -> str:
    """JSON of one successful answer. Raises ValueError for an error or a value that is not finite."""
    if result.error is not None:
        raise ValueError("an error is not an answer and is not kept")
    record = {
        "completions": [asdict(completion) for completion in result.completions],
        "prompt_token_ids": list(result.prompt_token_ids),
        "prompt_logprobs": None if result.prompt_logprobs is None else list(result.prompt_logprobs),
        "cost": asdict(result.cost),
    }
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def decode_result(text: object) -> GenerationResult:
    """The inverse of `encode_result`. Raises ValueError for anything that it did not write."""
    if not isinstance(text, str):
        raise ValueError(f"a journal row is {type(text).__name__}, not text")
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
        logprobs = record["prompt_logprobs"]
        cost = record["cost"]
        if not isinstance(cost, dict) or set(cost) != _COST_FIELDS:
            raise ValueError("its cost has other fields")
        return GenerationResult(
            completions=tuple(_decode_completion(item) for item in record["completions"]),
            prompt_token_ids=_numbers(record["prompt_token_ids"], int),
            prompt_logprobs=None if logprobs is None else tuple(_decode_prompt_logprobs(logprobs)),
            cost=Cost(**{name: _number(value) for name, value in cost.items()}),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an answer of this program: {error!r}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a finite number")


def _number(value: Any, kind: type | tuple[type, ...] = (int, float)) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{value!r} is not a number")
    return value


def _numbers(values: Any, kind: type) -> tuple[Any, ...]:
    return tuple(_number(value, kind) for value in values)


def _decode_prompt_logprobs(values: Sequence[Any]) -> Iterator[float | None]:
    for value in values:
        yield None if value is None else float(_number(value))


def _decode_completion(item: Mapping[str, Any]) -> Completion:
    tokens, reason = tuple(item["tokens"]), item["finish_reason"]
    if not isinstance(item["text"], str) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("texts are not strings")
    if reason not in _FINISH_REASONS:
        raise ValueError(f"finish reason {reason!r}")
    ids, logprobs = _numbers(item["token_ids"], int), tuple(float(_number(value)) for value in item["logprobs"])
    if not len(tokens) == len(ids) == len(logprobs):
        raise ValueError("tokens, ids and log-probabilities differ in number")
    return Completion(item["text"], tokens, ids, logprobs, reason)


class ResponseCache:
    """Answers by request key in one SQLite file. Used by one thread; safe among any number of processes."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises `JournalError` where the file is foreign, damaged or of another version."""
        self.path = path
        self.ignored_rows = 0  # rows met that were no answers
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA synchronous=FULL")
        with self._transaction():
            self._connection.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
            self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (SCHEMA_VERSION,))
        (found,) = self._connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        if found != SCHEMA_VERSION:
            raise ResponseCacheError(
                f"the journal {self.path} has format {found!r}, this version reads {SCHEMA_VERSION!r}; "
                "move the file away, its answers will be computed again"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write lock from the start: a reader that upgrades later could fail without waiting."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:  # locked, full, read-only, cannot open
            raise ResponseCacheError(f"the journal {self.path} cannot be used now: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ResponseCacheError(
                f"the journal {self.path} is damaged or not a journal ({error}); "
                "move the file away, its answers will be computed again"
            ) from error
        except OSError as error:
            raise ResponseCacheError(f"the journal {self.path} cannot be created: {error}") from error

    def get_many(self, keys: Iterable[str]) -> dict[str, GenerationResult]:
        """The answers known among `keys`."""
        wanted, found = list(dict.fromkeys(keys)), {}
        with self._explained():
            for start in range(0, len(wanted), _KEYS_PER_QUERY):
                part = wanted[start : start + _KEYS_PER_QUERY]
                query = f"SELECT key, value FROM answers WHERE key IN ({','.join('?' * len(part))})"
                for key, value in self._connection.execute(query, part):
                    try:
                        found[key] = decode_result(value)
                    except ValueError:
                        self.ignored_rows += 1
        return found

    def put_many(self, answers: Mapping[str, GenerationResult]) -> None:
        """Keep `answers`, all or none, on the disk when this returns."""
        rows = [(key, encode_result(result)) for key, result in answers.items()]
        if rows:
            with self._explained(), self._transaction():
                self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> ResponseCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
