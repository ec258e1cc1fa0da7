"""What processor time tests spend, by file: processes that are started, models that are built, imports, the rest.

    make test-times                                    runs the fast suite and prints the table (docs/developers)
    python -m tests.helpers.times build/times tests    by test in place of file

Processor time, user and system, of all threads and of processes that have ended: a busy machine does not change it.

As a plugin of pytest (`-p tests.helpers.times`) each process of the run writes what it measured into the folder that
`TEST_TIMES` names. Times of one kind inside another count for the outer one.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forks import SERVERS

KINDS = ("processes", "models", "imports", "the rest")
_TABLE_ROWS = 25
_TICKS = os.sysconf("SC_CLK_TCK")

_spent: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
_now: dict[str, float] = dict.fromkeys(KINDS, 0.0)  # of the test that runs
_is_inside = False


def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the time of a function's calls, but for those inside another that is counted."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        global _is_inside
        if _is_inside:
            return function(*given, **named)
        _is_inside, began = True, time.process_time()
        try:
            return function(*given, **named)
        finally:
            _now[kind] += time.process_time() - began
            _is_inside = False

    return call


def of_processes() -> float:
    """Seconds of processes that have ended, and of those that fork, with their forks that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for server in SERVERS:
        if server.returncode is None:
            # utime, stime, cutime and cstime are fields 14 to 17; the name before may have spaces
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS
    return total


def pytest_configure(config: pytest.Config) -> None:
    from tests.helpers import backend_models, tiny_models

    tiny_models.save_random = counted("models", tiny_models.save_random)
    backend_models.saved = counted("models", backend_models.saved)
    builtins.__import__ = counted("imports", builtins.__import__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _now.update(dict.fromkeys(KINDS, 0.0))
    began, began_processes = time.process_time(), of_processes()
    result = yield
    total, _now["processes"] = time.process_time() - began, of_processes() - began_processes
    own = _spent[item.nodeid]
    for kind in KINDS[:-1]:
        own[kind] += _now[kind]
    own[KINDS[-1]] += max(0.0, total - _now["models"] - _now["imports"])
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _spent:
        folder = Path(os.environ["TEST_TIMES"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(_spent))


def table(folder: Path, by: str = "file") -> str:
    """The files (or tests) that take longest, and all together, as markdown; seconds of processor time."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for part in folder.glob("*.json"):
        for test, own in json.loads(part.read_text()).items():
            name = test if by == "tests" else test.partition("::")[0]
            for kind in KINDS:
                total[name][kind] += own[kind]
    ranked = sorted(total, key=lambda name: -sum(total[name].values()))
    lines = [f"| {by} | seconds | {' | '.join(KINDS)} |", "|---|---:|" + "---:|" * len(KINDS)]
    rows = [(name.removeprefix("tests/"), total[name]) for name in ranked[:_TABLE_ROWS]]
    others = {kind: sum(total[name][kind] for name in ranked[_TABLE_ROWS:]) for kind in KINDS}
    rows.append((f"{max(0, len(ranked) - _TABLE_ROWS)} others", others))
    rows.append(("all", {kind: sum(own[kind] for own in total.values()) for kind in KINDS}))
    for name, own in rows:
        lines.append(f"| {name} | {sum(own.values()):.0f} | {' | '.join(f'{own[kind]:.0f}' for kind in KINDS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]), *sys.argv[2:]))
