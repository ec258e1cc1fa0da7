"""What processor time tests spend, by file, with the processes that they start.

    make test-times                                    runs the fast suite and prints the table
                                                       (docs/developers)
    python -m tests.helpers.times build/times tests    by test in place of file

Processor time, user and system, of all threads and of processes that have ended: a busy machine
does not change it.
As a plugin of pytest (`-p tests.helpers.times`) each process of the run writes what it measured
into the folder that `TEST_TIMES` names.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.helpers.forks import SERVERS

_TABLE_ROWS = 25
_TICKS = os.sysconf("SC_CLK_TCK")
_spent: dict[str, float] = {}


def processor_seconds() -> float:
    """Return what this process, those that have ended, and those that fork with their forks have
    taken.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for server in SERVERS:
        if server.returncode is None:
            # utime, stime, cutime and cstime are fields 14 to 17; the name before may have spaces
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    began = processor_seconds()
    result = yield
    _spent[item.nodeid] = processor_seconds() - began
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _spent:
        folder = Path(os.environ["TEST_TIMES"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(_spent))


def table(folder: Path, by: str = "file") -> str:
    """Return the files (or tests) that take longest, and all together, as markdown."""
    total: Counter[str] = Counter()
    for part in folder.glob("*.json"):
        for test, seconds in json.loads(part.read_text()).items():
            total[test if by == "tests" else test.partition("::")[0]] += seconds
    rows = [*total.most_common(_TABLE_ROWS), ("all", total.total())]
    return "\n".join(
        [
            f"| {by} | seconds |",
            "|---|---:|",
            *(f"| {name} | {seconds:.0f} |" for name, seconds in rows),
        ]
    )


if __name__ == "__main__":
    print(table(Path(sys.argv[1]), *sys.argv[2:]))
