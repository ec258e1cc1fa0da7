"""The steps of `make gpu-check`, and the loop that runs them under a limit of seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flexgen_helm.benchmarks.accelerate_task import missing
from flexgen_helm.benchmarks.common import log_tail
from flexgen_helm.benchmarks.gpu.step import GIB
from flexgen_helm.benchmarks.gpu.table import result_of, table
from flexgen_helm.errors import UsageError


@dataclass(frozen=True)
class Step:
    """A process.

    needs: seconds that must be left, else the step is left out.
    most: seconds after which it is killed.
    function: of a module of this package, as 'module.function'.
    host: GiB of host memory that must be free, else the step is left out.
    """

    needs: int
    most: int
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    host: int = 0


# A T4 shows so many GiB of its 16 GB, and the engine takes so many of them.
_T4, _T4_LIMIT = 14.7, 13.2


def _engine(needs: int, most: int, model: str, rows: int, **arguments: Any) -> Step:
    host = 72 if model == "opt-30b" and "precision" not in arguments else 20
    return Step(needs, most, "speed.engine", {"model": model, "rows": rows, **arguments}, host)


def _transformers(needs: int, most: int, model: str, rows: int, peer_of: str, **arguments: Any) -> Step:
    return Step(needs, most, "speed.transformers", {"model": model, "rows": rows, "peer_of": peer_of, **arguments})


def _tests(needs: int, most: int, quick: str, *tests: str) -> Step:
    """Return a step of tests. quick: expression that selects those which FAKE tries out."""
    return Step(needs, most, "correct.run_tests", {"tests": tests, "quick": quick})


STEPS = {
    "env": Step(5, 30, "machine.describe"),
    "profile": Step(20, 100, "speed.profile"),
    "tests": _tests(70, 150, "(kernel and paper) or (packed and fp16-s-opt)", "engine/test_gpu_parity.py"),
    "parity": _tests(
        20,
        110,
        "opt-float16-resident or gemma2-bfloat16-thirds",
        "cuda/test_gpu_runs.py::test_scores_equal_transformers",
    ),
    "races": _tests(
        15, 80, "thirds-None-copies or thirds-4bit-products", "cuda/test_gpu_runs.py::test_a_delay_changes_no_bit"
    ),
    "kernels": Step(20, 90, "attention.measure"),
    "perf67": _engine(45, 115, "opt-6.7b", 64, gpu=6, card=8),
    "acc67": _transformers(25, 70, "opt-6.7b", 8, "perf67", gpu=8),
    "resident67": _engine(30, 80, "opt-6.7b", 128),
    "hf67": _transformers(20, 60, "opt-6.7b", 128, "resident67"),
    "slowlink": _engine(50, 110, "opt-6.7b", 64, gpu=6, card=8, link=12),
    "t4": _engine(30, 80, "opt-6.7b", 48, gpu=_T4_LIMIT, card=_T4),
    "perf30": _engine(90, 180, "opt-30b", 64, gpu=_T4_LIMIT, card=_T4, cpu=92),
    "acc30": _transformers(50, 100, "opt-30b", 8, "perf30", gpu=_T4),
    "packed30": _engine(60, 150, "opt-30b", 64, precision="4bit", gpu=_T4_LIMIT, card=_T4, cpu=92),
}
GROUPS = {
    "correct": ("tests", "parity", "races"),
    "call1": ("env", "profile", "correct", "perf67", "acc67", "kernels"),
    "call2": ("perf30", "acc30", "resident67", "hf67", "slowlink", "t4", "packed30"),
    "speed": ("env", "profile", "kernels", "perf67", "acc67", "call2"),
}
# Beside the tests nothing is timed.
_BESIDE_TESTS = ("parity", "races")


def named_steps(names: Sequence[str]) -> list[str]:
    """Resolve groups. Raises `UsageError`, with the names of all, for an unknown one."""
    steps = [step for name in names for step in (named_steps(GROUPS[name]) if name in GROUPS else [name])]
    if unknown := [name for name in steps if name not in STEPS]:
        raise UsageError(f"there is no step {unknown[0]!r}; known are {', '.join([*GROUPS, *STEPS])}")
    return steps


class Session:
    """Runs steps one after another; what becomes of them is in results.jsonl, log.txt and table.txt in `out`."""

    def __init__(self, limit_s: float, out: Path, tell: Callable[[str], None], is_fake: bool = False) -> None:
        out = out.resolve()  # tests change the working directory
        self._end, self._out, self._tell = time.monotonic() + limit_s, out, tell
        self._environment = {**os.environ, "OUT": str(out), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if is_fake:
            self._environment |= {"FAKE": "1", "FLEXGEN_HELM_HARDWARE": "t4"}
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt", "table.txt"):
            (out / name).write_text("", encoding="utf-8")

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the result, in the format of `benchmarks`; `failed` names the steps that did not pass."""
        tests: threading.Thread | None = None
        with tempfile.TemporaryDirectory(prefix="flexgen_gpu.") as work:
            self._environment |= {"WORK": work, "FLEXGEN_HELM_HOME": str(Path(work, "home"))}
            for name in names:
                if tests is not None and name not in _BESIDE_TESTS:
                    tests.join()
                if name == "tests":
                    tests = threading.Thread(target=self._step, args=(name,))
                    tests.start()
                else:
                    self._step(name)
            if tests is not None:
                tests.join()
        lines = [json.loads(line) for line in self._results.read_text(encoding="utf-8").splitlines()]
        text = table(lines)
        (self._out / "table.txt").write_text(text + "\n", encoding="utf-8")
        self._tell(text)
        return result_of(lines)

    @property
    def _results(self) -> Path:
        return self._out / "results.jsonl"

    def _step(self, name: str) -> None:
        step, left = STEPS[name], self._end - time.monotonic()
        if "peer_of" in step.arguments and "gpu" in step.arguments and (reason := missing()) is not None:
            return self._note(name, left_out=reason)
        if (free := psutil.virtual_memory().available / GIB) < step.host and "FAKE" not in self._environment:
            return self._note(name, left_out=f"{free:.0f} GiB of host memory are free, and it needs {step.host}")
        if left < step.needs:
            return self._note(name, left_out=f"{left:.0f} s are left, and it needs {step.needs}", rc=1)
        log = Path(self._environment["WORK"], f"{name}.txt")
        command = [sys.executable, "-m", f"{__package__}.step", step.function, json.dumps(dict(step.arguments))]
        began = time.monotonic()
        rc = run_killable(command, log, min(step.most, left), {**self._environment, "STEP": name})
        with (self._out / "log.txt").open("ab") as sink:
            sink.write(f"=== {name} (exit {rc})\n".encode() + log.read_bytes()[-400_000:])
        last = {"last_line": log_tail(log).rpartition("\n")[2][:300]} if rc else {}
        self._note(name, rc=rc, seconds=round(time.monotonic() - began, 1), **last)

    def _note(self, name: str, **values: Any) -> None:
        with self._results.open("a", encoding="utf-8") as sink:
            sink.write(json.dumps({"step": name, **values}) + "\n")
        self._tell(f"{name}: {', '.join(f'{key} {value}' for key, value in values.items())}")


def run_killable(command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str]) -> int:
    """Run a command; return its exit code, or 124 if it was killed, with all its children, after so many seconds."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
