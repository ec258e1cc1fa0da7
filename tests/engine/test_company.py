"""A request's numbers have the same bits alone and in any company, or its model is refused by
name.
"""

import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.engine import batch_invariance
from flexgen_helm.errors import UsageError
from flexgen_helm.kernels.amx import has_amx
from flexgen_helm.kernels.attention import can_attend_caches
from flexgen_helm.models.transformers_backend.batch_invariance import BatchInvariant
from tests.helpers.software_tiles import software_tiles
from tests.helpers.tiny_causal_models import tiny_config
from tests.helpers.tiny_models import VARIANTS, VOCABULARY, save_random

MIB = 1 << 20
CPUINFO = Path("/proc/cpuinfo")
IS_AMD = CPUINFO.is_file() and "AuthenticAMD" in CPUINFO.read_text()
pytestmark = [
    pytest.mark.skipif(
        not IS_AMD, reason=("PyTorch's exponentials were tried on AMD's processors alone")
    ),
    pytest.mark.skipif(
        not can_attend_caches(torch.device("cpu"), torch.float32),
        reason="no compiled loop attends here",
    ),
]
# Kinds of layers: windows and caps, biases, positions, ALiBi, parallel ones, experts, sinks, and a
# hybrid.
FAST = ["llama", "gemma2", "opt-350m", "mixtral", "GptOssForCausalLM"]
SLOW = [
    "gpt2",
    "bloom",
    "pythia",
    "qwen3-moe",
    "Lfm2ForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
]
CASES = [
    *((variant, "fp16") for variant in FAST),
    ("llama@50257", "fp16"),
    ("SmolLM3ForCausalLM@151936", "fp16"),
    ("llama", "8bit"),
    ("llama", "4bit"),
    *(pytest.param(variant, "fp16", marks=pytest.mark.slow) for variant in SLOW),
    *(pytest.param(f"opt-350m@{size}", "fp16", marks=pytest.mark.slow) for size in (32_769, 128_256, 262_144)),
    pytest.param("gemma2", "4bit-weights", marks=pytest.mark.slow),
    *(pytest.param(variant, "4bit", marks=pytest.mark.slow) for variant in ("gemma2", "mixtral", "bloom")),
]  # fmt: skip


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """Build a variant, or a class of transformers, with room for several blocks of keys: its
    folder, its window.

    name@size: with a vocabulary of that size.
    """
    built = {}

    def get(variant):
        if variant not in built:
            name, _, vocabulary = variant.partition("@")
            config = VARIANTS[name]() if name in VARIANTS else tiny_config(name)
            config.vocab_size = int(vocabulary or config.vocab_size)
            for key in ("max_position_embeddings", "n_positions"):
                if name in VARIANTS and hasattr(config, key):
                    setattr(config, key, 320)
            save_random(folder := tmp_path_factory.mktemp(variant), config, seed=1)
            built[variant] = folder, 300 if name in VARIANTS else 60
        return built[variant]

    return get


def tree_of_prompts(draw, longest, vocabulary=0):
    """Requests of every kind, with beginnings in common that end at and beside borders of
    blocks.
    """
    vocabulary, stems = vocabulary or (VOCABULARY if longest > 60 else 60), [[]]
    for _ in range(draw.randrange(1, 4)):
        size = draw.choice([1, 5, 30, 63, 64, 70] if longest > 60 else [1, 5, 20])
        stems.append(draw.choice(stems) + [draw.randrange(3, vocabulary) for _ in range(size)])

    def prompt():
        ids = draw.choice(stems) + [
            draw.randrange(3, vocabulary) for _ in range(1 + draw.randrange(30))
        ]
        return ids[: longest - 12]

    most = draw.choice([[0], [0, 1, 2, 7, 12]])  # scoring alone is prefill-only
    return [
        GenerationRequest(
            prompt_token_ids=prompt(), max_tokens=draw.choice(most), echo_logprobs=draw.random() < 0.5,
            n=draw.choice([1, 1, 3]), temperature=draw.choice([0.0, 0.9]), seed=seed,
            ignore_eos=True,
        )
        for seed in range(draw.randrange(2, 12))
    ]  # fmt: skip


def bits(result):
    assert result.error is None, result.error
    return result.prompt_logprobs, [(c.token_ids, c.logprobs) for c in result.completions]


def drawn_plan(draw):
    """Options under which requests are answered together."""
    if draw.random() < 0.3:
        return {}
    policy = "{}x{},0,{},0,{},0,100".format(
        *(draw.choice(x) for x in ([1, 2, 3, 5], [1, 2, 3], *2 * [[0, 50, 100]]))
    )
    return {"policy": policy, "schedule": draw.choice(["row", "zigzag"])}


@pytest.mark.parametrize(("variant", "precision"), CASES)
def test_bits_do_not_depend_on_the_company(longer, tmp_path, variant, precision):
    """Of each request alone, on one thread and in memory, and of all of them under a drawn plan."""
    model, longest = longer(variant)
    options = {"precision": precision, "batch_invariant": True, "offload_dir": tmp_path}
    draws = [random.Random(f"{variant} {seed}") for seed in (0, 1)]
    vocabulary = int(variant.partition("@")[2] or 0)
    trees = [tree_of_prompts(draw, longest, vocabulary) for draw in draws]
    torch.set_num_threads(1)
    with Engine.from_pretrained(model, **options) as engine:
        alone = [[bits(engine.run([request])[0]) for request in asked] for asked in trees]
    for draw, asked, expected in zip(draws, trees, alone):
        torch.set_num_threads(draw.randrange(1, 4))
        plan = drawn_plan(draw) | {"limits": MemoryLimits(cpu=64 * MIB, disk=256 * MIB)}
        with Engine.from_pretrained(model, **plan, **options) as engine:
            if draw.random() < 0.6:
                engine.share_every_beginning()
            order = draw.sample(range(len(asked)), len(asked))
            found = engine.run([asked[number] for number in order])
        assert [bits(result) for result in found] == [expected[number] for number in order]


def test_the_comparison_sees_sums_over_a_vocabulary_that_threads_divide(longer, monkeypatch):
    """As PyTorch sums a row that is alone. The trial has rows of the model's own vocabulary."""
    monkeypatch.setattr(
        batch_invariance, "log_normalizers", partial(torch.logsumexp, dim=-1, keepdim=True)
    )
    torch.set_num_threads(2)
    with pytest.raises(UsageError, match="sums over the vocabulary"):
        Engine.from_pretrained(longer("llama@50257")[0], batch_invariant=True)


# Elements of modules, wherever they lie: PyTorch's own functions differ in the last elements of a
# vector, or for a long row that is alone.
PLACES = {
    "mish": F.mish, "elu": F.elu, "power": lambda x: x.abs() ** 1.3, "fifth": lambda x: (x / 3) ** 5.0,
    "sigmoid": torch.sigmoid, "softplus": F.softplus,
    "sum": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "mean": lambda x: x.mean(-1, keepdim=True).expand_as(x),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_functions_of_modules_do_not_follow_the_place_of_an_element(name):
    function, differs = PLACES[name], 0
    is_sum = name in ("sum", "mean")
    for size in (40_001, 70_000) if is_sum else (5, 16, 31, 97, 1000, 40_001):
        rows = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * 3
        torch.set_num_threads(2)
        with BatchInvariant():
            alone = torch.cat([function(row) for row in rows.split(1)])
            together = (
                function(rows) if is_sum else function(torch.cat((rows.flatten(), torch.zeros(7))))
            )
        assert torch.equal(alone.flatten(), together.flatten()[: 4 * size])
        torch.testing.assert_close(alone.double(), function(rows.double()), rtol=1e-5, atol=1e-4)
        plain = torch.cat([function(row) for row in rows.split(1)])
        whole = function(rows) if is_sum else function(torch.cat((rows.flatten(), torch.zeros(7))))
        differs += not torch.equal(plain.flatten(), whole.flatten()[: 4 * size])
    assert differs or name == "fifth"


def test_sums_and_powers_that_are_none_of_long_rows_are_those_of_pytorch():
    """Other axes of a tensor whose rows are long, all of it, and whole powers of negative
    numbers.
    """
    x = torch.randn(3, 40_001)
    for function in (
        lambda y: y.mean(0),
        lambda y: y.mean(),
        lambda y: y.sum(0),
        lambda y: y.sum(),
        lambda y: y**4.0,
    ):
        with BatchInvariant():
            found = function(x)
        torch.testing.assert_close(found.double(), function(x.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_matrix_unit_gives_one_row_the_bits_of_many(longer, tmp_path):
    """In software where there is none; the model has its trial there too."""
    asked = tree_of_prompts(random.Random(3), 40)
    with (
        nullcontext() if has_amx() else software_tiles(),
        Engine.from_pretrained(
            longer("llama")[0], offload_dir=tmp_path, batch_invariant=True
        ) as engine,
    ):
        together = [bits(result) for result in engine.run(asked)]
        assert together == [bits(engine.run([request])[0]) for request in asked]


@pytest.mark.parametrize(
    ("variant", "options", "named"),
    [
        ("llama", {"precision": "paper-4bit"}, "KV cache of paper-4bit"),
        ("llama", {"device": "sim", "limits": MemoryLimits(gpu=64 * MIB)}, "take --device cpu"),
        pytest.param(
            "JambaForCausalLM", {}, "JambaForCausalLM, has other bits alone", marks=pytest.mark.slow
        ),
    ],
)
def test_what_follows_the_batch_is_refused(longer, tmp_path, variant, options, named):
    with pytest.raises(UsageError, match=named):
        Engine.from_pretrained(
            longer(variant)[0], batch_invariant=True, offload_dir=tmp_path, **options
        )


def test_a_loop_that_is_missing_is_refused(longer, tmp_path, monkeypatch):
    from flexgen_helm.engine import batch_invariance

    monkeypatch.setattr(batch_invariance, "can_attend_caches", lambda *given: False)
    with pytest.raises(UsageError, match="compiled loops do not work here"):
        Engine.from_pretrained(longer("llama")[0], batch_invariant=True, offload_dir=tmp_path)
