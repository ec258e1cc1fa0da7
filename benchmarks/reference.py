"""A `transformers` folder with exactly our weights and our tokenizer: what the other side of a comparison loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexgen_helm.checkpoint.folder import TOKENIZER_FILES
from flexgen_helm.checkpoint.source import Checkpoint
from flexgen_helm.core.errors import UsageError
from flexgen_helm.models.families import FAMILIES, source_of
from flexgen_helm.models.spec import ModelSpec
from flexgen_helm.text.gguf_tokenizer import load_gguf_tokenizer
from flexgen_helm.text.tokenizer import Tokenizer


def export(checkpoint: Checkpoint, folder: Path) -> None:
    """Write weights (rounded to 16 bits as we use them, saved as float32), configuration and tokenizer to `folder`.

    Holds the model once in float32. Raises `UsageError` for a family other than Llama, or without a tokenizer.
    """
    if checkpoint.spec.family != "llama":
        raise UsageError(f"a reference copy of the family {checkpoint.spec.family!r} is not available; take a Llama")
    if checkpoint.tokenizer_path is None:
        raise UsageError("a reference copy needs the model's tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    names = FAMILIES["llama"].tensors
    tensors = {source_of(names, name).name: checkpoint.tensor(name).to(torch.float32) for name in checkpoint.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _export_tokenizer(checkpoint.tokenizer_path, folder)
    tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path)
    assert tokenizer is not None
    config = _config(checkpoint.spec) | {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def same_tokens(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> bool:
    """Whether the tokenizer that `transformers` finds in `folder` encodes `texts` as ours does."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return [theirs(text)["input_ids"] for text in texts] == tokenizer.encode_batch(texts)


def _config(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None
    rope: dict[str, Any] = {"rope_type": spec.rope.kind, "rope_theta": spec.rope.theta}
    if spec.rope.kind != "default":
        rope["factor"] = spec.rope.factor
    if spec.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": spec.activation,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "tie_word_embeddings": spec.tied_head,
        "rope_theta": spec.rope.theta,
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
