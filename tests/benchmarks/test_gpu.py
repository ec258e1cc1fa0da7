"""`make gpu-check` on the CUDA device in host memory, with a GPU machine's libraries; its runner and table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from flexgen_helm.benchmarks.gpu.session import GROUPS, STEPS, named_steps, run_killable
from flexgen_helm.benchmarks.gpu.table import failures, result_of, table
from flexgen_helm.errors import UsageError
from tests.helpers.paths import ROOT

# What a GPU machine must have: first what the project imports there, then what those cannot be imported without.
# Everything else is absent, also where a library would take it if it were there. So neither our code nor what it
# calls needs more; `accelerate` is absent too, and its steps say so.
ALLOWED = (
    *("torch", "transformers", "safetensors", "numpy", "scipy", "numba", "psutil", "pytest"),
    *("tokenizers", "huggingface_hub", "filelock", "llvmlite", "packaging", "yaml", "triton"),
    *("_pytest", "py", "pluggy", "iniconfig", "pygments"),
    *("typing_extensions", "sympy", "mpmath", "networkx", "fsspec", "torchgen", "tqdm", "regex"),
    *("httpx", "httpx2", "httpcore", "httpcore2", "anyio", "sniffio", "idna", "truststore", "certifi", "h11"),
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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLEXGEN", "PYTEST"))}
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
    done = subprocess.run(command, env=gpu_machine, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    absent = {line["step"] for line in lines if "left_out" in line}
    assert absent == {"acc67", "acc30"}
    passed = {line["step"] for line in lines if line.get("rc") == 0}
    assert passed == {*named_steps(["call1", "call2"])} - {"acc67", "acc30"}
    assert "predicted" in (out / "table.txt").read_text() and "=== profile (exit 0)" in (out / "log.txt").read_text()
    result = json.loads((out / "gpu_cuda_in_host_memory.json").read_text())
    assert {"perf67", "perf30", "hf67"} <= {row["step"] for row in result["rows"]} and result["failed"] == []
    assert all(row["label"] and row["tokens_per_s"] > 0 for row in result["rows"])


def test_the_hook_fails_what_imports_more(gpu_machine):
    for code, absent in (
        ("import flexgen_helm.engine.engine", None),
        ("import flexgen_helm.response_cache", "pydantic"),
    ):
        environment = {**gpu_machine, "PYTHONPATH": f"{gpu_machine['PYTHONPATH']}:{ROOT}"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == bool(absent) and (absent is None or f"No module named '{absent}'" in done.stderr)


def test_a_step_is_killed_with_its_children(tmp_path):
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    log = tmp_path / "log"
    assert run_killable([sys.executable, "-c", script], log, 2, os.environ) == 124
    child = int(log.read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_without_their_time_are_left_out_by_name(tmp_path):
    command = ["make", "gpu-check", "FAKE=1", "LIMIT=4", "STEPS=env t4", f"OUT={tmp_path}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode, "the steps did not pass"
    for step, needed in (("env", 5), ("t4", 30)):
        assert f"FAILED {step}: 4 s are left, and it needs {needed}" in done.stdout


def test_names_are_of_steps_and_groups():
    assert named_steps(["env", "correct"]) == ["env", "tests", "parity", "races"]
    assert {*named_steps(list(GROUPS))} <= STEPS.keys()
    with pytest.raises(UsageError, match="no step 'prifle'; known are .*profile"):
        named_steps(["prifle"])


def test_the_table_has_predictions_ratios_and_failures():
    predicted = {"latency_s": 2.0, "prefill_s": 0.5, "decode_s": 1.5}
    speed = {"rows": 8, "label": "opt", "latency_s": 4.0, "prefill_s": 1.0, "decode_s": 3.0, "tokens_per_s": 60.0}
    lines = [
        {"step": "env", "name": "machine", "s": 0.1, "device": "A GPU"},
        {"step": "perf67", "name": "opt", **speed, "predicted": predicted},
        {"step": "acc67", "name": "peer", **speed, "tokens_per_s": 20.0, "peer_of": "perf67"},
        {"step": "profile", "name": "rates", "error": "RuntimeError: no"},
        {"step": "profile", "rc": 1, "seconds": 3.0, "last_line": "failed: rates"},
        {"step": "t4", "rc": 124, "seconds": 80.0},
    ]
    assert failures(lines) == [
        "profile rates: RuntimeError: no",
        "profile: exit code 1 (failed: rates)",
        "t4: killed at its limit",
    ]
    text = table(lines)
    assert "60.0 tokens/s, 8 rows of opt: 1.0 + 3.0 s; predicted 0.5 + 1.5, 2.00 times that" in text
    assert text.endswith("perf67 to acc67: 3.00x") and "FAILED t4: killed at its limit" in text
    result = result_of(lines)
    assert result["hardware"]["device"] == "A GPU" and len(result["rows"]) == 2
