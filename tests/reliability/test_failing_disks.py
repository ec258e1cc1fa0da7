"""A disk that fails: the libc of a process returns EIO, ENOSPC or half of what was asked, for files of one folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.forks import python
from tests.helpers.helm_runs import Place
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import TinyModel

SOURCE = Path(__file__).resolve().parents[1] / "helpers" / "failing_disk.c"
PROMPTS = [[5 + i, 6, 7, 8] * 12 for i in range(4)]
ENGINE = """
import json, os, sys
from flexgen_helm import Engine, FlexgenError, GenerationRequest, MemoryLimits
model, folder, policy, fail = sys.argv[1:]
asked = [GenerationRequest(prompt_token_ids=ids, max_tokens=8, ignore_eos=True) for ids in json.load(sys.stdin)]
limits = MemoryLimits(cpu=64 << 20, disk=256 << 20)
try:
    with Engine.from_pretrained(model, policy=policy, schedule="zigzag", offload_dir=folder, limits=limits) as engine:
        if fail:
            os.environ["FAIL_HOW"] = fail
        results = engine.run(asked)
    print(json.dumps([result.completions[0].token_ids for result in results]))
except FlexgenError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""
WEIGHTS, CACHE = "4x1,0,0,0,100,0,100", "4x1,0,100,0,0,0,100"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, so no disk can be made to fail")
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the compiler cannot make a shared library: {done.stderr[:200]}")
    return library


def run_engine(
    model: Path, folder: Path, policy: str, how: str = "", after: int = 0, shim: Path | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {"OMP_NUM_THREADS": "1", "FAIL_PATH": str(folder), "FAIL_AFTER": str(after)}
    variables |= {"LD_PRELOAD": str(shim)} if shim else {}
    return subprocess.run(
        [sys.executable, "-c", ENGINE, str(model), str(folder), policy, how], input=json.dumps(PROMPTS), text=True,
        capture_output=True, timeout=120, cwd=ROOT, env={**os.environ, **variables},
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(tiny: Callable[[str], TinyModel]) -> list[list[int]]:
    from flexgen_helm import Engine, GenerationRequest

    with Engine.from_pretrained(tiny("llama").path) as engine:
        asked = [GenerationRequest(prompt_token_ids=ids, max_tokens=8, ignore_eos=True) for ids in PROMPTS]
        return [list(result.completions[0].token_ids) for result in engine.run(asked)]


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", [WEIGHTS, CACHE], ids=["weights", "cache"])
def test_a_disk_error_ends_the_run_with_the_files_name(
    tiny: Callable[[str], TinyModel], tmp_path: Path, shim: Path, expected: list[list[int]], policy: str
) -> None:
    done = run_engine(tiny("llama").path, tmp_path, policy, "eio", 5, shim)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.startswith("OffloadError") and str(tmp_path) in done.stdout, done.stdout
    assert "Input/output error" in done.stdout and done.stdout.count("\n") == 1
    assert not list(tmp_path.glob("run-*"))
    # The same folder serves once the disk is well, and without the shim's orders the run is as any other.
    done = run_engine(tiny("llama").path, tmp_path, policy, shim=shim)
    assert json.loads(done.stdout) == expected


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", [WEIGHTS, CACHE], ids=["weights", "cache"])
def test_short_reads_and_writes_change_no_token(
    tiny: Callable[[str], TinyModel], tmp_path: Path, shim: Path, expected: list[list[int]], policy: str
) -> None:
    done = run_engine(tiny("llama").path, tmp_path, policy, "short", 0, shim)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == expected


def test_a_full_disk_below_the_response_cache_costs_no_score(tmp_path: Path, shim: Path) -> None:
    """SQLite cannot write: the suite goes on, says so, and has its scores; nothing is stored."""
    place = Place(tmp_path, is_cold=True)  # the shim is loaded before Python
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LD_PRELOAD", shim), ("FAIL_HOW", "nospace"), ("FAIL_PATH", "journal/")):
            patch.setenv(name, str(value))
        output = place.run("suite", "-n", "4")
    place.python = python("all")
    assert "results are not stored for a later run: " in output, output
    assert (place.run_folder("simple_mcqa") / "stats.json").is_file()
    first = place.events()["answer"]
    place.run("suite", "-n", "4")
    assert place.events()["answer"] == first
