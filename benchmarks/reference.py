"""A `transformers` folder with exactly our weights and our tokenizer: what the other side of a comparison loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.folder import TOKENIZER_FILES
from flexgen_helm.errors import UsageError
from flexgen_helm.models.architectures import ARCHITECTURES, find_source
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from flexgen_helm.tokenizer.tokenizer import Tokenizer


def export(checkpoint: Checkpoint, folder: Path) -> None:
    """Write weights (rounded to 16 bits as we use them, saved as float32), configuration and tokenizer to `folder`.

    Holds the model once in float32. Raises `UsageError` for a family other than Llama, or without a tokenizer.
    """
    if checkpoint.config.architecture != "llama":
        raise UsageError(
            f"a reference copy of the family {checkpoint.config.architecture!r} is not available; take a Llama"
        )
    if checkpoint.tokenizer_path is None:
        raise UsageError("a reference copy needs the model's tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    names = ARCHITECTURES["llama"].tensors
    tensors = {find_source(names, name).name: checkpoint.tensor(name).to(torch.float32) for name in checkpoint.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _export_tokenizer(checkpoint.tokenizer_path, folder)
    tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path)
    assert tokenizer is not None
    config = _config(checkpoint.config) | {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def same_tokens(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> bool:
    """Whether the tokenizer that `transformers` finds in `folder` encodes `texts` as ours does."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return [theirs(text)["input_ids"] for text in texts] == tokenizer.encode_batch(texts)


def _config(model_config: ModelConfig) -> dict[str, Any]:
    assert model_config.rope is not None
    rope: dict[str, Any] = {"rope_type": model_config.rope.kind, "rope_theta": model_config.rope.theta}
    if model_config.rope.kind != "default":
        rope["factor"] = model_config.rope.factor
    if model_config.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": model_config.rope.low_freq_factor,
            "high_freq_factor": model_config.rope.high_freq_factor,
            "original_max_position_embeddings": model_config.rope.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": model_config.hidden_size,
        "intermediate_size": model_config.ffn_size,
        "num_hidden_layers": model_config.num_layers,
        "num_attention_heads": model_config.num_heads,
        "num_key_value_heads": model_config.num_kv_heads,
        "head_dim": model_config.head_dim,
        "vocab_size": model_config.vocab_size,
        "max_position_embeddings": model_config.max_positions,
        "rms_norm_eps": model_config.norm_eps,
        "hidden_act": model_config.activation,
        "attention_bias": model_config.qkv_bias,
        "mlp_bias": model_config.mlp_bias,
        "tie_word_embeddings": model_config.tied_head,
        "rope_theta": model_config.rope.theta,
        "rope_parameters": rope,
    }


def _export_tokenizer(source: Path, folder: Path) -> None:
    """`tokenizer.json` as it stands; the generic class keeps `transformers` from rebuilding parts of it."""
    if source.is_dir():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, folder / name)
        return
    loaded = load_gguf_tokenizer(source)
    assert loaded is not None, f"{source} was a tokenizer's path"
    loaded.backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": loaded.bos_id, "eos_token": loaded.eos_id}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {key: loaded.backend.id_to_token(token) for key, token in named.items() if token is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
