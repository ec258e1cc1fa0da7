"""The engine against `transformers` in float32, and against itself in other company."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, progress
from flexgen_helm.engine import attention_metadata
from flexgen_helm.kernels import amx
from tests.helpers.backend_models import saved
from tests.helpers.parity import TOLERANCE, assert_equals_reference, prompts, seeing_longer_neighbours
from tests.helpers.tiny_models import VARIANTS, TinyModel

# One request alone is tried with one family in three, and with all of them by the slow suite.
ALONE = [pytest.param(1, own, marks=[] if number % 3 == 0 else pytest.mark.slow) for number, own in enumerate(VARIANTS)]


@pytest.mark.parametrize("batch, variant", [*((17, variant) for variant in VARIANTS), *ALONE])
def test_scores_and_greedy_tokens_equal_transformers(tiny, variant, batch):
    model = tiny(variant)
    asked = prompts(batch, 70, seed=batch)
    requests = [
        GenerationRequest(
            prompt_token_ids=p, max_tokens=(0, 1, 7, 20)[i % 4], echo_logprobs=i % 3 != 1, ignore_eos=True
        )
        for i, p in enumerate(asked, start=2)
    ]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(requests)
    for prompt, request, result in zip(asked, requests, results):
        assert len(result.completions[0].token_ids) == request.max_tokens
        assert_equals_reference(model, prompt, request, result)


def copied(tiny, name, tmp_path) -> Path:
    """Copy a model, by equations or by modules of `transformers`, whose files a test changes."""
    source = tmp_path / "source"
    if name in VARIANTS:
        source = tiny(name).path
    else:
        saved(name, source)
    return Path(shutil.copytree(source, tmp_path / "model"))


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["llama", "opt-350m", "gemma2", "FalconH1ForCausalLM"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_vectors_in_float32_beside_matrices_in_16_bits_are_not_rounded(tiny, name, half, tmp_path):
    """As trainers save norms and biases that must not lose bits; `transformers` reads each tensor as it is stored."""
    folder = copied(tiny, name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for key, tensor in tensors.items():
        is_vector = tensor.dim() == 1
        tensors[key] = tensor.float() * (1 + 0.01 * torch.randn(tensor.shape)) if is_vector else tensor.to(half)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = TinyModel(
        folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    )
    asked = [[token % 64 for token in prompt] for prompt in prompts(4, 50, seed=1)]  # of the smallest vocabulary
    requests = [GenerationRequest(prompt_token_ids=p, max_tokens=3, echo_logprobs=True, ignore_eos=True) for p in asked]
    with Engine.from_pretrained(folder) as engine:
        results = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
    for prompt, request, result in zip(asked, requests, results):
        assert_equals_reference(model, prompt, request, result)


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", ["llama", "FalconH1ForCausalLM"])
@pytest.mark.parametrize(
    "dtypes, kept, rounded",
    [
        ((torch.float32, torch.float32), torch.float16, {"F32"}),
        ((torch.float32, torch.bfloat16), torch.float16, {"F32", "BF16"}),
        ((torch.bfloat16, torch.float32), torch.bfloat16, {"F32"}),
        ((torch.bfloat16, torch.float16), torch.bfloat16, {"F16"}),
        ((torch.float16, torch.float16), torch.float16, set()),
    ],
)
def test_what_is_rounded_to_16_bits_is_said(tiny, tmp_path, name, dtypes, kept, rounded):
    """dtypes: of most matrices, and of one. Vectors, which have another type, do not count."""
    folder = copied(tiny, name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    one = next(key for key in tensors if "layers.0" in key and key.endswith("up_proj.weight"))
    for key, tensor in tensors.items():
        tensors[key] = tensor.to(dtypes[key == one] if tensor.dim() == 2 else torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    events: list[object] = []
    with progress.observed_by(events.append), Engine.from_pretrained(folder) as engine:
        engine.run([GenerationRequest(prompt_token_ids=[3], max_tokens=1)])
    said = [event.text for event in events if isinstance(event, progress.Message) and "rounded" in event.text]
    assert set(engine.last_run["rounded_weights"]) >= rounded and len(said) == bool(engine.last_run["rounded_weights"])
    assert engine.identity.weight_dtype == kept or engine.last_run["hardware"]["compute_dtype"] == "float32"


requests_strategy = st.lists(
    st.builds(
        dict,
        length=st.integers(1, 40),
        max_tokens=st.sampled_from([0, 1, 2, 5, 17]),
        n=st.sampled_from([1, 1, 1, 3]),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        top_p=st.sampled_from([1.0, 0.7]),
        echo_logprobs=st.booleans(),
        seed=st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def needle(tiny):
    """A request, and its answer when it is alone."""
    request = GenerationRequest(prompt_token_ids=prompts(1, 30, seed=5)[0], max_tokens=12, echo_logprobs=True)
    with Engine.from_pretrained(tiny("llama").path) as engine:
        return request, engine.run([request])[0]


@pytest.mark.one_release
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=requests_strategy,
    schedule=st.sampled_from(["row", "zigzag"]),
    policy=st.sampled_from(["auto", "1x1,0,100,0,100,0,100", "2x3,0,100,0,100,0,100", "5x2,0,100,0,100,0,100"]),
    cache_tokens=st.sampled_from([80, 150, 100_000]),
    place=st.integers(0, 11),
)
def test_a_needle_in_any_company_keeps_its_answer(tiny, needle, drawn, schedule, policy, cache_tokens, place):
    """Whatever its neighbours, the schedule, the block and the memory limit: same tokens, same log-probabilities."""
    request, alone = needle
    haystack = []
    for i, d in enumerate(drawn):
        length = d.pop("length")
        haystack.append(GenerationRequest(prompt_token_ids=prompts(1, length, seed=i)[0], **d))
    haystack.insert(min(place, len(haystack)), request)
    model = tiny("llama")
    with Engine.from_pretrained(model.path) as probe:
        limit = probe.ledger.in_use + cache_tokens * probe.config.kv_bytes_per_token(4)
    limits = MemoryLimits(cpu=max(limit, 2 * probe_bytes(model)))
    with Engine.from_pretrained(model.path, schedule=schedule, policy=policy, limits=limits) as engine:
        result = engine.run(haystack)[haystack.index(request)]
        engine.ledger.check({"weights": engine.ledger.in_use})
    assert result.completions[0].token_ids == alone.completions[0].token_ids
    assert max_difference(result, alone) < TOLERANCE


def probe_bytes(model) -> int:
    return sum(4 * p.numel() for p in model.reference.parameters())


def max_difference(a, b) -> float:
    pairs = [
        *zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:]),
        *zip(a.completions[0].logprobs, b.completions[0].logprobs),
    ]
    return max(abs(x - y) for x, y in pairs)


@pytest.mark.one_release
def test_the_needle_test_would_notice_a_leak(tiny, needle, monkeypatch):
    """The guard's inverse: if every sequence sees the columns of longer neighbours, the needle's answer changes."""
    request, alone = needle
    monkeypatch.setattr(attention_metadata, "attend_segments", seeing_longer_neighbours)
    others = [GenerationRequest(prompt_token_ids=p, max_tokens=12) for p in prompts(5, 40, seed=9)]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        result = engine.run([*others, request])[-1]
    assert max_difference(result, alone) > 10 * TOLERANCE


@pytest.mark.one_release
def test_the_same_plan_gives_the_same_bits(tiny):
    requests = [
        GenerationRequest(prompt_token_ids=p, max_tokens=9, temperature=0.7 * (i % 2), echo_logprobs=True)
        for i, p in enumerate(prompts(13, 50))
    ]
    with Engine.from_pretrained(tiny("opt").path) as engine:
        first, second = engine.run(requests), engine.run(requests)
    for a, b in zip(first, second):
        assert (a.completions, a.prompt_logprobs) == (b.completions, b.prompt_logprobs)


@pytest.mark.one_release
@pytest.mark.parametrize(
    "variant", ["llama", "opt", "mistral", "qwen3-windows", "gemma2", "gemma3", "bloom", "pythia", "qwen3-moe"]
)
def test_completions_share_their_prompt_and_equal_single_ones(tiny, variant):
    """n continuations over one cached prompt are scored as `transformers` scores each of them alone."""
    model = tiny(variant)
    prompt = prompts(1, 40, seed=3)[0]
    request = GenerationRequest(prompt_token_ids=prompt, max_tokens=15, n=5, temperature=1.0, seed=11, ignore_eos=True)
    with Engine.from_pretrained(model.path) as engine:
        result = engine.run([request])[0]
        computed = engine.last_run["workload"]["prompt_tokens_computed"]
    assert computed == len(prompt)
    assert len({c.token_ids for c in result.completions}) > 1
    for completion in result.completions:
        reference = model.logprobs(prompt + list(completion.token_ids))
        for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs)):
            assert abs(logprob - reference[len(prompt) - 1 + i, token].item()) < TOLERANCE


@pytest.mark.one_release
def test_weights_at_rest_in_16_bits_give_the_same_numbers(tiny, monkeypatch):
    """A limit without room for compute copies: products upcast by row tile."""
    monkeypatch.setattr(amx, "_compiled", lambda: None)
    model = tiny("llama")
    request = GenerationRequest(prompt_token_ids=prompts(1, 60)[0], max_tokens=8, echo_logprobs=True)
    with Engine.from_pretrained(model.path) as engine:
        roomy, full = engine.run([request])[0], engine.ledger.by_kind()["weights"]
    with Engine.from_pretrained(model.path, limits=MemoryLimits(cpu=int(full * 1.9))) as engine:
        assert engine.ledger.by_kind()["weights"] < 0.6 * full
        tight = engine.run([request])[0]
    assert tight.completions[0].token_ids == roomy.completions[0].token_ids
    assert max_difference(tight, roomy) < 1e-5


@pytest.mark.one_release
@pytest.mark.skipif(not amx.has_amx(), reason="this processor has no AMX")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_matrix_unit_gives_the_same_numbers_without_copies(dtype, tmp_path, monkeypatch):
    config = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=300, torch_dtype=dtype)  # fmt: skip
    torch.manual_seed(5)
    LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path)
    ids = [[(7 * i + j * j) % 300 for j in range(90)] for i in range(20)]
    requests = [GenerationRequest(prompt_token_ids=each, max_tokens=8, echo_logprobs=True) for each in ids]
    with Engine.from_pretrained(tmp_path) as engine:
        unit, as_stored = engine.run(requests), engine.ledger.by_kind()["weights"]
        assert engine.last_run["hardware"]["product_library"] == "AMX"
    monkeypatch.setattr(amx, "_compiled", lambda: None)
    with Engine.from_pretrained(tmp_path) as engine:
        vectors = engine.run(requests)
        assert as_stored < 0.4 * engine.ledger.by_kind()["weights"]
        assert engine.last_run["hardware"]["product_library"] != "AMX"
    for one, other in zip(unit, vectors):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        assert 0 < max_difference(one, other) < 1e-5


@pytest.mark.one_release
def test_tiles_join_to_the_whole_product(monkeypatch):
    from flexgen_helm.offload.linear import tiled_linear

    monkeypatch.setattr("flexgen_helm.planner.workspace.HOST_UPCAST_ELEMENTS", 100)
    x, w, b = torch.randn(70, 24), torch.randn(31, 24).half(), torch.randn(31)
    expected = x.double() @ w.double().t() + b.double()
    assert (tiled_linear(x, w, b).double() - expected).abs().max() < 1e-4
    assert (tiled_linear(x[:3], w, b).double() - expected[:3]).abs().max() < 1e-4
