"""Many requests, many threads, many processes: memory per request, time, the cache file, and what
is shared.
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.data_sets import write_data
from tests.helpers.helm_runs import Place
from tests.helpers.real_runs import flexgen_helm
from tests.helpers.shares import share_of

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
    return " ".join(WORDS[number // 8**digit % 8] for digit in range(10))


def score(folder: Path, model: Path, count: int) -> dict[str, Any]:
    """Score `count` passages by one `flexgen-helm run`; returns what it took."""
    folder.mkdir()
    write_data(folder / "data", [passage(number) for number in range(count)], [])
    (folder / "models.yaml").write_text(json.dumps({"tiny": str(model)}))
    began = time.monotonic()
    done = flexgen_helm(folder, "run", "-r", ENTRY, "-m", str(count), "--suite", "s", program=RUN)
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
def test_many_thousand_requests(tiny, tmp_path):
    model = tiny("llama").path
    few, many = (score(tmp_path / str(count), model, count) for count in (MOST // 4, MOST))
    print({key: (few[key], many[key]) for key in ("seconds", "peak", "rows", "cache_bytes")})
    assert many["record"]["workload"]["num_requests"] == MOST
    assert many["rows"] == many["record"]["workload"]["num_unique"]
    assert not many["leftovers"] and many["cache_bytes"] < 3000 * many["rows"]
    # HELM keeps every request and its statistics until a run ends; four times the work must not
    # take sixteen times.
    assert (many["peak"] - few["peak"]) / (MOST - MOST // 4) < 96 << 10
    assert many["seconds"] < 8 * few["seconds"]


@pytest.mark.slow
def test_helm_run_with_256_threads(tmp_path):
    results = []
    for threads in ("4", "256"):
        runs = Place(tmp_path / threads)
        runs.folder.mkdir()
        runs.run("run", "-n", threads)
        events = runs.events()
        assert (events["load"], events["block"]) == (1, 2)
        results.append(runs.results())
    assert results[0] == results[1]
