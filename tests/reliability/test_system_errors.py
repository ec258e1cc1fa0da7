"""Every call of a command that opens, writes, flushes or renames a file fails once: one true
sentence with the file.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, EMFILE, ENOSPC
from pathlib import Path
from typing import Any

import pytest

from flexgen_helm import cli
from flexgen_helm.errors import CheckpointError, UnprovedModelError
from flexgen_helm.report.verification import AnswerFile
from flexgen_helm.system_errors import explain, system_error
from tests.checkpoint.test_convert import write_pickled
from tests.helpers.shares import IS_WHOLE
from tests.helpers.suites import accuracies, write_run, write_totals

ERRORS = (ENOSPC, EDQUOT, EFBIG, EMFILE, EIO)
HELPS = {
    EMFILE: "ulimit -n",
    EFBIG: "ulimit -f",
    EIO: "dmesg",
    ENOSPC: "free some room",
    EDQUOT: "quota",
}
# What does not help against them.
MISLEADING = re.compile(
    r"unexpected|Traceback|\[Errno|fetch|make it again|install|unverified|damaged|corrupt"
)


class _FailingFile:
    """An open file that cannot be written."""

    def __init__(self, file: Any, error: OSError) -> None:
        self._file, self._error = file, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, content: object) -> int:
        raise self._error


class Calls:
    """The calls on files below a folder; the one that is `failing` raises `number`, if the two are
    given.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, dict[tuple[str, str], None]()
        self.failing: tuple[str, str] | None = None
        self.number = 0

    def _error(self, name: str, path: str | Path) -> OSError | None:
        path = Path(path).absolute()
        if not path.is_relative_to(self.folder):
            return None
        key = name, re.sub(r"\d+", "#", str(path.relative_to(self.folder)))
        self.seen[key] = None
        if key != self.failing:
            return None
        named = () if name in ("write", "fsync", "posix_fallocate") else (str(path),)
        return OSError(self.number, os.strerror(self.number), *named)

    def _replaced(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            at = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            if error := self._error(name, at):
                raise error
            found = real(path, *rest, **more)
            mode = str([*rest, more.get("mode", "r")][0])
            if (
                name == "open"
                and not set(mode).isdisjoint("wax+")
                and (error := self._error("write", path))
            ):
                return _FailingFile(found, error)
            return found

        return call

    @contextmanager
    def counted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "open", self._replaced("open", io.open))
            for name in ("open", "mkdir", "replace", "rename", "fsync", "posix_fallocate"):
                patch.setattr(os, name, self._replaced(name, getattr(os, name)))
            yield


def suite(folder: Path) -> list[str]:
    runs = folder / "out" / "runs" / "mine"
    for precision, right in (("fp16", [1, 0] * 20), ("4bit", [1, 1] + [1, 0] * 19)):
        write_run(runs, "boolq", precision, {"exact_match": sum(right) / 40}, accuracies(right))
    write_totals(runs)
    return ["-o", str(folder / "out"), "--suite", "mine"]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "report": lambda folder: ["report", *suite(folder)],
    "compare": lambda folder: ["compare", *suite(folder), "--flips", str(folder / "flips.jsonl")],
    "convert": lambda folder: [
        "convert",
        str(write_pickled(folder / "m")),
        "--out",
        str(folder / "converted"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_error_has_one_sentence(tmp_path, monkeypatch, capsys, command):
    def run(number: int, calls: Calls) -> tuple[int, str]:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        words = COMMANDS[command](folder)
        calls.folder = folder
        monkeypatch.setenv("FLEXGEN_HELM_HOME", str(folder / "home"))
        with calls.counted():
            code = cli.main(words)
        return code, capsys.readouterr().err

    every = Calls(tmp_path)
    assert run(0, every)[0] == 0 and len(every.seen) > 8
    faults = [(call, error) for call in every.seen for error in ERRORS]
    faults = faults if IS_WHOLE else random.Random(0).sample(faults, min(30, len(faults)))
    wrong = {}
    for number, (call, error) in enumerate(faults, 1):
        calls = Calls(tmp_path)
        calls.failing, calls.number = call, error
        code, said = run(number, calls)
        lines = [line for line in said.splitlines() if line.startswith("flexgen-helm: ")]
        is_right = code == 0 or (
            code in (1, 2) and len(lines) == 1 and os.strerror(error) in said and HELPS[error] in said
            and f"/{number}" in lines[0] and not MISLEADING.search(said)
        )  # fmt: skip
        if not is_right:
            wrong[f"{call} {os.strerror(error)}"] = code, said
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("number", ERRORS)
def test_advice_that_does_not_help_is_not_given(number):
    system = OSError(number, os.strerror(number), "/a/file")
    for kind in (CheckpointError, UnprovedModelError):
        error = kind("/a/file is damaged; fetch it again")
        error.__cause__ = ValueError("whatever")
        error.__cause__.__context__ = system
        assert system_error(error) is system
        assert explain(error).startswith(f"/a/file cannot be used: {os.strerror(number)}; ")
        assert HELPS[number] in explain(error)
    in_rust = RuntimeError(f"I/O error: something (os error {number})")
    assert (found := system_error(in_rust)) is not None and found.errno == number
    of_a_library = OSError(f"{os.strerror(number)} (os error {number})")  # no number of its own
    assert explain(of_a_library).startswith(f"a file cannot be used: {os.strerror(number)}; ")
    assert HELPS[number] in explain(of_a_library)
    assert system_error(OSError(2, "No such file or directory")) is None

    def read() -> object:
        raise system

    with pytest.raises(OSError) as caught:
        AnswerFile(Path("/a/file"), "run", {}, read).reading(read)
    assert caught.value is system
