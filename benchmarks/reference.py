"""Export a model as a `transformers` folder with our very weights and tokenizer, for the other side of a comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.folder import TOKENIZER_FILES
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.models.architectures import ARCHITECTURES, find_source
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Spaces, digits and scripts on which two copies of a tokenizer would differ.
SAMPLE_TEXTS = ["Rules: If Bob is big, then Bob is 1234 kind.\nFact:\tIt's  cold.", "naïve café, 東京 🙂", "", " "]


def export_checked(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    """Export as `export` does, check that the copy's tokenizer encodes as ours does, and return ours."""
    export(checkpoint, folder)
    tokenizer = tokenizer_of(checkpoint)
    if not same_tokens(folder, tokenizer, SAMPLE_TEXTS):
        raise FlexgenError("the reference copy's tokenizer differs from ours, so the sides would not do the same work")
    return tokenizer


def export(checkpoint: Checkpoint, folder: Path) -> None:
    """Write weights (rounded to 16 bits as we use them, saved as float32), configuration and tokenizer to `folder`.

    Holds the model once in float32. Raises `UsageError` for another architecture than Llama, or without a tokenizer.
    """
    architecture = checkpoint.config.architecture
    if architecture != "llama":
        raise UsageError(f"a reference copy of the architecture {architecture!r} is not available; take a Llama")
    if checkpoint.tokenizer_path is None:
        raise UsageError("a reference copy needs the model's tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    names = ARCHITECTURES["llama"].tensors
    tensors = {find_source(names, name).name: checkpoint.tensor(name).to(torch.float32) for name in checkpoint.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _export_tokenizer(checkpoint.tokenizer_path, folder)
    tokenizer = tokenizer_of(checkpoint)
    config = _config(checkpoint.config) | {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer_path is not None
    tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path)
    assert tokenizer is not None
    return tokenizer


def same_tokens(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> bool:
    """Return whether `transformers`' tokenizer in `folder` encodes `texts` as ours does."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return [theirs(text)["input_ids"] for text in texts] == tokenizer.encode_batch(texts)


def _config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json`."""
    assert config.rope is not None
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
    }


def _export_tokenizer(source: Path, folder: Path) -> None:
    """Write `tokenizer.json` unchanged; the generic class keeps `transformers` from rebuilding parts of it."""
    if source.is_dir():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, folder / name)
        return
    loaded = load_gguf_tokenizer(source)
    assert loaded is not None, f"{source} was a tokenizer's path"
    loaded.backend.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": loaded.bos_id, "eos_token": loaded.eos_id}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {key: loaded.backend.id_to_token(token) for key, token in special_tokens.items() if token is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
