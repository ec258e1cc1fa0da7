"""Shared prefixes: the answers of requests that are computed alone, for fewer tokens, on every path."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.exec import engine as engine_module
from flexgen_helm.exec.prefixes import plan_prefixes
from flexgen_helm.exec.prepare import share
from tests.conftest import VARIANTS, VOCABULARY
from tests.test_exec_parity import assert_equals_reference
from tests.test_offload_parity import MIB, assert_same, offloaded, policies


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    """However tiny the models are, that one token is saved is worth it."""
    monkeypatch.setattr(engine_module, "_SEGMENT_S", 0.0)


def alone(monkeypatch):
    """The engine as if nothing were worth sharing."""
    monkeypatch.setattr(engine_module, "_SEGMENT_S", 1e9)


def tree(seed: int = 0, count: int = 12) -> list[list[int]]:
    """Prompts that share beginnings at several depths; one is the beginning of others, two are equal."""
    draw = random.Random(seed)

    def some(longest):
        return [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, longest))]

    first = some(12)
    made = [first, [*first, 5], [*first, 5]]
    while len(made) < count:
        stem = draw.choice(made)
        made.append([*stem[: draw.randint(0, len(stem))], *some(9)][:50])
    return made


def requests_of(prompts, seed: int = 0) -> list[GenerationRequest]:
    draw = random.Random(seed)
    return [
        GenerationRequest(
            prompt_token_ids=prompt, max_tokens=draw.choice([0, 0, 1, 2, 7]), echo_logprobs=draw.random() < 0.5,
            n=draw.choice([1, 1, 3]), temperature=draw.choice([0.0, 0.9]), seed=i, ignore_eos=draw.random() < 0.7,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_prefixes_equal_the_reference(tiny, variant):
    model = tiny(variant)
    requests = [
        GenerationRequest(prompt_token_ids=prompt, max_tokens=3, echo_logprobs=True, ignore_eos=True)
        for prompt in tree()
    ]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
        computed = engine.last_run["workload"]["prompt_tokens_computed"]
    assert computed < 0.8 * sum(len(prompt) for prompt in tree())
    for request, result in zip(requests, results):
        assert_equals_reference(model, request.prompt_token_ids, request, result)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=policies(),
    schedule=st.sampled_from(["row", "zigzag", "diagonal"]),
    device=st.sampled_from(["cpu", "sim"]),
    variant=st.sampled_from(["llama", "opt", "gemma2", "bloom", "mixtral"]),
    overlap=st.booleans(),
    cpu_attention=st.booleans(),
    home=st.sampled_from([4, 8, 64]),
    seed=st.integers(0, 5),
)
def test_any_placement_with_shared_prefixes(
    tiny, tmp_path, monkeypatch, policy, schedule, device, variant, overlap, cpu_attention, home, seed
):
    limits = MemoryLimits(gpu=home * MIB, cpu=(64 if device == "sim" else home) * MIB, disk=256 * MIB)
    options = dict(schedule=schedule, device=device, overlap=overlap, cpu_attention=cpu_attention, limits=limits)
    requests = requests_of(tree(seed), seed)
    with offloaded(tiny, variant, tmp_path, policy, **options) as engine:
        found = engine.run(requests)
    with monkeypatch.context() as patch:
        alone(patch)
        with Engine.from_pretrained(tiny(variant).path) as engine:
            expected = engine.run(requests)
    assert_same(found, expected)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "prefill-only"])
def test_scores_of_choices_share_their_question(tiny, tmp_path, monkeypatch, schedule):
    """What is computed is the plan's: a question once, and each branch its last shared token again."""
    draw = random.Random(3)
    question = [draw.randrange(2, VOCABULARY) for _ in range(30)]
    requests = [
        GenerationRequest(prompt_token_ids=[*question, *choice], max_tokens=0, echo_logprobs=True)
        for choice in ([7, 8, 9], [7, 8, 4], [11], [12, 13])
    ]
    from flexgen_helm import Policy

    policy = Policy(2, 2, 0, 0, 0, 1, 0, 1)
    with offloaded(tiny, "llama", tmp_path, policy, schedule=schedule) as engine:
        results = engine.run(requests)
        computed = engine.last_run["workload"]["prompt_tokens_computed"]
        costs = [result.cost for result in results]
    # [question less its last] 29, [last, 7] 2 for two of them, then [8, …]: 8 9 and 8 4 feed one each (their last
    # token predicts nothing), last 11 feeds 1, last 12 13 feeds 2.
    assert computed == pytest.approx(29 + 2 + 1 + 1 + 1 + 2)
    assert sum(cost.flops for cost in costs) == pytest.approx(engine.last_run["flops"])
    alone(monkeypatch)
    with Engine.from_pretrained(tiny("llama").path) as engine:
        assert_same(results, engine.run(requests))
        assert engine.last_run["workload"]["prompt_tokens_computed"] == sum(
            len(request.prompt_token_ids) - 1 for request in requests
        )


def test_completions_of_prompts_that_share_their_beginning(tiny, monkeypatch):
    prompts = [[5, 6, 7, 8, 9, *tail] for tail in ([1, 2], [1, 3], [4])]
    requests = [
        GenerationRequest(
            prompt_token_ids=p, max_tokens=8, n=4, temperature=1.0, seed=i, echo_logprobs=True, ignore_eos=i > 0
        )
        for i, p in enumerate(prompts)
    ]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        found = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
        alone(monkeypatch)
        assert_same(found, engine.run(requests))


def test_little_memory_still_answers_everything(tiny, tmp_path, monkeypatch):
    """A cache that holds hardly more than the largest request: prefixes come and go, or are not shared."""
    prompts, asked = tree(9, 20), []
    for i, prompt in enumerate(prompts):
        more = dict(max_tokens=1 + i % 6, n=1 + i % 2, temperature=0.5, seed=i)
        asked.append(GenerationRequest(prompt_token_ids=prompt, ignore_eos=True, **more))
    with Engine.from_pretrained(tiny("llama").path) as engine:
        whole = engine.ledger.in_use
        alone(monkeypatch)
        expected = engine.run(asked)
    monkeypatch.setattr(engine_module, "_SEGMENT_S", 0.0)
    largest = max(len(p) for p in prompts) + 12
    token = 2 * 3 * 64 * 4
    for tokens in (largest, 2 * largest, 4 * largest):
        limits = MemoryLimits(cpu=int(whole * 1.3) + tokens * token)
        with Engine.from_pretrained(tiny("llama").path, limits=limits, offload_dir=tmp_path) as engine:
            assert_same(engine.run(asked), expected)
            assert engine.ledger.peak <= limits.cpu
            engine.ledger.check({"weights": engine.ledger.in_use})


def test_a_packed_cache_shares_nothing_yet(tiny, tmp_path):
    requests = [GenerationRequest(prompt_token_ids=p, max_tokens=2, ignore_eos=True) for p in tree()]
    with Engine.from_pretrained(tiny("llama").path, precision="4bit", offload_dir=tmp_path) as engine:
        assert all(result.error is None for result in engine.run(requests))
        assert engine.last_run["workload"]["prompt_tokens_computed"] == sum(len(p) for p in {tuple(p) for p in tree()})


def test_a_value_that_is_not_finite_in_a_prefix_fails_its_users_alone(tiny, monkeypatch):
    from flexgen_helm.models.decoder import Decoder

    honest = Decoder.embed

    def broken(self, weights, token_ids, positions):
        hidden = honest(self, weights, token_ids, positions)
        return hidden.masked_fill((token_ids == 77)[:, None], float("nan"))

    monkeypatch.setattr(Decoder, "embed", broken)
    requests = [
        GenerationRequest(prompt_token_ids=[*stem, *tail], max_tokens=3, ignore_eos=True)
        for stem in ([77, 6, 7, 8], [9, 6, 7, 8])
        for tail in ([1, 2], [1, 3], [4])
    ]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        results = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
    assert [result.error is not None for result in results] == [True] * 3 + [False] * 3


def test_what_is_planned_is_told_to_the_planner(tiny):
    """The workload that predictions are made for has the tokens that will be computed."""
    prompts = [[*range(2, 30), 40 + i] for i in range(6)]
    requests = [GenerationRequest(prompt_token_ids=p, max_tokens=1, ignore_eos=True) for p in prompts]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        from flexgen_helm.exec.prepare import prepare

        prepared = prepare(requests, engine.spec, engine.tokenizer, "row")
        asked = engine_module._asked(prepared, 0.0, True)
        assert asked.computed * asked.num_sequences == pytest.approx(28 + 6)
        assert engine_module._asked(prepared, 0.0, False).computed == 29
        assert len(share(prepared.running, 10, 0.0)) == 6 and plan_prefixes([], 10, 0.0) == []
