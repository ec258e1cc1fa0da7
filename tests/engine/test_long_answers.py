"""Long answers that end early: more of them at once than could reach their `max_tokens`, and the
same answers.
"""

from functools import cache

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.kv_cache.cache import KVCache
from tests.helpers.tiny_models import (
    VOCABULARY,
    kv_bytes_per_token,
    llama_config,
    save_random,
    save_tokenizer,
)

MOST = 200
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    save_random(folder, llama_config(max_position_embeddings=300), seed=5)
    save_tokenizer(folder)
    return folder


def requests(count=24, **options):
    """Prompts of 4 to 32 tokens; a third of them share a beginning."""
    prompts = [
        [2 + (11 * i + j * j) % (VOCABULARY - 2) for j in range(4 + i % 29)] for i in range(count)
    ]
    prompts[::3] = [list(range(5, 30)) + prompt for prompt in prompts[::3]]
    return [
        GenerationRequest(
            prompt_token_ids=prompt,
            **{"max_tokens": MOST, "temperature": 1.0, "seed": i, "stop": ["x"], **options},
        )
        for i, prompt in enumerate(prompts)
    ]


def answers(engine, asked, **options):
    results = engine.run(asked, **options)
    assert all(result.error is None for result in results)
    return [[completion.token_ids for completion in result.completions] for result in results]


@cache
def ample(model, **options):
    """Answers of `requests()` with ample memory; the first of them are those of fewer requests."""
    with Engine.from_pretrained(model, **options) as engine:
        return answers(engine, requests())


@cache
def limits_for(model, precision, sequences, **options):
    """Bytes of the compute tier with room for the weights and the longest answers of so many
    sequences.
    """
    with Engine.from_pretrained(model, precision=precision, **options) as engine:
        weights = engine.ledger.in_use
        positions = sequences * (MOST + 57)
        return {
            "weights": weights,
            "cache": int(positions * kv_bytes_per_token(engine.model_config, 4)),
        }


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "schedule, precision, batch_invariant",
    [
        ("row", "fp16", False),
        ("zigzag", "fp16", False),
        ("zigzag", "4bit", False),
        ("zigzag", "4bit", True),
    ],
)
def test_preempted_answers_are_those_of_ample_memory(model, schedule, precision, batch_invariant):
    asked, options = requests(), {"precision": precision, "batch_invariant": batch_invariant}
    expected = ample(model, **options)
    lengths = sorted(len(tokens) for (tokens,) in expected)
    assert lengths[0] < MOST / 8 and lengths[-1] > MOST / 2, "answers of very different lengths"
    sizes = limits_for(model, precision, 4 if precision == "fp16" else 2.5)
    limit = sizes["weights"] + sizes["cache"]
    with Engine.from_pretrained(
        model, schedule=schedule, limits=MemoryLimits(cpu=limit), **options
    ) as engine:
        got = answers(engine, asked)
        record = engine.last_run
    differing = sum(a != b for a, b in zip(got, expected))
    # What is computed again may differ in its last bits, which may move a key across a border of 4
    # bits.
    assert differing <= (0 if precision == "fp16" or batch_invariant else len(asked) // 8)
    assert record["peak_bytes"]["cpu"] <= limit
    assert record["preemptions"] > 0


def test_several_completions_behind_shared_prompts(model):
    asked = requests(12, n=3)
    with Engine.from_pretrained(model) as engine:
        expected = answers(engine, asked)
    sizes = limits_for(model, "fp16", 2)
    limits = MemoryLimits(cpu=sizes["weights"] + sizes["cache"])
    with Engine.from_pretrained(model, schedule="zigzag", limits=limits) as engine:
        assert answers(engine, asked) == expected
        assert engine.last_run["preemptions"] > 0


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "policy, cpu_attention",
    [
        ("8x5,100,0,100,0,100,0", True),
        ("8x5,0,50,0,100,0,100", False),
        ("8x5,100,0,50,50,100,0", True),
        ("8x5,100,0,50,50,100,0", False),
    ],
)
def test_caches_on_either_side_of_a_link(model, tmp_path, policy, cpu_attention):
    asked = requests()
    sizes = limits_for(model, "fp16", 7)
    total = 4 * MIB + sizes["weights"] + sizes["cache"]
    limits = MemoryLimits(gpu=total, cpu=total, disk=64 * MIB)
    with Engine.from_pretrained(
        model,
        device="sim",
        policy=policy,
        limits=limits,
        offload_dir=tmp_path,
        cpu_attention=cpu_attention,
    ) as engine:
        assert answers(engine, asked) == ample(model)
        peaks = engine.last_run["peak_bytes"]
        assert peaks["gpu"] <= total and peaks["cpu"] <= total


def test_memory_that_runs_out_while_a_cache_grows_costs_no_answer(model, monkeypatch):
    asked, expected = requests(), ample(model)
    honest, calls = KVCache.regroup, []

    def failing(self, block, sources):
        calls.append(len(sources))
        if len(calls) in (2, 5, 6):
            for source in dict.fromkeys(source for source, _ in sources):
                self.free(source)
            raise MemoryLimitError("no room")
        honest(self, block, sources)

    monkeypatch.setattr(KVCache, "regroup", failing)
    monkeypatch.setattr("flexgen_helm.planner.run_memory.LARGE_BLOCK_SEQUENCES", 4)
    with Engine.from_pretrained(model) as engine:
        assert answers(engine, asked) == expected
        assert len(calls) > 6 and engine.last_run["preemptions"] > 0
