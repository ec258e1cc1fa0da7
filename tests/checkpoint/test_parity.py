"""Tensors of safetensors folders equal those of `transformers`; dummy weights follow their seed."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.models.config import tensor_shapes
from tests.helpers.model_folders import published_name
from tests.helpers.tiny_models import VARIANTS, save_random

transformers = pytest.importorskip("transformers")

LLAMA_SIZES = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 20,
}  # fmt: skip
# Tensors of each stage by their names in `transformers`; tests/engine/test_parity.py compares what all of them compute.
NAMES = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "layers.1.attn.q.weight": "model.layers.1.self_attn.q_proj.weight",
    "layers.1.attn.o.bias": "model.layers.1.self_attn.o_proj.bias",
    "layers.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "layers.2.mlp.down.weight": "model.layers.2.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.lm.weight": "lm_head.weight",
}


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 6000), ("float16", 10**9), ("bfloat16", 6000)])
def test_tensors_equal_those_in_transformers(dtype, shards, tmp_path):
    model = save_random(tmp_path / "saved", VARIANTS["llama-untied-biases"](), 3, dtype).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "m", max_shard_size=shards)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (shards == 6000)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.storage_dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float16)
    for name, shape in tensor_shapes(checkpoint.config).items():
        tensor = checkpoint.tensor(name)
        # Matrices are rounded once, vectors never.
        assert tensor.dtype == (checkpoint.storage_dtype if len(shape) > 1 else torch.float32)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous()
        if name in NAMES:
            assert torch.equal(tensor, model.state_dict()[NAMES[name]].to(tensor.dtype)), name
    assert NAMES.keys() <= checkpoint.shapes.keys() and checkpoint.tokenizer_path is None


def test_bare_decoder_export_of_opt_is_found_by_its_other_prefix(tmp_path):
    model = save_random(tmp_path / "saved", VARIANTS["opt"](), 3)
    model.model.save_pretrained(tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors")
    assert all(name.startswith("decoder.") for name in names)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert torch.equal(checkpoint.tensor("head.norm.bias"), model.model.decoder.final_layer_norm.bias)


TIED = {
    "LlamaForCausalLM": VARIANTS["llama"],
    "OPTForCausalLM": VARIANTS["opt-350m"],  # whose head has another width than its layers
    "CohereForCausalLM": lambda: transformers.CohereConfig(**LLAMA_SIZES),  # runs by transformers' modules
}


@pytest.mark.parametrize("stored", ["the table again", "another matrix"])
@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_is_used_whatever_the_configuration_says(name, stored, tmp_path):
    """`transformers` does not tie a head that the files have with other values; fine-tunes trained it."""
    path, cls = tmp_path / "m", getattr(transformers, name)
    model = save_random(path, TIED[name](), 3)
    assert model.config.tie_word_embeddings
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    table = model.get_input_embeddings().weight.detach().half()
    tensors["lm_head.weight"] = table.clone() if stored == "the table again" else torch.randn_like(table)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})

    reference = cls.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = [3, 14, 15, 9, 26, 5]
    with Engine.from_pretrained(path) as engine:
        assert engine.config.tied_head == (stored == "the table again")
        (result,) = engine.run([GenerationRequest(prompt_token_ids=tokens, max_tokens=0, echo_logprobs=True)])
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([tokens])).logits[0], -1)[:-1]
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert (expected - torch.tensor(result.prompt_logprobs[1:])).abs().max() < 1e-4


def write_config(folder, **changes):
    config = transformers.LlamaConfig(**{**LLAMA_SIZES, **changes}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return config


@pytest.mark.one_release
def test_dummy_weights_follow_seed_and_name_alone(tmp_path):
    folder = tmp_path / "m"
    write_config(folder, tie_word_embeddings=False)
    first, again, seeded = (open_checkpoint(folder, weights="dummy", seed=seed) for seed in (0, 0, 1))
    for name in reversed(list(first.shapes)):
        first.tensor(name)
    for name, shape in again.shapes.items():
        tensor = again.tensor(name)
        assert tuple(tensor.shape) == shape
        assert tensor.dtype == (torch.float16 if len(shape) > 1 else torch.float32)
        assert torch.equal(tensor, first.tensor(name))
    assert not torch.equal(again.tensor("embed.tokens.weight"), seeded.tensor("embed.tokens.weight"))
    assert not torch.equal(again.tensor("layers.0.attn.q.weight"), again.tensor("layers.1.attn.q.weight"))
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
    """The residual stream of 48 random layers, computed by `transformers`, is far from float16's end."""
    config = write_config(tmp_path, hidden_size=64, num_hidden_layers=48)
    dummy = open_checkpoint(tmp_path, weights="dummy")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name in dummy.shapes:
            model.state_dict()[published_name(name)].copy_(dummy.tensor(name))
        states = model(torch.arange(20)[None], output_hidden_states=True).hidden_states
    assert max(state.abs().max().item() for state in states) < 100
