"""Layers of decode batches by programs: the same answers, and no program where something is no compiled loop."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, GenerationResult, MemoryLimits
from flexgen_helm.engine import engine as engine_module
from flexgen_helm.engine import layer_programs
from flexgen_helm.engine.attention_metadata import LayerAttention
from flexgen_helm.kernels import layer_rows, team, trial
from flexgen_helm.kernels.program import Program
from flexgen_helm.kv_cache import memory_planes
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.decoder import Decoder
from tests.helpers.prefixes import share_at_no_cost
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import (
    VOCABULARY,
    TinyModel,
    config_like_llama,
    gemma_config,
    llama_config,
    save_random,
    save_tokenizer,
)

pytest.importorskip("flexgen_helm.kernels.compiled")

# Widths of whole vectors and of the matrix unit's steps.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
}
# Calls of a program of two layers and their attention, at least; one of a part of a layer has fewer.
BOTH_LAYERS = 38


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("programs"), llama_config(**SIZES))


def saved(folder: Path, config) -> Path:
    save_random(folder, config, seed=3)
    save_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_at_no_cost(monkeypatch)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Runs of programs by their number of calls."""
    counted: Counter[int] = Counter()
    run = Program.run

    def counting(program: Program) -> None:
        counted[len(program.functions)] += 1
        run(program)

    monkeypatch.setattr(Program, "run", counting)
    return counted


def requests(count: int, shares: bool = True, **options) -> list[GenerationRequest]:
    """Sequences that end one after the other, a third of them behind a shared beginning."""
    prompts = [[2 + (11 * i + j * j) % (VOCABULARY - 2) for j in range(4 + i % 19)] for i in range(count)]
    if shares:
        prompts[::3] = [list(range(5, 70)) + prompt for prompt in prompts[::3]]
    return [
        GenerationRequest(
            prompt_token_ids=prompt, **{"max_tokens": 5 + i % 9, "ignore_eos": True, "top_logprobs": 2, **options}
        )
        for i, prompt in enumerate(prompts)
    ]


def answers(path: Path, asked: list[GenerationRequest], **options) -> list[GenerationResult]:
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        return [engine.run(asked), engine.run(asked)][1]


def numbers(results: list[GenerationResult]) -> list[object]:
    assert all(result.error is None for result in results)
    return [(one.token_ids, one.logprobs) for result in results for one in result.completions]


def without(monkeypatch: pytest.MonkeyPatch, path: Path, asked: list[GenerationRequest], **options) -> list[object]:
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "can_record", lambda: False)
        return numbers(answers(path, asked, **options))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 7, 30])
def test_programs_compute_the_same_bits(model, monkeypatch, runs, threads, count):
    before, asked = torch.get_num_threads(), requests(count)
    torch.set_num_threads(threads)
    try:
        expected = without(monkeypatch, model, asked)
        assert not runs
        assert numbers(answers(model, asked)) == expected
    finally:
        torch.set_num_threads(before)
    # What was recorded in the first run serves in the second.
    assert sum(runs[calls] for calls in runs if calls > BOTH_LAYERS) > 3


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_is_one_program(model, monkeypatch, runs, threads):
    """Sequences end, others begin, caches of some groups of lengths grow: what moved is read where it is now."""
    before, asked = torch.get_num_threads(), requests(20, shares=False)
    asked = [replace(own, max_tokens=10 + 17 * i % 130) for i, own in enumerate(asked)]
    torch.set_num_threads(threads)
    try:
        expected = without(monkeypatch, model, asked)
        assert numbers(answers(model, asked)) == expected
    finally:
        torch.set_num_threads(before)
    whole = sum(runs[calls] for calls in runs if calls > BOTH_LAYERS)
    assert whole > 200 and whole > 0.8 * sum(runs.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_behind_shared_prefixes_is_one_program(model, monkeypatch, runs, threads):
    """Of two beginnings, one within the other; some sequences have neither. The tables of the first layer's segments
    serve no other layer."""
    before, asked = torch.get_num_threads(), requests(20)
    longer = [*range(5, 70), *range(9, 50)]
    asked = [
        replace(own, prompt_token_ids=longer + own.prompt_token_ids) if i % 3 == 1 else own
        for i, own in enumerate(asked)
    ]
    asked = [replace(own, max_tokens=10 + 17 * i % 130) for i, own in enumerate(asked)]
    torch.set_num_threads(threads)
    try:
        expected = without(monkeypatch, model, asked)
        with Engine.from_pretrained(model, device="cpu") as engine:
            found = [numbers(engine.run(asked)) for _ in range(2)]
            computed = engine.last_run["workload"]["prompt_tokens_computed"]
    finally:
        torch.set_num_threads(before)
    assert found == [expected, expected]
    assert computed < sum(len(own.prompt_token_ids) for own in asked) - 10 * 65
    whole = sum(runs[calls] for calls in runs if calls > BOTH_LAYERS)
    assert whole > 150 and whole > 0.8 * sum(runs.values())


CONFIGS = {
    "windows": lambda: config_like_llama("MistralConfig", **SIZES, head_dim=None, sliding_window=11),
    "norms of queries": lambda: config_like_llama("Qwen3Config", **SIZES, head_dim=16),
    "soft caps": lambda: gemma_config(
        "Gemma2Config", **SIZES, head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
}


@pytest.mark.parametrize("kind", [*CONFIGS])
def test_kinds_of_attention(tmp_path, monkeypatch, runs, kind):
    path, asked = saved(tmp_path, CONFIGS[kind]()), requests(7)
    assert numbers(answers(path, asked)) == without(monkeypatch, path, asked)
    assert max(runs) > BOTH_LAYERS


@pytest.mark.parametrize("seed", range(share_of(12, 3)))
def test_random_trees_of_prefixes(tmp_path, monkeypatch, runs, seed):
    draw = random.Random(seed)
    path = saved(tmp_path, draw.choice([lambda: llama_config(**SIZES), *CONFIGS.values()])())

    def some(count):
        return [draw.randrange(2, VOCABULARY) for _ in range(count)]

    stems = [some(draw.choice([3, 17, 64, 90, 150])) for _ in range(3)]
    stems += [stems[0] + stems[1][:20], stems[0] + stems[1][:20] + some(3), []]
    asked = [
        GenerationRequest(
            prompt_token_ids=draw.choice(stems) + some(draw.randint(1, 20)), max_tokens=draw.choice([1, 3, 12, 40, 70]),
            n=draw.choice([1, 1, 1, 3]), temperature=draw.choice([0.0, 0.9]), seed=i, ignore_eos=True,
            echo_logprobs=draw.random() < 0.3,
        )
        for i in range(draw.randrange(2, 40))
    ]  # fmt: skip
    assert numbers(answers(path, asked)) == without(monkeypatch, path, asked)
    assert max(runs) > BOTH_LAYERS


@pytest.mark.parametrize("policy", ["4x3,100,0,100,0,100,0", "8x2,100,0,0,0,100,0", "4x3,100,0,0,0,0,0"])
def test_batches_in_turn_and_caches_on_the_disk(model, monkeypatch, runs, policy):
    """What waits between layers, or is stored in the background, is not overwritten by the next batch."""
    asked = requests(12)
    expected = without(monkeypatch, model, asked, policy=policy)
    assert numbers(answers(model, asked, policy=policy)) == expected
    assert runs


def test_offloaded_weights_have_no_programs(model, runs):
    numbers(answers(model, requests(6), policy="8x1,0,0,100,0,100,0"))
    assert not runs


def test_products_of_a_library_are_computed_as_usual(model, monkeypatch, runs):
    """Of copies in float32 the matrix unit multiplies many rows only, if there is one."""
    asked = requests(6)
    expected = without(monkeypatch, model, asked, precision="4bit-weights")
    assert numbers(answers(model, asked, precision="4bit-weights")) == expected
    assert sum(runs.values()) < 30


@pytest.mark.parametrize("variant", ["opt", "gpt2", "gemma3", "qwen2", "olmo2", "mixtral"])
def test_other_models_answer_the_same(tiny: Callable[[str], TinyModel], monkeypatch, variant):
    try:
        path = tiny(variant).path
    except KeyError:
        pytest.skip(f"no tiny {variant}")
    asked = requests(9)
    assert numbers(answers(path, asked)) == without(monkeypatch, path, asked)


def test_an_operation_that_is_no_loop_is_found(model, monkeypatch, runs):
    """The inverse of the comparison: a sum by PyTorch is in no program, which would leave it out."""
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    monkeypatch.setattr(layer_rows, "add", lambda x, y: x.add_(y))
    assert numbers(answers(model, asked)) == expected
    # The part before attention has none and is served; of the other each size was compared once.
    assert len([count for count in runs.values() if count > 20]) <= 1


def test_without_the_comparison_the_answers_would_be_wrong(model, monkeypatch):
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    monkeypatch.setattr(layer_rows, "add", lambda x, y: x.add_(y))
    monkeypatch.setattr(layer_programs, "is_whole", lambda *given: True)
    assert numbers(answers(model, asked)) != expected


@pytest.mark.parametrize("compares", [True, False])
def test_what_one_layer_alone_makes_of_the_rotations_is_found(model, monkeypatch, compares):
    """Its calls are those of the layer before, and its copy of the rotations stays that of the recorded pass."""
    original = Decoder.before_attention

    def copying(decoder, weights, layer, hidden, rotary):
        rotary = {rope: (cos * 1.0, sin * 1.0) for rope, (cos, sin) in rotary.items()} if layer == 1 else rotary
        return original(decoder, weights, layer, hidden, rotary)

    monkeypatch.setattr(Decoder, "before_attention", copying)
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    if not compares:
        monkeypatch.setattr(layer_programs, "is_whole", lambda *given: True)
    found = answers(model, asked)
    # A copy that is gone may even be no number.
    assert (all(result.error is None for result in found) and numbers(found) == expected) == compares


def test_attention_that_is_no_loop_is_found(model, monkeypatch, runs):
    """The same of attention: PyTorch would store what the pass before has left in memory."""
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    monkeypatch.setattr(memory_planes, "put_rows", lambda *given: False)
    assert numbers(answers(model, asked)) == expected
    assert max(runs) < BOTH_LAYERS


def test_without_that_comparison_the_answers_would_be_wrong(model, monkeypatch):
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    monkeypatch.setattr(memory_planes, "put_rows", lambda *given: False)
    monkeypatch.setattr(layer_programs, "has_same_bits", lambda *given: True)
    assert numbers(answers(model, asked)) != expected


def test_layers_that_are_taken_for_one_kind_are_found(tmp_path, monkeypatch, runs):
    """A layer with a window has other tables than one without: the calls of one are no calls of the other."""
    path, asked = saved(tmp_path, CONFIGS["soft caps"]()), requests(7)
    expected = without(monkeypatch, path, asked)
    monkeypatch.setattr(LayerAttention, "kind", (None, True))
    assert numbers(answers(path, asked)) == expected
    assert max(runs) < BOTH_LAYERS


def test_keys_of_another_layers_prefix_are_found(model, monkeypatch, runs):
    """The inverse: if places left out where shared keys are, all layers would read those of the first."""
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    honest = LayerAttention.places.fget
    monkeypatch.setattr(LayerAttention, "places", property(lambda own: honest(own)[: 2 * len(own.metadata.decodes)]))
    assert numbers(answers(model, asked)) == expected
    assert max(runs) < BOTH_LAYERS
    monkeypatch.setattr(layer_programs, "has_same_bits", lambda *given: True)
    assert numbers(answers(model, asked)) != expected


def test_too_little_memory_for_attention_is_no_error(model, monkeypatch, runs):
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    made = iter([torch.zeros(96 << 20, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)])
    monkeypatch.setattr(layer_programs, "pages", lambda num_bytes: next(made))
    assert numbers(answers(model, asked)) == expected
    assert runs and max(runs) < BOTH_LAYERS


def test_an_error_in_the_middle_of_a_pass(model, monkeypatch, runs):
    """Nothing of the pass is kept, and the next run is right."""
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    append, counted = KVCache.append, Counter[str]()

    def failing(cache, block, layer, new, k, v):
        counted["calls"] += team.recording() is not None
        if counted["calls"] == 8:
            raise OSError("a cache that cannot be written")
        append(cache, block, layer, new, k, v)

    with Engine.from_pretrained(model, device="cpu") as engine:
        assert numbers(engine.run(asked)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "append", failing)
            with pytest.raises(OSError, match="cannot be written"):
                engine.run(asked)
        assert team.recording() is None
        assert numbers(engine.run(asked)) == expected
    assert max(runs) > BOTH_LAYERS


@pytest.mark.parametrize("layer", [0, 1])
def test_a_value_that_is_not_finite_is_found_behind_its_layer(model, runs, layer):
    with Engine.from_pretrained(model, device="cpu") as engine:
        asked = requests(5, shares=False)
        numbers(engine.run(asked))
        weight = engine._weights.tensors[f"layers.{layer}.mlp.down.weight"]

        def spoil(place: int, result: GenerationResult) -> None:
            for copy in (weight.resident, weight.stored):  # of few rows, where there is no matrix unit
                if copy is not None:
                    copy[3, 5] = torch.inf

        results = engine.run(asked, on_result=spoil)
    errors = [str(result.error) for result in results if result.error is not None]
    assert len(errors) == 4 and all(f"stage layers.{layer}" in error for error in errors)
    assert max(runs) > BOTH_LAYERS


def test_a_trial_in_the_middle_is_not_recorded(model, monkeypatch, runs):
    """The first product of a process tries its loop, with memory that is gone afterwards."""
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    tried: list[str] = []
    original = trial.tried

    def counting(what, is_right):
        tried.append(what)
        return original(what, is_right)

    monkeypatch.setattr(layer_rows, "tried", counting)
    with Engine.from_pretrained(model, device="cpu") as engine:
        layer_rows._compiled.cache_clear()
        engine.run(asked)
        assert numbers(engine.run(asked)) == expected
    assert tried and max(runs) < 80


def test_too_little_memory_is_no_error(model, monkeypatch, runs):
    asked = requests(7)
    expected = without(monkeypatch, model, asked)
    monkeypatch.setattr(layer_programs, "pages", lambda num_bytes: torch.zeros(128, dtype=torch.uint8))
    assert numbers(answers(model, asked, limits=MemoryLimits(cpu=1 << 30))) == expected
    assert not runs
