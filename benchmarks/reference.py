"""Export a model as a `transformers` folder, so that baselines compute with the same weights and
tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.folder import TOKENIZER_FILES
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.architectures.base import find_source
from flexgen_helm.quant.blocks import decode
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Spaces, digits and scripts on which two copies of a tokenizer would differ.
SAMPLE_TEXTS = [
    "Rules: If Bob is big, then Bob is 1234 kind.\nFact:\tIt's  cold.",
    "naïve café, 東京 🙂",
    "",
    " ",
]


def export_checked(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    """Export as `export` does, check that the copy's tokenizer encodes as ours does, and return
    ours.
    """
    tokenizer = export(checkpoint, folder)
    if not same_tokens(folder, tokenizer, SAMPLE_TEXTS):
        raise FlexgenError(
            "the reference copy's tokenizer differs from ours, so the sides would not do the same "
            "work"
        )
    return tokenizer


def export(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    """Write weights (with the values that we use, saved as float32), configuration and tokenizer to
    `folder`.

    Holds the model once in float32. Returns our tokenizer. Raises `UsageError` for another
    architecture than Llama, or without a tokenizer.
    """
    from transformers import AutoConfig

    architecture = checkpoint.config.architecture
    if architecture != "llama":
        raise UsageError(
            f"a reference copy of the architecture {architecture!r} is not available; take a Llama"
        )
    source = checkpoint.tokenizer_path
    if source is None:
        raise UsageError("a reference copy needs the model's tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    names = ARCHITECTURES["llama"].tensors
    tensors = {
        find_source(names, name).name: _values(checkpoint, name) for name in checkpoint.shapes
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = tokenizer_of(checkpoint)
    _export_tokenizer(tokenizer, source, folder)
    gguf = {} if source.is_dir() else {"gguf_file": source.name}
    config = AutoConfig.from_pretrained(source if source.is_dir() else source.parent, **gguf)
    ends = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    config.update({"architectures": ["LlamaForCausalLM"], "dtype": "float32", **ends})
    config.save_pretrained(folder)
    return tokenizer


def _values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return a tensor in float32 as it is multiplied: what rests as published is not rounded."""
    if (fmt := checkpoint.formats.get(name)) is None:
        return checkpoint.tensor(name).to(torch.float32)
    rows = checkpoint.shapes[name][0]
    values, order = (
        decode(torch.cat([*checkpoint.packed_tiles(name)]).view(rows, -1), fmt),
        checkpoint.row_order(name),
    )
    return values if order is None else values[order]


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


def _export_tokenizer(tokenizer: Tokenizer, source: Path, folder: Path) -> None:
    """Write `tokenizer.json` unchanged; the generic class keeps `transformers` from rebuilding
    parts of it.
    """
    if source.is_dir():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, folder / name)
        return
    tokenizer.save(folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    texts = {
        "bos_token": tokenizer.bos_text,
        "eos_token": tokenizer.eos_text,
        "chat_template": tokenizer.chat_template,
    }
    settings |= {name: text for name, text in texts.items() if text is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
