"""`bench gpu` on a simulated GPU: from the sources alone, as `make gpu-check` lays them out, and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from flexgen_helm.benchmarks import Options, gpu
from flexgen_helm.errors import UsageError
from tests.helpers.paths import ROOT

# What a GPU machine may lack.
_ABSENT = ("helm", "pydantic", "gguf", "datasets", "cattrs", "typer", "rich", "pandas", "jinja2", "scipy.stats")


@pytest.mark.slow
def test_it_runs_from_the_sources_without_helm_and_names_its_result_by_hardware(tmp_path):
    package = tmp_path / "package" / "flexgen_helm"
    package.mkdir(parents=True)
    for source in (*(ROOT / "flexgen_helm").iterdir(), ROOT / "benchmarks"):
        (package / source.name).symlink_to(source)  # links, so that compiled kernels are found
    blocker = f"import sys\nfor name in {_ABSENT!r}: sys.modules[name] = None\n"
    (tmp_path / "package" / "sitecustomize.py").write_text(blocker)
    subprocess.run(
        [sys.executable, "-m", "flexgen_helm.benchmarks", "gpu", "--quick", "--device", "sim", "--results", tmp_path],
        check=True,
        env={
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(tmp_path / "package"),
            "FLEXGEN_HELM_HOME": str(tmp_path / "home"),
            "OUT": str(tmp_path),
        },
        cwd=ROOT,  # as make does, where another flexgen_helm lies
        timeout=300,
    )
    result = json.loads((tmp_path / "gpu_sim.json").read_text())
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result["rows"]
    labels = [row["label"] for row in result["rows"]]
    assert {"copies to gpu (GB/s)", "copies to host (GB/s)"} < set(labels)
    (block,) = [row for row in result["rows"] if row["label"].startswith("opt-125m")]
    assert block["tokens_per_s"] > 0 and 0 <= block["overlapped"] <= 1
    assert block["peak_bytes"]["gpu"] <= gpu.QUICK.cases[0].gpu_bytes


def test_it_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(UsageError, match="needs a CUDA device .* --device sim"):
        gpu.run(Options())


def test_the_overlapped_share_is_that_of_the_links_time_without_waiting():
    case = gpu.QUICK.cases[0]
    record = {
        "latency_s": 10.0,
        "output_tokens": 12,
        "bytes": {"cpu_to_gpu": {"weights": 6e9, "cache": 2e9}},
        "time_s": {"wait": 1.0},
        "schedule": "zigzag",
        "achieved_placement": {},
        "peak_bytes": {},
    }
    row = gpu.case_row(case, [record], link_gb_s=2.0)
    assert (row["link_s"], row["overlapped"], row["tokens_per_s"]) == (4.0, 0.75, 1.2)
    resident = {**record, "bytes": {"cpu_to_gpu": {}}}
    assert gpu.case_row(case, [resident], link_gb_s=2.0)["overlapped"] == 1.0
