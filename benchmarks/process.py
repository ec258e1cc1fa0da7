"""A command in a process with a log: under a limit of seconds, and of memory in a control group."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flexgen_helm.errors import FlexgenError
from flexgen_helm.hardware.host_memory import memory_groups

_serials = itertools.count()


class ProcessKilled(FlexgenError):
    """A signal ended the process; in a memory control group, for lack of memory."""


class GroupUnavailable(FlexgenError):
    """This machine or user cannot create a memory control group; the message says why."""


def run_killable(
    command: Sequence[str], log: Path, limit_s: float | None = None, **options: Any
) -> int:
    """Run a command with its output in the file `log`, and return its exit code.

    It is 124 if the command was killed, with all its children, after `limit_s` seconds.
    options: of `subprocess.Popen`.
    """
    with log.open("wb") as sink:
        options |= {"stdout": sink, "stderr": sink, "start_new_session": True}
        with subprocess.Popen(command, **options) as process:
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def run_logged(command: Sequence[str], log: Path, name: str, **options: Any) -> float:
    """Run a command as `run_killable` does, and return its seconds.

    Raises `ProcessKilled`, or `FlexgenError` with the end of the log if it fails.
    """
    began = time.perf_counter()
    code = run_killable(command, log, **options)
    if code < 0:
        raise ProcessKilled(f"{name} was ended by signal {-code}")
    if code:
        raise FlexgenError(f"{name} ended with {code}:\n{log_tail(log)}")
    return time.perf_counter() - began


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])


def in_own_process(
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    memory: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Call `function(**arguments)`, a module's function, in a new process with fresh memory.

    memory: bytes of a control group for it. Arguments and result are JSON types.
    Raises as `run_logged` and `memory_group` do.
    """
    name = function.__qualname__
    group = nullcontext(list) if memory is None else memory_group(memory)
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch, group as inside:
        answer = Path(scratch, "answer.json")
        task = json.dumps([function.__module__, name, dict(arguments)])
        command = inside([sys.executable, "-m", __name__, str(answer), task])
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
        run_logged(command, Path(scratch, "log"), name, env=variables)
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


@contextmanager
def memory_group(limit: int) -> Iterator[Callable[[Sequence[str]], list[str]]]:
    """Make a control group of at most `limit` bytes, page cache included; version 1 or 2.

    It is a child of the caller's group in version 1 and a sibling in version 2, which allows
    processes in leaf groups only. So a limit on the caller's parent holds here too.

    Yields what makes a command one that runs in the group. Raises `GroupUnavailable`.
    """
    groups = memory_groups()
    if groups is None:
        raise GroupUnavailable("no memory controller of control groups is mounted here")
    is_first, parent = groups.version == 1, groups.folder
    if not is_first and parent != groups.mount:
        parent = parent.parent
    folder = parent / f"flexgen-bench-{os.getpid()}-{next(_serials)}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit))
        # Fails without swap accounting, and then there is no swap to forbid.
        with suppress(OSError):
            swap = "memory.memsw.limit_in_bytes" if is_first else "memory.swap.max"
            (folder / swap).write_text(str(limit if is_first else 0))
    except OSError as error:
        raise GroupUnavailable(f"no memory control group below {parent}: {error}") from error
    start = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{folder}/cgroup.procs"]
    try:
        yield lambda command: [*start, *command]
    finally:
        with suppress(OSError):  # a process of it may not have ended yet
            folder.rmdir()


def forget_files(folder: Path) -> None:
    """Drop the page cache of all files below `folder`, so that the next reader reads from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    module, function, given = json.loads(sys.argv[2])
    found = getattr(import_module(module), function)(**given)
    Path(sys.argv[1]).write_text(json.dumps(found, default=str), encoding="utf-8")
