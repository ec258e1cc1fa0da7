"""The steps of `make gpu-check`, and the loop that runs them under a limit of seconds."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.common import report
from flexgen_helm.benchmarks.process import log_tail, run_killable


@dataclass(frozen=True)
class Step:
    """A process that calls a function of `steps`.

    most: seconds after which it is killed; with less than half of them left it is left out.
    """

    function: str
    most: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


_67 = {"model": "opt-6.7b"}
# A T4 shows 14.7 GiB of its 16 GB, of which the engine takes 13.2.
_30 = {"model": "opt-30b", "rows": 64, "cpu": 92, "gpu": 13.2}
_ACC30 = {"model": "opt-30b", "rows": 8, "gpu": 14.7, "peer_of": "perf30"}
_RUNS = "cuda/test_gpu_runs.py"
STEPS = {
    "env": Step("describe", 30),
    "tests": Step("run_tests", 150, {"tests": "engine/test_gpu_parity.py"}),
    "parity": Step("run_tests", 110, {"tests": f"{_RUNS}::test_scores_equal_transformers"}),
    "races": Step("run_tests", 80, {"tests": f"{_RUNS}::test_a_delay_changes_no_bit"}),
    "profile": Step("profile", 100),
    "perf67": Step("engine", 115, {**_67, "rows": 64, "gpu": 6}),
    "acc67": Step("transformers", 70, {**_67, "rows": 8, "gpu": 8, "peer_of": "perf67"}),
    "perf30": Step("engine", 180, _30),
    "resident67": Step("engine", 80, {**_67, "rows": 128}),
    "hf67": Step("transformers", 60, {**_67, "rows": 128, "peer_of": "resident67"}),
    "acc30": Step("transformers", 100, _ACC30),
    "packed30": Step("engine", 150, {**_30, "precision": "4bit"}),
}
# These run together, so nothing in them is timed.
_TESTS = ("tests", "parity", "races")
# What matters most comes first: what no time is left for is left out.
GROUPS = {
    "correct": _TESTS,
    "call1": ("env", *_TESTS, "profile", "perf67", "acc67"),
    "call2": ("perf30", "resident67", "hf67", "acc30", "packed30"),
}


def run_steps(names: Sequence[str], limit_s: float, out: Path, is_fake: bool) -> dict[str, Any]:
    """Run steps one after another; what becomes of them is in results.jsonl and log.txt in `out`.

    Returns the result, which is printed and written to `out`.
    """
    end, out = time.monotonic() + limit_s, out.resolve()  # tests change the folder
    out.mkdir(parents=True, exist_ok=True)
    results, log = out / "results.jsonl", out / "log.txt"
    for path in (results, log):
        path.write_text("")
    environment = {**os.environ, "OUT": str(out), "HF_HUB_OFFLINE": "1"}
    environment |= {"FAKE": "1", "FLEXGEN_HELM_HARDWARE": "t4"} if is_fake else {}

    def run(name: str) -> None:
        step, began = STEPS[name], time.monotonic()
        if (left := end - began) < step.most / 2:
            return emit(out, name, error=f"only {left:.0f} s were left")
        command = [sys.executable, "-m", f"{__package__}.steps", step.function]
        command.append(json.dumps(step.arguments))
        printed, variables = Path(work, name), {**environment, "STEP": name}
        code = run_killable(command, printed, min(step.most, left), env=variables)
        with log.open("ab") as sink:
            sink.write(f"=== {name} (exit {code})\n".encode() + printed.read_bytes()[-400_000:])
        why = "killed at its limit" if code == 124 else log_tail(printed)[-300:]
        failed = {"error": why} if code else {}
        return emit(out, name, rc=code, seconds=time.monotonic() - began, **failed)

    tests: list[Future[None]] = []
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor() as pool:
        environment |= {"WORK": work, "FLEXGEN_HELM_HOME": f"{work}/home"}
        for name in names:
            if name not in _TESTS:
                wait(tests)
            tests.append(pool.submit(run, name))
            if name not in _TESTS:
                tests.pop().result()
    result = result_of([*map(json.loads, results.read_text().splitlines())])
    device = re.sub("[^a-z0-9]+", "_", result["hardware"]["device"].lower())
    report(result, out / f"gpu_{device}.json")
    return result


def emit(out: Path, step: str, **values: Any) -> None:
    """Append what a step has found to results.jsonl, and print it."""
    line = json.dumps({"step": step, **values}, default=str)
    with (out / "results.jsonl").open("a", encoding="utf-8") as sink:
        sink.write(line + "\n")
    print(line, flush=True)


def result_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lines of a session as a result: throughputs as rows, ratios to peers.

    `failed` names the tests and steps that did not pass.
    """
    rows = [line for line in lines if "tokens_per_s" in line]
    speeds = {row["step"]: row["tokens_per_s"] for row in rows}
    failed = [
        f"{line['step']} {line.get('test', '')}: {line['error']}"
        for line in lines
        if "error" in line
    ]
    left_out = [f"{line['step']}: {line['left_out']}" for line in lines if "left_out" in line]
    device = next((line["device"] for line in lines if "device" in line), "unknown")
    peers = [row for row in rows if row.get("peer_of") in speeds]
    return {
        "name": "gpu",
        "hardware": {"device": device},
        "rows": rows,
        "ratios": {
            f"{row['peer_of']}_to_{row['step']}": speeds[row["peer_of"]] / row["tokens_per_s"]
            for row in peers
        },
        "notes": [*left_out, *(f"FAILED {line}" for line in failed)],
        "failed": failed,
    }
