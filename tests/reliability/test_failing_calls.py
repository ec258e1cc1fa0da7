"""One system call of a suite fails: scores are right all the same, or a sentence says which file and what moves it.

The calls of an undisturbed suite on its home, results, and offload folder are listed; a share of them fails here.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from errno import EACCES, EDQUOT, EFBIG, EIO, EMFILE, ENOLCK, ENOMEM, ENOSPC, ENOSYS, EROFS, errorcode

import pytest

from tests.helpers.killed_suites import Outcome, Suites, pickled_model
from tests.helpers.paths import ROOT
from tests.helpers.shares import IS_WHOLE

FULL = (ENOSPC, EDQUOT, EFBIG, EIO)
# What a call may answer; HELM, SQLite, safetensors and PyTorch make some of them.
ERRORS = {
    "open-r": (EMFILE, ENOMEM, EIO),
    "open-w": (EROFS, ENOSPC, EMFILE, EDQUOT, ENOMEM, EACCES),
    "opendir": (EMFILE, ENOMEM),
    "mkdir": (EROFS, ENOSPC, EDQUOT, ENOMEM),
    "rename": (EROFS, ENOSPC, EDQUOT, EIO),
    "unlink": (EROFS, ENOMEM),
    "rmdir": (EROFS, ENOMEM),
    "write": FULL,
    "fallocate": FULL,
    "truncate": FULL,
    "fsync": FULL,
    "mmap": (ENOMEM,),
    "flock": (ENOLCK, ENOSYS),
    "lock": (ENOLCK, ENOSYS),
}
# Weights, cache, and activations on the disk; weights in 4 bits are written there first.
OPTIONS = ["--policy", "4x1,0,0,0,0,0,0", "--precision", "4bit"]
MOVES = re.compile(r"FLEXGEN_HELM_HOME|--offload-dir| -o\b|--local-path")
REMEDIES = {EMFILE: re.compile(r"ulimit -n"), ENOMEM: re.compile("memory")}


@dataclass(frozen=True)
class Fault:
    """The call that fails, as failing_calls.c names it; `lasts`: and all that follow."""

    call: str
    number: int
    error: int
    lasts: bool

    @property
    def kind(self) -> str:
        return self.call.split()[0]

    def __str__(self) -> str:
        return f"{self.call} #{self.number} {errorcode[self.error]}{' for good' if self.lasts else ''}"


class FailingCalls:
    """A suite whose calls can be made to fail; `calls` of an undisturbed one, `right` are its results."""

    def __init__(self, suites: Suites) -> None:
        self._suites, self._place = suites, suites.folder / "suite"
        outcome = self.run()
        assert outcome.code == 0, outcome.output
        self.calls = Counter((self._place / "calls").read_text().splitlines())
        self.right = self._results()

    def run(self, fault: Fault | None = None) -> Outcome:
        order = (fault.call, fault.number, fault.error, fault.lasts) if fault else None
        return self._suites.run("suite", fault=order, options=OPTIONS, batch_invariant=False)

    def _results(self) -> object:
        return self._suites.results("suite")

    def try_one(self, fault: Fault) -> tuple[Outcome, str]:
        """Run a suite with a fault from the beginning; if it ends with an error, again without.

        Return the first outcome, and what was wrong, '' for nothing.
        """
        shutil.rmtree(self._place)
        first = self.run(fault)
        calls = self._place / "calls"
        if not calls.exists() or "FAILED" not in calls.read_text():
            return first, "not reached"
        wrong = self._wrong(first, REMEDIES.get(fault.error, MOVES))
        if first.code and ((again := self.run()).code or self._results() != self.right):
            wrong += f"; the same command afterwards: {again.code} {again.output}"
        return first, wrong

    def _wrong(self, outcome: Outcome, remedy: re.Pattern[str]) -> str:
        said = [line for line in outcome.output.splitlines() if line.startswith("flexgen-helm: ")]
        if any(word in outcome.output for word in ("Traceback", "[Errno", "unexpected", "Timeout (")):
            return "raw error"
        if outcome.code == 0:
            return "" if self._results() == self.right else "other scores"
        if outcome.code not in (1, 2) or not said:
            return f"exit code {outcome.code} without a sentence"
        if not all(remedy.search(line) for line in said):
            return "nothing that helps"
        if not all(re.search(rf"{self._place}|benchmark_output|prod_env", line) for line in said):
            return "no file"
        return ""

    def faults(self, per_call: int = 1) -> list[Fault]:
        """So many faults of a call, in a random order, the same one in every folder."""
        draw, faults = random.Random(7), []
        for call, count in sorted(self.calls.items(), key=lambda item: re.sub("[0-9a-f#]{6,}", "", item[0])):
            errors = ERRORS[call.split()[0]]
            for turn in range(per_call):
                number = 0 if not turn else draw.randrange(count)
                faults.append(Fault(call, number, draw.choice(errors), draw.random() < 0.4))
        draw.shuffle(faults)
        return list(dict.fromkeys(faults))


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, so no call can be made to fail")
    folder = tmp_path_factory.mktemp("failing")
    source, library = ROOT / "tests" / "helpers" / "failing_calls.c", folder / "failing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    with Suites(folder, pickled_model(folder / "model"), library) as suites:
        yield FailingCalls(suites)


@pytest.mark.slow
def test_a_call_that_fails_costs_no_score(failing):
    assert sum(failing.calls.values()) > 400 and len(failing.calls) > 150
    faults = failing.faults(2) if IS_WHOLE else [*{fault.kind: fault for fault in failing.faults()}.values()]
    tried = {str(fault): failing.try_one(fault) for fault in faults}
    wrong = {fault: (said, outcome.output) for fault, (outcome, said) in tried.items() if said}
    assert not [fault for fault, (said, _) in wrong.items() if said != "not reached"], wrong
    assert len(wrong) <= len(faults) // 5  # as other threads come first
