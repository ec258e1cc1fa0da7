"""GGUF files by the gguf package's writer, with llama.cpp's names and rules."""

import json
import re
from math import prod

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexgen_helm.quant.block_formats import BLOCK_FORMATS

Kind = gguf.GGMLQuantizationType
SMALL_TOKENIZER = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}


def small_tokenizer(size):
    """Keys of a tokenizer with so many tokens."""
    return {**SMALL_TOKENIZER, "tokenizer.ggml.tokens": [f"t{i}" for i in range(size)]}


def write_gguf(
    path,
    arch,
    keys,
    tensors,
    parts=1,
):
    """Write a file, or its parts beside it.

    keys: those that begin with a dot are the architecture's. A value is stored by its type; one
        that is None is not.
    tensors: name, values, and how they are stored, in which stored bytes are.
    """
    tensors = list(tensors)
    writer = gguf.GGUFWriter(
        path, arch, split_max_tensors=0 if parts == 1 else -(-len(tensors) // parts)
    )
    add = {
        str: writer.add_string, float: writer.add_float32, int: writer.add_uint32,
        bool: writer.add_bool, list: writer.add_array,
    }  # fmt: skip
    for key, value in keys.items():
        if value is not None:
            add[type(value)](arch + key if key.startswith(".") else key, value)
    for name, values, kind in tensors:
        stored = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp(path, positions):
    """Return llama.cpp's module and its settings of a server for this file; skip the test without
    its wheel.
    """
    xllamacpp = pytest.importorskip(
        "xllamacpp", reason=("llama.cpp's wheel is not installed (pip install xllamacpp)")
    )
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = (
        str(path),
        positions,
        1,
        False,
    )
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    return xllamacpp, settings


# ---- models of transformers ----


def contents(model, arch):
    """Return the keys and tensors that llama.cpp's converter would store of a model of
    `transformers`.
    """
    config = model.config
    experts = getattr(config, "num_local_experts", None)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok if experts else None,
        "expert_feed_forward_length": config.moe_intermediate_size if arch == "qwen3moe" else None,
        "rope.freq_base": rope["rope_theta"],
    }
    tensors = dict(_tensors(model, arch))
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(config)
    if rope["rope_type"] == "longrope":
        keys["rope.dimension_count"] = 2 * len(rope["short_factor"])
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        keys["rope.scaling.attn_factor"] = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1]
        for length in ("short", "long"):
            tensors[f"rope_factors_{length}.weight"] = np.array(
                rope[f"{length}_factor"], dtype=np.float32
            )
    return {f".{key}": value for key, value in keys.items()}, tensors


def _interleaved(values, heads):
    """What llama.cpp's converter does to Llama's query and key projections."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _tensors(model, arch):
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
            r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)",
            theirs,
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
            values = _interleaved(
                values,
                config.num_attention_heads if "attn_q" in name else config.num_key_value_heads,
            )
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        yield name, values


def _llama3_factors(config):
    """By how much Llama 3.1 divides each frequency, as transformers computes them."""
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = 2 * len(stretched)
    plain = 1.0 / (
        config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    )
    return (plain / stretched).numpy().astype(np.float32)


def gguf_of(folder, path, kind):
    """Write the file that llama.cpp's converter makes of a folder of a Llama with a byte-level
    tokenizer.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    keys, tensors = contents(model, "llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, special = (
        tokenizer["model"]["vocab"],
        {token["content"] for token in tokenizer["added_tokens"]},
    )
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    for number in range(len(tokens), model.config.vocab_size):
        tokens.append(f"[PAD{number}]")
        types.append(gguf.TokenType.UNUSED)
    keys |= {
        **SMALL_TOKENIZER,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": model.config.eos_token_id,
    }  # fmt: skip
    return write_gguf(
        path, "llama", keys, ((n, x, kind if x.ndim > 1 else Kind.F32) for n, x in tensors.items())
    )


def random_blocks(kind, shape, draw):
    """Draw bytes of a quantized tensor whose values are small: every code, and scales near a
    hundredth.
    """
    fmt = BLOCK_FORMATS[kind.name]
    blocks = draw.integers(
        0, 256, (prod(shape) // fmt.block_values, fmt.block_bytes), dtype=np.uint8
    )
    largest = 1e-2 / 2 ** (
        sum(part.width for part in fmt.scales[1].parts) if len(fmt.scales) > 1 else 2
    )
    for numbers in (*fmt.scales, *fmt.offsets):
        for at in range(numbers.count):
            if numbers.floating == "F16":
                scale = (
                    draw.uniform(-largest, largest, len(blocks))
                    .astype(np.float16)
                    .view(np.uint8)
                    .reshape(-1, 2)
                )
                blocks[:, [part.bytes[at] for part in numbers.parts]] = scale
            elif numbers.table is not None:
                small = [code for code, value in enumerate(numbers.table) if 1e-3 < value < 1e-2]
                blocks[:, numbers.parts[0].bytes[at]] = draw.choice(small, len(blocks))
    return blocks.reshape(*shape[:-1], -1)
