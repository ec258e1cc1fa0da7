"""Tensors of safetensors folders equal those of `transformers`; dummy weights follow their seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.models.config import tensor_shapes

transformers = pytest.importorskip("transformers")

OPT_SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "ffn_dim": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "word_embed_proj_dim": 16,
}
LLAMA_SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
}
SHAPES: dict[str, dict[str, Any]] = {
    "opt": {},
    "opt-350m": {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-untied": {"tie_word_embeddings": False},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
}


def build(variant: str) -> Any:
    torch.manual_seed(3)
    if variant.startswith("llama"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA_SIZES, **SHAPES[variant]}))
    else:
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**{**OPT_SIZES, **SHAPES[variant]}))
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a swap
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def linear(name: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for leaf in ("weight", "bias"):
        if getattr(module, leaf, None) is not None:
            yield f"{name}.{leaf}", getattr(module, leaf)


def reference(model: Any) -> dict[str, torch.Tensor]:
    """Canonical tensors by walking the modules of `transformers`, independently of the families' name maps."""
    found: dict[str, torch.Tensor] = {}
    is_opt = hasattr(model.model, "decoder")
    body = model.model.decoder if is_opt else model.model
    found.update(linear("embed.tokens", body.embed_tokens))
    if is_opt:
        found.update(linear("embed.positions", body.embed_positions))
        found.update(linear("embed.project_in", body.project_in))
        found.update(linear("head.project_out", body.project_out))
        found.update(linear("head.norm", body.final_layer_norm))
    else:
        found.update(linear("head.norm", body.norm))
    if not model.config.tie_word_embeddings:
        found.update(linear("head.lm", model.lm_head))
    for i, layer in enumerate(body.layers):
        at = f"layers.{i}"
        attention = layer.self_attn
        for letter in "qkv":
            found.update(linear(f"{at}.attn.{letter}", getattr(attention, f"{letter}_proj")))
        found.update(linear(f"{at}.attn.o", attention.out_proj if is_opt else attention.o_proj))
        if is_opt:
            parts = {
                "attn_norm": layer.self_attn_layer_norm,
                "mlp_norm": layer.final_layer_norm,
                "mlp.up": layer.fc1,
                "mlp.down": layer.fc2,
            }
        else:
            parts = {
                "attn_norm": layer.input_layernorm,
                "mlp_norm": layer.post_attention_layernorm,
                "mlp.gate": layer.mlp.gate_proj,
                "mlp.up": layer.mlp.up_proj,
                "mlp.down": layer.mlp.down_proj,
            }
        for name, module in parts.items():
            found.update(linear(f"{at}.{name}", module))
    return found


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("dtype", "shard_size"), [(torch.float32, "6KB"), (torch.float16, "1GB"), (torch.bfloat16, "6KB")]
)
@pytest.mark.parametrize("variant", SHAPES)
def test_every_tensor_equals_the_one_in_transformers(
    variant: str, dtype: torch.dtype, shard_size: str, tmp_path: Path
) -> None:
    model = build(variant).to(dtype)
    model.save_pretrained(tmp_path / "m", max_shard_size=shard_size)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (shard_size == "6KB")
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.storage_dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    expected = reference(model)
    assert set(expected) == set(tensor_shapes(checkpoint.config))
    for name, shape in tensor_shapes(checkpoint.config).items():
        tensor = checkpoint.tensor(name)
        # Matrices are rounded once, vectors never.
        assert tensor.dtype == (checkpoint.storage_dtype if len(shape) > 1 else torch.float32)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous()
        assert torch.equal(tensor, expected[name].detach().to(tensor.dtype)), name
    assert checkpoint.tokenizer_path is None


def test_bare_decoder_export_of_opt_is_found_by_its_other_prefix(tmp_path: Path) -> None:
    model = build("opt")
    model.model.save_pretrained(tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors")
    assert all(name.startswith("decoder.") for name in names)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert torch.equal(checkpoint.tensor("head.norm.bias"), reference(model)["head.norm.bias"])


TIED = {
    "llama-tied": "LlamaForCausalLM",
    "opt": "OPTForCausalLM",
    "opt-350m": "OPTForCausalLM",
    "cohere": "CohereForCausalLM",
}  # the last one runs by transformers' modules


@pytest.mark.parametrize("stored", ["the table again", "another matrix"])
@pytest.mark.parametrize("variant", TIED)
def test_a_stored_head_is_used_whatever_the_configuration_says(variant: str, stored: str, tmp_path: Path) -> None:
    """`transformers` does not tie a head that the files have with other values; fine-tunes trained it."""
    path, cls = tmp_path / "m", getattr(transformers, TIED[variant])
    model = build(variant) if variant in SHAPES else cls(transformers.CohereConfig(**LLAMA_SIZES))
    assert model.config.tie_word_embeddings
    model.half().save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    table = model.get_input_embeddings().weight.detach()
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


@pytest.mark.one_release
def test_dummy_weights_follow_seed_and_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    build("llama-untied").config.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "architectures": ["LlamaForCausalLM"]})
    )
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
def test_dummy_weights_of_the_catalog() -> None:
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
def test_dummy_hidden_states_of_a_deep_model_stay_small(tmp_path: Path) -> None:
    """The residual stream of 48 random layers, computed by `transformers`, is far from float16's end."""
    config = transformers.LlamaConfig(**{**LLAMA_SIZES, "hidden_size": 64, "num_hidden_layers": 48})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    dummy = open_checkpoint(tmp_path, weights="dummy")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in reference(model).items():
            parameter.copy_(dummy.tensor(name))
        states = model(torch.arange(20)[None], output_hidden_states=True).hidden_states
    assert max(state.abs().max().item() for state in states) < 100
