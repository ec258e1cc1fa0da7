"""`make gpu-check` on the CUDA device in host memory, with a GPU machine's libraries; its runner
and table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from flexgen_helm.benchmarks.gpu.session import GROUPS, STEPS, result_of
from flexgen_helm.benchmarks.process import run_killable
from tests.helpers.paths import ROOT

# What a GPU machine must have: first what the project imports there, then what those cannot be
# imported without. Everything else is absent, also where a library would take it if it were there.
# So neither our code nor what it calls needs more; `accelerate` is absent too, and its steps say
# so.
ALLOWED = (
    *("torch", "transformers", "safetensors", "numpy", "scipy", "numba", "psutil", "pytest"),
    *("tokenizers", "huggingface_hub", "filelock", "llvmlite", "packaging", "yaml", "triton"),
    *("_pytest", "py", "pluggy", "iniconfig", "pygments"),
    *("typing_extensions", "sympy", "mpmath", "networkx", "fsspec", "torchgen", "tqdm", "regex"),
    *(
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "anyio",
        "sniffio",
        "idna",
        "truststore",
        "certifi",
        "h11",
    ),
)
HOOK = f"""
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

ALLOWED = {{*{ALLOWED!r}, "flexgen_helm", "tests", *sys.stdlib_module_names}}

class Allowed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = "." in name or name in ALLOWED or name.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if known else None

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Allowed]
"""


@pytest.fixture
def gpu_machine(tmp_path):
    """The environment of a process that has only the allowed libraries."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLEXGEN", "PYTEST"))
    }
    return {**kept, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_steps_pass_with_the_libraries_of_a_gpu_machine(tmp_path, gpu_machine):
    out = tmp_path / "out"
    command = [
        "make",
        "gpu-check",
        "FAKE=1",
        "STEPS=call1 call2",
        "LIMIT=560",
        f"OUT={out}",
        f"PYTHON={sys.executable}",
    ]
    done = subprocess.run(
        command, env=gpu_machine, cwd=ROOT, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stdout[-6000:]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    absent = {line["step"] for line in lines if "left_out" in line}
    assert absent == {"acc67", "acc30"}
    passed = {line["step"] for line in lines if line.get("rc") == 0}
    assert passed == {*GROUPS["call1"], *GROUPS["call2"]}
    assert "=== profile (exit 0)" in (out / "log.txt").read_text()
    result = json.loads((out / "gpu_cuda_in_host_memory.json").read_text())
    assert {"perf67", "perf30", "hf67"} <= {row["step"] for row in result["rows"]} and result[
        "failed"
    ] == []
    assert all(
        row["predicted_prefill_s"] > 0 for row in result["rows"] if row["step"].startswith("perf")
    )
    assert len([line for line in lines if "test" in line]) >= 8, "tests of each step"
    assert all(row["label"] and row["tokens_per_s"] > 0 for row in result["rows"])


def test_the_hook_fails_what_imports_more(gpu_machine):
    for code, absent in (
        ("import flexgen_helm.engine.engine", None),
        ("import flexgen_helm.response_cache", "pydantic"),
    ):
        environment = {**gpu_machine, "PYTHONPATH": f"{gpu_machine['PYTHONPATH']}:{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == bool(absent) and (
            absent is None or f"No module named '{absent}'" in done.stderr
        )


def test_a_step_is_killed_with_its_children(tmp_path):
    script = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
        "time.sleep(60)"
    )
    log = tmp_path / "log"
    assert run_killable([sys.executable, "-c", script], log, 2) == 124
    child = int(log.read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_without_their_time_are_left_out_by_name(tmp_path):
    command = [
        "make",
        "gpu-check",
        "FAKE=1",
        "LIMIT=9",
        "STEPS=env hf67",
        f"OUT={tmp_path}",
        f"PYTHON={sys.executable}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode, "the steps did not pass"
    for step in ("env", "hf67"):
        assert f"FAILED {step} : only 9 s were left" in done.stdout
    unknown = subprocess.run([*command, "STEPS=prifle"], cwd=ROOT, capture_output=True, text=True)
    assert (
        "invalid choice: 'prifle' (choose from" in unknown.stderr and "'profile'" in unknown.stderr
    )


def test_groups_are_of_steps():
    assert {step for group in GROUPS.values() for step in group} == STEPS.keys()


def test_the_result_has_ratios_and_failures():
    speed = {"rows": 8, "label": "opt", "prefill_s": 1.0, "decode_s": 3.0}
    lines = [
        {"step": "env", "device": "A GPU"},
        {"step": "perf67", **speed, "tokens_per_s": 60.0},
        {"step": "acc67", **speed, "tokens_per_s": 20.0, "peer_of": "perf67"},
        {"step": "acc30", "left_out": "not installed: accelerate"},
        {"step": "races", "test": "test_x.py::test_y", "error": "AssertionError"},
        {"step": "hf67", "rc": 124, "seconds": 80.0, "error": "killed at its limit"},
    ]
    result = result_of(lines)
    assert result["failed"] == [
        "races test_x.py::test_y: AssertionError",
        "hf67 : killed at its limit",
    ]
    assert result["hardware"]["device"] == "A GPU" and len(result["rows"]) == 2
    assert result["ratios"] == {"perf67_to_acc67": 3.0}
    assert result["notes"][0] == "acc30: not installed: accelerate"
