"""What lies in a model folder. `config.json` is data: code that it names (`auto_map`) is never looked at. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.models.architectures import Architecture, architecture_of_config
from flexgen_helm.models.config import ModelConfig

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
# Any of these makes a tokenizer; the others only adorn one.
_TOKENIZER_CORES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# What trainers leave beside the weights, pickled too.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
    "max_positions",
    "embed_size",
)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `CheckpointError` naming the file where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the folder is incomplete or no model folder") from error
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must contain one JSON object")
    return content


def read_config(folder: Path) -> tuple[Architecture, ModelConfig, dict[str, Any]]:
    """Family, spec and the raw configuration of a model folder.

    Raises `UnsupportedArchitectureError` by name, `CheckpointError` for a configuration that is missing,
    incomplete, or of weights that were quantized already.
    """
    path = folder / CONFIG
    config = read_json(path)
    try:
        architecture = architecture_of_config(config)
    except UnsupportedArchitectureError as error:
        if "auto_map" not in config:
            raise
        raise UnsupportedArchitectureError(f"{error}; the code that {path} names (auto_map) is never run") from None
    if method := config.get("quantization_config"):
        method = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
        raise CheckpointError(f"{path}: these weights are quantized already ({method}); use the original checkpoint")
    try:
        model_config = architecture.read_config(config)
        check_sizes(model_config, path)
        return architecture, model_config, config
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path} has an entry of the wrong kind: {error}") from error


def check_sizes(model_config: ModelConfig, path: Path) -> None:
    """Raise `CheckpointError` where a size is not a positive whole number or the heads do not divide."""
    for name in _SIZES:
        value = getattr(model_config, name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{path} gives {name.replace('_', ' ')} as {value!r}; it must be a positive integer")
    if model_config.num_heads % model_config.num_kv_heads:
        raise CheckpointError(
            f"{path} gives {model_config.num_heads} heads that share {model_config.num_kv_heads} keys unevenly"
        )


def tokenizer_folder(folder: Path) -> Path | None:
    """The folder if it contains a tokenizer, else None."""
    return folder if any((folder / name).is_file() for name in _TOKENIZER_CORES) else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the single one, those that the index names, or the only one there is.

    Raises `CheckpointError` where one is missing or lies outside the folder, or where there are only pickles.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(indexed(index).values()))]
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())  # a link may lead nowhere
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(f"{folder} has {len(files)} safetensors files but no {INDEX} that orders them")
    if pickle_names([file.name for file in folder.iterdir()]):
        raise CheckpointError(
            f"{folder} has only pickled weights, which are not loaded because they can run code; "
            f"`flexgen-helm convert {folder}` turns them into safetensors"
        )
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def indexed(index: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint's index; each file is there, inside the folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(v, str) for v in shards.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    for name in sorted(set(shards.values())):
        require_inside(index, name)
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing; fetch the model again")
    return shards


def require_inside(index: Path, name: str) -> None:
    """Raise `CheckpointError` where a file that an index names lies outside its folder."""
    # By the letter, not by where links lead: a hub snapshot consists of links to its store.
    if "\\" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"{index} names {name}, which lies outside the folder")


def pickle_names(names: Collection[str]) -> list[str]:
    """Those of a folder's file names that pickled weights go by: the usual one, the index, or any others."""
    for usual in (PICKLE, PICKLE_INDEX):
        if usual in names:
            return [usual]
    pickles = (name for name in names if name.endswith((".bin", ".pt", ".pth")))
    return sorted(name for name in pickles if not name.startswith(_NO_WEIGHTS))
