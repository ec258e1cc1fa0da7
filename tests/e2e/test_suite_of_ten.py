"""A suite of ten runs with weights on the disk: they are read as often as a single run reads them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.data_sets import PAGES, WORDS, write_data
from tests.helpers.forks import python
from tests.helpers.tiny_models import TinyModel

TEN = [f"wikitext:max_length={length},model=flexgen/tiny" for length in range(30, 70, 5)] + [
    "wikitext:max_length=90,model=flexgen/tiny",
    "lambada:mode=perplexity,model=flexgen/tiny",
]


@pytest.fixture
def place(tiny: Callable[[str], TinyModel], tmp_path: Path) -> Path:
    write_data(tmp_path / "data", [f"{' '.join(WORDS[i : i + 6])} it" for i in range(6)], PAGES)
    (tmp_path / "models.yaml").write_text(json.dumps({"tiny": {"path": str(tiny("llama").path)}}))
    return tmp_path


def suite(place: Path, name: str, entries: list[str], *flags: str) -> dict[str, Any]:
    """Return the usage of the model of one `flexgen-helm run` with an empty response cache."""
    variables = {"FLEXGEN_HELM_DATA": str(place / "data"), "FLEXGEN_HELM_MODELS": str(place / "models.yaml"),
                 "FLEXGEN_HELM_HOME": str(place / name), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    main = "import sys; from flexgen_helm.cli import main; sys.exit(main())"
    command = [*python("all"), "-c", main, "run", "-r", *entries, "-m", "100", "--suite", name, *flags]
    done = subprocess.run(command, cwd=place, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads((place / "benchmark_output" / "runs" / name / "flexgen_suite.json").read_text())
    assert len(content["runs"]) == len(entries)
    (usage,) = content["models"].values()
    return dict(usage)


@pytest.mark.slow
def test_ten_runs_read_the_weights_as_often_as_one(place: Path) -> None:
    """Scoring needs every weight once for the whole data set, however many runs that is. The table of tokens is in
    memory, because its rows are looked up for each batch."""
    flags = ("--policy", "4x8,0,50,0,100,0,100", "--schedule", "prefill-only", "--offload-dir", str(place / "disk"))
    one = suite(place, "one", TEN[:1], *flags)
    all_ = suite(place, "all", TEN, *flags)
    read, alone = (usage["bytes"]["disk_to_cpu"]["weights"] for usage in (all_, one))
    assert read == alone > 0
    assert all_["workload"]["prompt_tokens"] > 5 * one["workload"]["prompt_tokens"]
