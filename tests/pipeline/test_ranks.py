"""Pipelines of real processes answer as one process does, and end together when one of them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from tests.helpers.offload import MIB, workload
from tests.helpers.parity import assert_same, prompts
from tests.helpers.pipeline_ranks import Job, run_ranks
from tests.helpers.tiny_models import VARIANTS, save_random

LAYERS = 5
LIMITS = MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB)
THREE_TIERS = Policy(4, 2, 0.0, 0.4, 0.3, 0.4, 0.3, 0.4)
ON_DISK = Policy(3, 2, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model('opt') -> folder of a checkpoint of that variant with five layers and no tokenizer."""

    def get(variant: str) -> Path:
        folder = tmp_path_factory.mktemp(variant)
        config = VARIANTS[variant]()
        config.num_hidden_layers = LAYERS
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer % 2] for layer in range(LAYERS)]
        save_random(folder, config, seed=7)
        return folder

    return get


def compared(folder, model, num_ranks, options, requests):
    """Run the requests with each set of options on ranks and in one process; return the records of the ranks."""
    options = [{**own, "offload_dir": folder / "tiers"} for own in options]
    ended = run_ranks(folder, num_ranks, Job(model, options, requests))
    assert ended.code == 0, ended.err
    for own, outcome in zip(options, ended.outcomes, strict=True):
        assert outcome.error is None, (own, outcome.error)
        with Engine.from_pretrained(model, **own) as engine:
            assert_same(outcome.results, engine.run(requests))
            assert engine.last_run["schedule"] == outcome.record["schedule"]
    return [outcome.record for outcome in ended.outcomes]


SETTINGS = [
    {"precision": precision, "schedule": schedule, "policy": policy, "device": device, "limits": LIMITS}
    for precision in ("fp16", "4bit")
    for schedule, policy, device in (
        ("row", ON_DISK, "cpu"), ("zigzag", THREE_TIERS, "sim"), ("diagonal", THREE_TIERS, "sim"),
    )
]  # fmt: skip


@pytest.mark.parametrize(("variant", "num_ranks"), [("opt", 2), ("llama", 2), ("llama", 4)])
def test_ranks_give_the_answers_of_one_process(tmp_path, model, variant, num_ranks):
    settings = [{}, *SETTINGS] if num_ranks == 2 else [{}, SETTINGS[1], SETTINGS[5]]
    records = compared(tmp_path, model(variant), num_ranks, settings, workload(count=14))
    for record in records:
        ranks = record["pipeline"]["ranks"]
        layers = [layer for rank in ranks for layer in range(*rank["layers"])]
        assert len(ranks) == num_ranks and layers == list(range(LAYERS))
    assert records[0]["pipeline"]["lanes"] == num_ranks
    offloaded = records[2 if num_ranks == 2 else 1]["pipeline"]["ranks"]
    assert all(rank["bytes"]["disk_to_cpu"]["weights"] for rank in offloaded)


@pytest.mark.parametrize("variant", ["opt-350m", "qwen2-windows", "qwen3-moe", "gpt2", "bloom-untied"])
def test_what_is_special_in_first_and_last_layers(tmp_path, model, variant):
    settings = [{}, {"schedule": "zigzag", "policy": THREE_TIERS, "device": "sim", "limits": LIMITS}]
    compared(tmp_path, model(variant), 2, settings, workload(count=8))


def test_scores_alone_pass_the_pipeline_once(tmp_path, model):
    shared = prompts(1, 30, seed=5)[0]
    scored = [GenerationRequest(prompt_token_ids=shared + own, max_tokens=0, echo_logprobs=True)
              for own in prompts(24, 30)]  # fmt: skip
    options = {"schedule": "prefill-only", "policy": THREE_TIERS, "device": "sim", "limits": LIMITS}
    (record,) = compared(tmp_path, model("llama"), 2, [options], scored)
    assert record["pipeline"]["lanes"] == 8


def test_a_lost_rank_ends_all_with_one_sentence(tmp_path, model):
    requests = [GenerationRequest(prompt_token_ids=own, max_tokens=40) for own in prompts(9, 40)]
    ended = run_ranks(tmp_path, 4, Job(model("llama"), [{}], requests, fault="kill"))
    assert ended.code and ended.seconds_after_fault < 10
    (outcome,) = ended.outcomes or [None]
    if outcome is not None:  # torchrun may have been faster
        assert str(outcome.error).startswith("rank 1 of the pipeline was lost")


def test_ranks_that_schedule_otherwise_stop(tmp_path, model):
    ended = run_ranks(tmp_path, 2, Job(model("llama"), [{}], workload(), fault="order"))
    (outcome,) = ended.outcomes
    assert ended.code and "ranks 0 and 1 of the pipeline have scheduled different tokens" in str(outcome.error)


def test_a_rank_without_room_refuses_for_all_and_the_next_engine_opens(tmp_path, model):
    ended = run_ranks(tmp_path, 2, Job(model("llama"), [{}, {}], workload(), fault="memory"))
    refused, opened = ended.outcomes
    assert ended.code == 0 and opened.error is None and len(opened.results) == len(workload())
    assert str(refused.error).startswith("rank 1 of the pipeline: ") and "more" in str(refused.error)
