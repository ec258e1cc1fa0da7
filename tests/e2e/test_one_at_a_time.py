"""What the scenarios that run offline get in one block, they get one request at a time: real HELM, a real engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helm.common.request import Request

from flexgen_helm import Engine
from flexgen_helm.plugin import convert
from flexgen_helm.plugin.convert import TokenRequest
from flexgen_helm.service.prompt_encoder import PromptEncoder
from tests.helpers.data_sets import write_hospital
from tests.helpers.forks import python
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

POSITIONS = 3000
ENTRIES = (
    "mmlu:subject=us_foreign_policy",
    "mmlu:subject=us_foreign_policy,method=multiple_choice_separate_original",
    "synthetic_reasoning_natural:difficulty=easy",
    "synthetic_reasoning:mode=pattern_match",
    "entity_matching:dataset=Fodors_Zagats",
    "error_detection:dataset=Hospital",
    "simple_mcqa",
    "lambada:mode=accuracy",
    "lambada:mode=perplexity",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """All entries in one `flexgen-helm run` of a random model whose window holds their prompts."""
    folder = tmp_path_factory.mktemp("offline")
    save_random(folder / "model", llama_config(max_position_embeddings=POSITIONS), seed=5)
    save_tokenizer(folder / "model")
    scenarios = folder / "benchmark_output" / "scenarios"
    shutil.copytree(shared_data / "mmlu", scenarios / "mmlu" / "data")
    shutil.copytree(shared_data / "entity_matching", scenarios / "entity_matching" / "data")
    state = "entity_matching_scenario_fixed_random_state.json"
    shutil.copy(shared_data / "entity_matching" / state, scenarios / "entity_matching" / state)
    write_hospital(scenarios / "error_detection" / "data" / "Hospital")
    (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(folder / "model")}}))
    variables = {"FLEXGEN_HELM_DATA": str(shared_data), "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"),
                 "FLEXGEN_HELM_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    named = [f"{entry}{',' if ':' in entry else ':'}model=flexgen/tiny" for entry in ENTRIES]
    # A token of so small a model costs less than attending to one segment more: share as a large one would.
    free = "from flexgen_helm.scheduling import prefix_tree; prefix_tree._SEGMENT_FLOPS = 0.0"
    main = f"import sys; {free}; from flexgen_helm.cli import main; sys.exit(main())"
    command = [*python("all"), "-c", main, "run", "-r", *named, "-m", "3", "--suite", "s"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def states(place: Path) -> dict[str, list[dict[str, Any]]]:
    runs = sorted((place / "benchmark_output" / "runs" / "s").glob("*model=*"))
    return {run.name: json.loads((run / "scenario_state.json").read_text())["request_states"] for run in runs}


@pytest.mark.slow
def test_answers_of_a_block_are_those_of_single_requests(place: Path) -> None:
    found = states(place)
    assert len(found) == len(ENTRIES)
    with Engine.from_pretrained(place / "model") as engine:
        assert engine.tokenizer is not None
        encoder = PromptEncoder(engine.tokenizer)
        for name, request_states in found.items():
            assert len(request_states) >= 3, name
            for state in request_states:
                request = _request(state["request"])
                prepared = convert.to_generation_request(request, encoder, POSITIONS)
                (result,) = engine.run([prepared.request])
                alone = convert.to_request_result(request, prepared, result, False, encoder)
                for ours, theirs in zip(state["result"]["completions"], alone.completions, strict=True):
                    assert ours["text"] == theirs.text, name
                    assert ours["finish_reason"] == theirs.finish_reason
                    logprobs = [token["logprob"] for token in ours["tokens"]]
                    assert logprobs == pytest.approx([token.logprob for token in theirs.tokens], abs=1e-4), name
    computed = json.loads((place / "benchmark_output" / "runs" / "s" / "flexgen_suite.json").read_text())["totals"]
    assert computed["workload"]["prompt_tokens_computed"] < 0.75 * computed["workload"]["prompt_tokens"]


def _request(fields: dict[str, Any]) -> Request:
    if "prompt_token_ids" in fields:
        return TokenRequest(**{**fields, "prompt_token_ids": tuple(fields["prompt_token_ids"])})
    return Request(**fields)
