"""Pipelines of real processes answer as one process does, and end together when one of them
fails.
"""

import json

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from tests.helpers.backend_models import requests, saved
from tests.helpers.offload import MIB, workload
from tests.helpers.parity import assert_same, prompts
from tests.helpers.pipeline_ranks import Case, Job, run_ranks
from tests.helpers.tiny_models import VARIANTS, save_random

LAYERS = 5
LIMITS = MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB)
THREE_TIERS = Policy(4, 2, 0.0, 0.4, 0.3, 0.4, 0.3, 0.4)
ON_DISK = Policy(3, 2, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model('opt') -> folder of a checkpoint of that variant with five layers and no tokenizer."""

    def get(variant):
        folder = tmp_path_factory.mktemp(variant)
        config = VARIANTS[variant]()
        config.num_hidden_layers = LAYERS
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer % 2] for layer in range(LAYERS)]
        save_random(folder, config, seed=7)
        return folder

    return get


def compared(folder, num_ranks, cases):
    """Run cases on ranks and in one process; return the records of the ranks."""
    cases = [
        Case(case.model, {**case.options, "offload_dir": folder / "tiers"}, case.requests)
        for case in cases
    ]
    ended = run_ranks(folder, num_ranks, Job(cases))
    assert ended.code == 0, ended.err
    for case, outcome in zip(cases, ended.outcomes, strict=True):
        assert outcome.error is None, (case, outcome.error)
        with Engine.from_pretrained(case.model, **case.options) as engine:
            assert_same(outcome.results, engine.run(case.requests))
            assert engine.last_run["schedule"] == outcome.record["schedule"]
    for outcome in ended.outcomes:
        layers = [
            layer
            for rank in outcome.record["pipeline"]["ranks"]
            for layer in range(*rank["layers"])
        ]
        assert layers == list(range(LAYERS))
    return [outcome.record for outcome in ended.outcomes]


ZIGZAG = {"schedule": "zigzag", "policy": THREE_TIERS, "device": "sim", "limits": LIMITS}
SETTINGS = [
    {},
    {"precision": "4bit"},
    {"schedule": "row", "policy": ON_DISK, "device": "cpu", "limits": LIMITS},
    ZIGZAG,
    {**ZIGZAG, "precision": "4bit"},
]


def test_two_ranks_give_the_answers_of_one_process(tmp_path, model):
    """A new kind with generation settings, which each rank proves; schedules, precisions; first and
    last layers.
    """
    cases = [
        Case(model("llama"), options, workload(count=8)) for options in (SETTINGS[2], SETTINGS[4])
    ]
    cases += [
        Case(model(variant), ZIGZAG, workload(count=8)) for variant in ("opt-350m", "bloom-untied")
    ]
    config = VARIANTS["llama"]()
    config.num_hidden_layers, config.an_entry_that_nobody_knows = LAYERS, 2.5
    save_random(tmp_path / "new", config, seed=7)
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "top_k": 9}
    (tmp_path / "new" / "generation_config.json").write_text(json.dumps(settings))
    cases.insert(0, Case(tmp_path / "new", {}, workload(count=2)))
    records = compared(tmp_path, 2, [*cases, scoring(cases[-1].model), divided(model("llama"))])
    check_records(records, offloaded=2)
    assert records[0]["generation_config"]["applied"] == settings
    assert [
        len(json.loads((tmp_path / f"home{rank}" / "proofs.json").read_text())) for rank in range(2)
    ] == [1, 1]


def scoring(folder):
    shared = prompts(1, 30, seed=5)[0]
    asked = [GenerationRequest(prompt_token_ids=shared + tail, max_tokens=0, echo_logprobs=True, top_logprobs=i % 3)
             for i, tail in enumerate(prompts(24, 30))]  # fmt: skip
    return Case(folder, {**ZIGZAG, "schedule": "prefill-only"}, asked)


def divided(folder):
    return Case(folder, {"pipeline_layers": (1, 4)}, workload())


def check_records(records, offloaded):
    """Of cases that end with `scoring` and `divided`."""
    assert [record["pipeline"]["lanes"] for record in records[-2:]] == [8, 2]
    assert [rank["layers"] for rank in records[-1]["pipeline"]["ranks"]] == [[0, 1], [1, 5]]
    assert all(
        rank["bytes"]["disk_to_cpu"]["weights"] for rank in records[offloaded]["pipeline"]["ranks"]
    )


@pytest.mark.slow
def test_two_ranks_in_every_setting(tmp_path, model):
    """Every schedule, precision and family of the first; then what is special in first and last
    layers; then scores.
    """
    cases = [Case(model("llama"), options, workload(count=14)) for options in SETTINGS]
    cases += [Case(model("opt"), options, workload(count=14)) for options in SETTINGS[::2]]
    for variant in ("opt-350m", "qwen2-windows", "qwen3-moe", "gpt2", "bloom-untied"):
        cases.append(Case(model(variant), ZIGZAG, workload(count=8)))
    records = compared(tmp_path, 2, [*cases, scoring(cases[-1].model), divided(cases[0].model)])
    check_records(records, offloaded=3)


@pytest.mark.slow
def test_four_ranks_give_the_answers_of_one_process(tmp_path, model):
    cases = [
        Case(model(variant), options, workload(count=14))
        for variant, options in (
            ("opt", SETTINGS[0]),
            ("llama", SETTINGS[0]),
            ("llama", ZIGZAG),
            ("opt", SETTINGS[4]),
        )
    ]
    assert compared(tmp_path, 4, cases)[0]["pipeline"]["lanes"] == 4


def test_a_lost_rank_ends_all_with_one_sentence(tmp_path, model):
    requests = [GenerationRequest(prompt_token_ids=ids, max_tokens=40) for ids in prompts(9, 40)]
    ended = run_ranks(tmp_path, 3, Job([Case(model("llama"), {}, requests)], "kill"))
    assert ended.code and ended.seconds_after_fault < 10
    for outcome in ended.outcomes:  # none where torchrun was faster
        assert str(outcome.error).startswith("rank 1 of the pipeline was lost")


@pytest.mark.slow
def test_a_rank_without_room_refuses_for_all_and_ranks_that_schedule_otherwise_stop(
    tmp_path, model
):
    case = Case(model("llama"), {}, workload())
    refused, opened = run_ranks(tmp_path, 2, Job([case, case], "memory")).outcomes
    assert opened.error is None and len(opened.results) == len(workload())
    assert str(refused.error).startswith("rank 1 of the pipeline: ") and "more" in str(
        refused.error
    )
    ended = run_ranks(tmp_path, 2, Job([case], "order"))
    (outcome,) = ended.outcomes
    assert ended.code and "ranks 0 and 1 of the pipeline have scheduled different tokens" in str(
        outcome.error
    )


@pytest.mark.slow
def test_models_that_run_by_modules_of_transformers(tmp_path):
    """Gemma 4 is divided between a layer and those that use its keys again; layers of Qwen3.5 keep
    states.
    """
    cases = []
    for name in ("Gemma4ForCausalLM", "Qwen3_5ForCausalLM"):
        saved(name, tmp_path / name)
        for options in ({}, ZIGZAG):
            cases.append(
                Case(tmp_path / name, {**options, "offload_dir": tmp_path / "tiers"}, requests())
            )
    ended = run_ranks(tmp_path, 2, Job(cases))
    assert ended.code == 0, ended.err
    for case, outcome in zip(cases, ended.outcomes, strict=True):
        assert outcome.error is None, (case, outcome.error)
        with Engine.from_pretrained(case.model, **case.options) as engine:
            assert_same(outcome.results, engine.run(case.requests))
