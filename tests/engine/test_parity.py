"""The engine against `transformers` in float32, and against itself in other company."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, progress
from flexgen_helm.engine import loop_attention
from tests.helpers.backend_models import saved
from tests.helpers.parity import (
    TOLERANCE,
    assert_equals_reference,
    prompts,
    seeing_longer_neighbours,
)
from tests.helpers.tiny_models import VARIANTS, TinyModel, kv_bytes_per_token


@pytest.mark.parametrize(
    "batch, variant", [*((17, name) for name in VARIANTS), (1, "opt"), (1, "gemma3"), (1, "bloom")]
)
def test_scores_and_greedy_tokens_equal_transformers(tiny, variant, batch):
    model = tiny(variant)
    asked = prompts(batch, 70, seed=batch)
    requests = [
        GenerationRequest(
            prompt_token_ids=p,
            max_tokens=(0, 1, 7, 20)[i % 4],
            echo_logprobs=i % 3 != 1,
            ignore_eos=True,
        )
        for i, p in enumerate(asked, start=2)
    ]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(requests)
    for prompt, request, result in zip(asked, requests, results):
        assert len(result.completions[0].token_ids) == request.max_tokens
        assert_equals_reference(model, prompt, request, result)


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", ["llama", "FalconH1ForCausalLM", "gemma2"])
@pytest.mark.parametrize(
    "kept, rounded", [("float16", "float32"), ("bfloat16", "float16"), ("float16", None)]
)
def test_vectors_are_not_rounded_and_what_is_rounded_of_matrices_is_said(
    tiny, name, kept, rounded, tmp_path
):
    """As trainers save norms and biases that must not lose bits; `transformers` reads each tensor
    as it is stored.

    kept: type of most matrices; rounded: of one, None where none is. Vectors are in float32.
    """
    if name in VARIANTS:
        shutil.copytree(tiny(name).path, tmp_path / "model")
    else:
        saved(name, tmp_path / "model")
    folder = tmp_path / "model"
    tensors = load_file(folder / "model.safetensors")
    one = next(key for key in tensors if "layers.0" in key and key.endswith("up_proj.weight"))
    torch.manual_seed(0)
    for key, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[key] = tensor.float() * (1 + 0.01 * torch.randn(tensor.shape))
        else:
            tensors[key] = tensor.to(getattr(torch, rounded if rounded and key == one else kept))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tensors[one] = tensors[one].to(getattr(torch, kept))
    events = []
    # of the smallest vocabulary
    asked = [[token % 64 for token in prompt] for prompt in prompts(4, 50, seed=1)]
    requests = [
        GenerationRequest(prompt_token_ids=p, max_tokens=3, echo_logprobs=True, ignore_eos=True)
        for p in asked
    ]
    with progress.observed_by(events.append), Engine.from_pretrained(folder) as engine:
        results = engine.run(requests)
    said = [
        event.text
        for event in events
        if isinstance(event, progress.Message) and "rounded" in event.text
    ]
    names = {"float32": "F32", "float16": "F16"}
    assert set(engine.last_run["rounded_weights"]) == ({names[rounded]} if rounded else set())
    assert len(said) == bool(rounded)
    # what the engine has computed with
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, request, result in zip(asked, requests, results):
        assert_equals_reference(TinyModel(folder, reference), prompt, request, result)


neighbours = st.builds(
    GenerationRequest,
    prompt_token_ids=st.integers(1, 40).map(lambda length: prompts(1, length, seed=length)[0]),
    max_tokens=st.sampled_from([0, 1, 2, 5, 17]),
    n=st.sampled_from([1, 1, 1, 3]),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.7]),
    echo_logprobs=st.booleans(),
    seed=st.integers(0, 3),
)
OPTIONS = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["row", "zigzag"]),
        "policy": st.sampled_from(["auto", "1x1,0,100,0,100,0,100", "2x3,0,100,0,100,0,100"]),
    }
)


@pytest.fixture(scope="module")
def needle(tiny):
    """A request, and its answer when it is alone."""
    request = GenerationRequest(
        prompt_token_ids=prompts(1, 30, seed=5)[0], max_tokens=12, echo_logprobs=True
    )
    with Engine.from_pretrained(tiny("llama").path) as engine:
        return request, engine.run([request])[0]


@pytest.mark.one_release
@settings(max_examples=6)
@given(
    before=st.lists(neighbours, max_size=6), behind=st.lists(neighbours, max_size=6),
    options=OPTIONS, cache_tokens=st.sampled_from([80, 150, 100_000]),
)  # fmt: skip
def test_a_needle_in_any_company_keeps_its_answer(
    tiny, needle, before, behind, options, cache_tokens
):
    """Whatever its neighbours, the schedule, the block and the memory limit: same tokens, same
    log-probabilities.
    """
    request, alone = needle
    path = tiny("llama").path
    with Engine.from_pretrained(path) as engine:
        limit = max(
            2 * engine.ledger.in_use,
            engine.ledger.in_use + cache_tokens * kv_bytes_per_token(engine.model_config, 4),
        )
    with Engine.from_pretrained(path, limits=MemoryLimits(cpu=limit), **options) as engine:
        result = engine.run([*before, request, *behind])[len(before)]
        engine.ledger.check({"weights": engine.ledger.in_use})
    assert result.completions[0].token_ids == alone.completions[0].token_ids
    assert max_difference(result, alone) < TOLERANCE


def max_difference(a, b):
    pairs = [
        *zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:]),
        *zip(a.completions[0].logprobs, b.completions[0].logprobs),
    ]
    return max(abs(x - y) for x, y in pairs)


@pytest.mark.one_release
def test_the_needle_test_would_notice_a_leak(tiny, needle, monkeypatch):
    """The guard's inverse: if every sequence sees the columns of longer neighbours, the needle's
    answer changes.
    """
    request, alone = needle
    monkeypatch.setattr(loop_attention, "attend_segments", seeing_longer_neighbours)
    longer = [GenerationRequest(prompt_token_ids=p, max_tokens=12) for p in prompts(5, 40, seed=9)]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        result = engine.run([*longer, request])[-1]
    assert max_difference(result, alone) > 10 * TOLERANCE


DRAWN = {"temperature": 0.7, "top_p": 0.9}


@pytest.mark.one_release
@pytest.mark.parametrize("variant", ["opt", "mistral", "gemma3", "bloom", "qwen3-moe"])
def test_completions_share_their_prompt_and_equal_single_ones(tiny, variant):
    """n continuations over one cached prompt are scored by the raw softmax, as `transformers`
    scores each alone.
    """
    model = tiny(variant)
    prompt = prompts(1, 40, seed=3)[0]
    request = GenerationRequest(
        prompt_token_ids=prompt, max_tokens=15, n=5, seed=11, ignore_eos=True, **DRAWN
    )
    with Engine.from_pretrained(model.path) as engine:
        result = engine.run([request])[0]
        computed = engine.last_run["workload"]["prompt_tokens_computed"]
    assert computed == len(prompt)
    assert len({c.token_ids for c in result.completions}) > 1
    for completion in result.completions:
        reference = model.logprobs(prompt + list(completion.token_ids))
        for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs)):
            assert abs(logprob - reference[len(prompt) - 1 + i, token].item()) < TOLERANCE
