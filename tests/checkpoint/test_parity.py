"""Tensors of safetensors folders equal those of `transformers`; dummy weights follow their seed."""

import pytest
import torch
from safetensors.torch import load_file

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.models.config import tensor_shapes
from tests.helpers.model_folders import edit_weights, published_name
from tests.helpers.tiny_models import VARIANTS, save_random

transformers = pytest.importorskip("transformers")

LLAMA_SIZES = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 20,
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype, shards", [("float32", 6000), ("float16", 10**9), ("bfloat16", 6000)]
)
def test_tensors_equal_those_in_transformers(dtype, shards, tmp_path):
    model = save_random(tmp_path / "saved", VARIANTS["llama-untied-biases"](), 3, dtype).to(
        getattr(torch, dtype)
    )
    model.save_pretrained(tmp_path / "m", max_shard_size=shards)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (shards == 6000)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.storage_dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float16)
    for name, shape in tensor_shapes(checkpoint.config).items():
        tensor, expected = checkpoint.tensor(name), model.state_dict()[published_name(name)]
        # Matrices are rounded once, vectors never.
        assert tensor.dtype == (checkpoint.storage_dtype if len(shape) > 1 else torch.float32)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous()
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert checkpoint.tokenizer_path is None


def test_bare_decoder_export_of_opt_is_found_by_its_other_prefix(tmp_path):
    model = save_random(tmp_path / "saved", VARIANTS["opt"](), 3)
    model.model.save_pretrained(tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors")
    assert all(name.startswith("decoder.") for name in names)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert torch.equal(
        checkpoint.tensor("head.norm.bias"), model.model.decoder.final_layer_norm.bias
    )


TIED = {
    "LlamaForCausalLM": VARIANTS["llama"],
    "OPTForCausalLM": VARIANTS["opt-350m"],  # whose head has another width than its layers
    # runs by transformers' modules
    "CohereForCausalLM": lambda: transformers.CohereConfig(**LLAMA_SIZES),
}


@pytest.mark.parametrize("is_table", [True, False])
@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_is_used_whatever_the_configuration_says(name, is_table, tmp_path):
    """`transformers` does not tie a head that the files have with other values; fine-tunes trained
    it.
    """
    model = save_random(tmp_path, TIED[name](), 3)
    assert model.config.tie_word_embeddings
    table = model.get_input_embeddings().weight.detach().half()
    head = table.clone() if is_table else torch.randn_like(table)
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    reference = (
        getattr(transformers, name)
        .from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    tokens = [3, 14, 15, 9, 26, 5]
    request = GenerationRequest(prompt_token_ids=tokens, max_tokens=0, echo_logprobs=True)
    with Engine.from_pretrained(tmp_path) as engine:
        assert engine.model_config.tied_head == is_table
        (result,) = engine.run([request])
    with torch.no_grad():
        logprobs = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [row[token].item() for row, token in zip(logprobs, tokens[1:])]
    assert result.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


def write_config(folder, **changes):
    config = transformers.LlamaConfig(
        **{**LLAMA_SIZES, **changes}, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(folder)
    return config


@pytest.mark.one_release
def test_dummy_weights_follow_seed_and_name_alone(tmp_path):
    write_config(tmp_path, tie_word_embeddings=False)
    first, again, seeded = (
        open_checkpoint(tmp_path, weights="dummy", seed=seed) for seed in (0, 0, 1)
    )
    reversed_order = {name: first.tensor(name) for name in reversed(list(first.shapes))}
    for name, shape in again.shapes.items():
        tensor = again.tensor(name)
        assert tuple(tensor.shape) == shape and torch.equal(tensor, reversed_order[name])
        assert tensor.dtype == (torch.float16 if len(shape) > 1 else torch.float32)
    assert not torch.equal(
        again.tensor("embed.tokens.weight"), seeded.tensor("embed.tokens.weight")
    )
    assert not torch.equal(
        again.tensor("layers.0.attn.q.weight"), again.tensor("layers.1.attn.q.weight")
    )
    assert first.fingerprint == again.fingerprint != seeded.fingerprint
    assert torch.equal(again.tensor("head.norm.weight"), torch.ones(16))


@pytest.mark.one_release
def test_dummy_weights_of_the_catalog():
    big = open_checkpoint("flexgen/opt-175b-4bit", weights="dummy")
    assert big.tensor("layers.95.attn.q.bias").shape == (12288,)
    small = open_checkpoint("smollm2-135m", weights="dummy")
    assert small.storage_dtype == torch.bfloat16
    table = small.tensor("embed.tokens.weight").float()
    assert table.std().item() == pytest.approx(0.02, rel=0.01) and abs(table.mean().item()) < 1e-4
    with pytest.raises(CheckpointError, match="not published.*dummy"):
        open_checkpoint("opt-175b")
    with pytest.raises(UsageError, match="sizes of org--repo"):
        open_checkpoint("org/repo", weights="dummy")


@pytest.mark.one_release
def test_dummy_hidden_states_of_a_deep_model_stay_small(tmp_path):
    """The residual stream of 48 random layers, computed by `transformers`, is far from float16's
    end.
    """
    config = write_config(tmp_path, hidden_size=64, num_hidden_layers=48)
    dummy = open_checkpoint(tmp_path, weights="dummy")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name in dummy.shapes:
            model.state_dict()[published_name(name)].copy_(dummy.tensor(name))
        states = model(torch.arange(20)[None], output_hidden_states=True).hidden_states
    assert max(state.abs().max().item() for state in states) < 100
