"""A disk that fails: the libc of a process returns EIO, ENOSPC or half of what was asked, for files
of one folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forks import python
from tests.helpers.helm_runs import Place
from tests.helpers.paths import ROOT

SOURCE = Path(__file__).resolve().parents[1] / "helpers" / "failing_disk.c"
PROMPTS = [[5 + i, 6, 7, 8] * 12 for i in range(4)]
ENGINE = """
import json, os, sys
from flexgen_helm import Engine, FlexgenError, GenerationRequest, MemoryLimits
model, folder, policy, *faults = sys.argv[1:]
asked = [GenerationRequest(prompt_token_ids=ids, max_tokens=8, ignore_eos=True) for ids in json.load(sys.stdin)]
options = dict(schedule="zigzag", offload_dir=folder, limits=MemoryLimits(cpu=64 << 20, disk=256 << 20))
for fault in faults:
    said = {}
    try:
        with Engine.from_pretrained(model, policy=policy, **options) as engine:
            if fault:
                os.environ["FAIL_HOW"], os.environ["FAIL_AFTER"] = fault.split()
            said["answers"] = [result.completions[0].token_ids for result in engine.run(asked)]
    except FlexgenError as error:
        said["error"], said["exit code"] = f"{type(error).__name__} {error}", error.exit_code
    os.environ.pop("FAIL_HOW", None)
    print(json.dumps({**said, "left": [name for name in os.listdir(folder) if name.startswith("run-")]}))
"""
WEIGHTS, CACHE = "4x1,0,0,0,100,0,100", "4x1,0,100,0,0,0,100"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, so no disk can be made to fail")
    library = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the compiler cannot make a shared library: {done.stderr[:200]}")
    return library


@pytest.fixture(scope="module")
def run_engines(tiny, tmp_path_factory, shim):
    """Three engines of one process, by policy: with errors, on a disk that is well again, and with
    short reads.
    """

    @cache
    def run(policy: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("disk")
        # weights are read from its own files
        model = shutil.copytree(tiny("llama").path, folder / "model")
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, str(model), str(folder), policy, "eio 5", "", "short 0"],
            input=json.dumps(PROMPTS), text=True, capture_output=True, timeout=120, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FAIL_PATH": str(folder), "LD_PRELOAD": str(shim)},
        )  # fmt: skip
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return folder, [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def expected(tiny):
    from flexgen_helm import Engine, GenerationRequest

    with Engine.from_pretrained(tiny("llama").path) as engine:
        asked = [
            GenerationRequest(prompt_token_ids=ids, max_tokens=8, ignore_eos=True)
            for ids in PROMPTS
        ]
        return [list(result.completions[0].token_ids) for result in engine.run(asked)]


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", [WEIGHTS, CACHE], ids=["weights", "cache"])
def test_a_disk_error_ends_the_run_with_the_files_name(run_engines, expected, policy):
    folder, (failed, well, _) = run_engines(policy)
    assert failed["error"].startswith("OffloadError") and str(folder) in failed["error"], failed
    assert (
        "Input/output error" in failed["error"]
        and "\n" not in failed["error"]
        and failed["exit code"] == 1
    )
    assert failed["left"] == []
    # The same folder serves once the disk is well, and without the shim's orders the run is as any
    # other.
    assert well["answers"] == expected


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", [WEIGHTS, CACHE], ids=["weights", "cache"])
def test_short_reads_and_writes_change_no_token(run_engines, expected, policy):
    _, (_, _, short) = run_engines(policy)
    assert "error" not in short and short["answers"] == expected, short


def test_a_full_disk_below_the_response_cache_costs_no_score(tmp_path, shim):
    """SQLite cannot write: the suite goes on, says so, and has its scores; nothing is stored."""
    runs = Place(tmp_path, is_cold=True)  # the shim is loaded before Python
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("LD_PRELOAD", shim),
            ("FAIL_HOW", "nospace"),
            ("FAIL_PATH", "journal/"),
        ):
            patch.setenv(name, str(value))
        output = runs.run("suite", "-n", "4")
    runs.python = python("all")
    assert "results are not stored for a later run: " in output, output
    assert (runs.run_folder("simple_mcqa") / "stats.json").is_file()
    first = runs.events()["answer"]
    runs.run("suite", "-n", "4")
    assert runs.events()["answer"] == first
