"""Many requests, many threads, many processes: memory per request, time, the cache file, and what is shared."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.data_sets import write_data
from tests.helpers.forks import python
from tests.helpers.helm_runs import Place
from tests.helpers.paths import ROOT
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import TinyModel

ENTRY = "lambada:mode=accuracy,model=flexgen/tiny"
RUN = """
import resource, sys
from flexgen_helm.cli import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""
WORDS = ["the", "quick", "brown", "fox", "over", "lazy", "dog", "question"]


def passage(number: int) -> str:
    """A text of its own with ten words."""
    return " ".join(WORDS[number // 8**place % 8] for place in range(10))


def score(folder: Path, model: Path, count: int) -> dict[str, Any]:
    """Score `count` passages by one `flexgen-helm run`; returns what it took."""
    folder.mkdir()
    write_data(folder / "data", [passage(number) for number in range(count)], [])
    (folder / "models.yaml").write_text(json.dumps({"tiny": str(model)}))
    variables = {"FLEXGEN_HELM_HOME": str(folder / "home"), "FLEXGEN_HELM_DATA": str(folder / "data"),
                 "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"), "OMP_NUM_THREADS": "1"}  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        [*python("all"), "-c", RUN, "run", "-r", ENTRY, "-m", str(count), "--suite", "s"],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = (folder / "benchmark_output/runs/s").glob("*/flexgen_run.json")
    (cache,) = (folder / "home" / "journal").glob("*.sqlite")
    with closing(sqlite3.connect(cache)) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM answers").fetchone()
    return {
        "seconds": time.monotonic() - began,
        "peak": int(done.stdout.split("peak ")[1]),
        "record": json.loads(record.read_text()),
        "rows": rows,
        "cache_bytes": cache.stat().st_size,
        "leftovers": [path.name for path in cache.parent.iterdir() if path != cache],
    }


MOST = share_of(20_000, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_thousand_requests(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny("llama").path
    few, many = (score(tmp_path / str(count), model, count) for count in (MOST // 4, MOST))
    print({key: (few[key], many[key]) for key in ("seconds", "peak", "rows", "cache_bytes")})
    assert many["record"]["workload"]["num_requests"] == MOST
    assert many["rows"] == many["record"]["workload"]["num_unique"]
    assert not many["leftovers"] and many["cache_bytes"] < 3000 * many["rows"]
    # HELM keeps every request and its statistics until a run ends; four times the work must not take sixteen times.
    assert (many["peak"] - few["peak"]) / (MOST - MOST // 4) < 96 << 10
    assert many["seconds"] < 8 * few["seconds"]


@pytest.mark.slow
def test_helm_run_with_256_threads(tmp_path: Path) -> None:
    results = []
    for threads in ("4", "256"):
        place = Place(tmp_path / threads)
        place.folder.mkdir()
        place.run("run", "-n", threads)
        events = place.events()
        assert (events["load"], events["block"]) == (1, 2)
        results.append(place.results())
    assert results[0] == results[1]


SHARING = """
import json, resource, sys
from pathlib import Path
from flexgen_helm import Engine, GenerationRequest, MemoryLimits
model, folder = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
limits = MemoryLimits(cpu=64 << 20, disk=256 << 20)
options = dict(policy="4x2,0,0,0,100,0,100", schedule="zigzag", limits=limits, precision="8bit")
with Engine.from_pretrained(model, **options) as engine:
    results = engine.run([GenerationRequest(prompt_token_ids=[5 + i] * 30, max_tokens=6) for i in range(8)])
    runs = [path.name for path in (Path(folder) / "offload").glob("run-*") if path.is_dir()]
    written = engine.last_run["bytes"]["cpu_to_disk"]["weights"]
print(json.dumps([[result.completions[0].token_ids for result in results], written, runs]))
"""


@pytest.mark.slow
def test_four_processes_share_a_home(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Weights are written once, whoever comes first; caches and hidden states are each process's own."""
    variables = {"FLEXGEN_HELM_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*python("all"), "-c", SHARING, str(tiny("llama").path), str(tmp_path / "home")], text=True, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **variables},
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        outputs.append(json.loads(output))
    answers, _, runs = zip(*outputs)
    assert all(answer == answers[0] for answer in answers)
    assert len(set().union(*runs)) <= 4 and all(runs)
    (weights,) = (tmp_path / "home" / "offload").glob("weights-*")
    assert not [*weights.glob("*.part")]
    assert not [path for path in (tmp_path / "home" / "offload").glob("run-*") if path.is_dir()]
