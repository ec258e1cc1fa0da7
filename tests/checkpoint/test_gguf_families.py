"""GGUF of every family that we read: written with llama.cpp's names and rules, equal to the safetensors folder.

What the writer here believes about the format is checked by `transformers`, which reads the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.errors import CheckpointError
from tests.helpers.tiny_models import GGUF_VARIANTS, VOCABULARY, save_random

# The safetensors configuration says more than the file: our family's name of what the file calls llama.
RENAMED = {"mixtral": "llama"}


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's query and key projections."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def stored_tensors(model: Any, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF name and values of every tensor, by the gguf package's own table of names."""
    config = model.config
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config.num_hidden_layers
    )
    for theirs, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if match := re.match(
            r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)", theirs
        ):
            layer, part = match.groups()
            if part == "gate.weight":
                yield f"blk.{layer}.ffn_gate_inp.weight", values
            elif part == "experts.down_proj":
                yield f"blk.{layer}.ffn_down_exps.weight", values
            else:
                gate, up = np.split(values, 2, axis=1)
                yield f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate)
                yield f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up)
            continue
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        if arch == "llama" and re.search(r"attn_[qk]\.", name):
            values = interleaved(values, config.num_attention_heads if "attn_q" in name else config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        yield name, values


def write(path: Path, model: Any, arch: str) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    if rope["rope_type"] == "longrope":
        writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1])
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    for name, values in stored_tensors(model, arch):
        kind = gguf.GGMLQuantizationType.F16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(config: Any) -> np.ndarray:
    """By how much Llama 3.1 divides each frequency, as transformers computes them."""
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = 2 * len(stretched)
    plain = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    return (plain / stretched).numpy().astype(np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """built('qwen3') -> folder of safetensors, GGUF file, model in float32."""
    made: dict[str, tuple[Path, Path, Any]] = {}

    def get(name: str) -> tuple[Path, Path, Any]:
        if name not in made:
            arch, config, _ = GGUF_VARIANTS[name]
            folder = tmp_path_factory.mktemp(name)
            model = save_random(folder, config(), seed=7)
            made[name] = folder, write(folder / "m.gguf", model, arch), model
        return made[name]

    return get


@pytest.mark.parametrize("name", GGUF_VARIANTS)
def test_spec_and_tensors_equal_those_of_the_folder(built: Any, name: str) -> None:
    folder, file, _ = built(name)
    original, read = SafetensorsCheckpoint(folder), open_checkpoint(file)
    expected = replace(
        original.config, architecture=RENAMED.get(name, original.config.architecture), norm_plus_one=False
    )
    found = replace(read.config, norm_eps=expected.norm_eps)  # float32 in the file
    if name == "llama3":
        found, factors = replace(found, rope=expected.rope), read.config.rope
        assert factors is not None and factors.kind == "factors"
        assert_same_frequencies(factors, expected.rope, expected.head_dim)
    if name == "phi3-longrope":
        assert found.rope is not None and expected.rope is not None
        assert found.rope.magnitude == pytest.approx(expected.rope.magnitude, rel=1e-6)
        found = replace(found, rope=replace(found.rope, magnitude=expected.rope.magnitude))
    assert found == expected
    assert read.config.norm_eps == pytest.approx(expected.norm_eps, rel=1e-6)
    offset = 1.0 if original.config.norm_plus_one else 0.0
    for tensor, shape in read.shapes.items():
        values, wanted = read.tensor(tensor), original.tensor(tensor).float()
        assert tuple(values.shape) == shape and values.is_contiguous()
        # Norms are stored as 1 + w in float32, which float16 has not.
        assert torch.equal(values.float(), wanted + offset if "norm" in tensor else wanted), tensor


def assert_same_frequencies(a: Any, b: Any, head_dim: int) -> None:
    from flexgen_helm.models.decoder import inverse_frequencies

    assert torch.allclose(inverse_frequencies(a, head_dim), inverse_frequencies(b, head_dim), rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, (_, _, known) in GGUF_VARIANTS.items() if known])
def test_transformers_reads_the_same_file_to_the_same_model(built: Any, name: str) -> None:
    """The writer above is no private dialect."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
    from transformers import AutoModelForCausalLM

    folder, file, model = built(name)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[5, 9, 77, 200, 31, 8, 60, 44, 5, 9, 100, 12, 250]])
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids).logits).abs().max() < 2e-3


def test_wrong_shapes_of_fused_and_expert_tensors_are_named(built: Any, tmp_path: Path) -> None:
    _, _, model = built("mixtral")
    broken = tmp_path / "broken.gguf"

    class Smaller:
        """The same model with one expert too few."""

        config = model.config

        @staticmethod
        def state_dict() -> dict[str, Any]:
            state = dict(model.state_dict())
            name = "model.layers.1.mlp.experts.down_proj"
            state[name] = state[name][:-1]
            return state

    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down_exps\.weight has the shape \[3, .*asks for \[4, "):
        open_checkpoint(write(broken, Smaller, "llama"))
