"""The files of a model folder. `config.json` is data: code that it names (`auto_map`) is never
looked at. No torch.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from flexgen_helm.checkpoint.quantized.config import read_quantization
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.files import refuse_lfs_pointer
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.config_check import check_config
from flexgen_helm.units import exact_size, size

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
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
# Every file besides the weights that decides results.
SMALL_FILES = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)
# Of files that are read whole; the largest published tokenizer has 40 MB.
_MAX_SMALL_FILE = 512 << 20
# A tokenizer needs one of them.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# How names of pickled files begin that are no weights: what trainers leave in the folder, and macOS
# for every file ('._model.bin').
_NO_WEIGHTS = (".", "training_args", "optimizer", "scheduler", "scaler", "rng_state")


class FolderConfig(NamedTuple):
    """What `config.json` of a model folder says; content: all of it."""

    architecture: Architecture
    config: ModelConfig
    content: dict[str, Any]


def folder_of(path: Path) -> Path:
    """Return the folder of a model; path: that folder, or a file in it."""
    return path.parent if path.is_file() else path


def require_small_file(path: Path) -> None:
    """Raise `CheckpointError` for what reading would never end, or would fill the memory, and for a
    Git LFS pointer.

    A missing file passes. Links are followed, because a hub snapshot consists of them. They may
    lead to a device.
    """
    try:
        status = path.stat()
    except OSError:
        return  # whoever reads it says why it cannot be read
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no regular file; remove it, or fetch the model again")
    if status.st_size > _MAX_SMALL_FILE:
        raise CheckpointError(
            f"{path} has {size(status.st_size)}, too many for such a file; fetch the model again"
        )
    refuse_lfs_pointer(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises `CheckpointError` naming the file."""
    require_small_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; the folder is incomplete or no model folder"
        ) from error
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must contain one JSON object")
    return content


def read_config(
    folder: Path, find: Callable[[Mapping[str, Any]], Architecture] = architecture_of_config
) -> FolderConfig:
    """Read the `config.json` of a model folder; find: says which architecture a content is of.

    Raises `UnsupportedArchitectureError` by name, `CheckpointError` for a configuration that is
    missing, incomplete, or of weights that are quantized in a way that cannot be read.
    """
    path = folder / CONFIG
    if (adapter := folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{adapter} describes an adapter, which is not applied to weights here; merge it into "
            "its base (`merge_and_unload` of peft) and save that, or remove the file to evaluate "
            "the weights beside it"
        )
    content = read_json(path)
    try:
        architecture = find(content)
    except UnsupportedArchitectureError as error:
        if "auto_map" not in content:
            raise
        raise UnsupportedArchitectureError(
            f"{error}; the code that {path} names (auto_map) is never run"
        ) from None
    read_quantization(content, path)  # refuses formats that cannot be read
    config = model_config_from(architecture.read_config, content, path)
    return FolderConfig(architecture, config, content)


def model_config_from(
    read: Callable[[Mapping[str, Any]], ModelConfig], content: Mapping[str, Any], path: Path
) -> ModelConfig:
    """Apply an architecture's reader to the content of `path`.

    Raises `CheckpointError` if an entry is missing, of the wrong kind, or such as no model can
    have.
    """
    try:
        config = read(content)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} has an entry of the wrong kind: {error}") from error
    try:
        check_config(config)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
    return config


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of a GGUF model by the name of its first: m-00001-of-00003.gguf has two more
    beside it.
    """
    stem, _, count = path.stem.rpartition("-00001-of-")
    if not stem or len(count) != 5 or not count.isdecimal():
        return [path]
    return [
        path,
        *(path.with_name(f"{stem}-{part:05}-of-{count}.gguf") for part in range(2, int(count) + 1)),
    ]


def tokenizer_folder(folder: Path) -> Path | None:
    """Return the folder if it contains a tokenizer, else None."""
    return folder if any((folder / name).is_file() for name in _VOCABULARY_FILES) else None


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files: the single one, those that the index names, or the only
    one there is.

    Raises `CheckpointError` if one is missing or outside the folder, or if all weights are pickled.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(read_index(folder / INDEX).values()))]
    # a link may lead nowhere
    files = sorted(file for file in folder.glob("[!.]*.safetensors") if file.is_file())
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files but no {INDEX} that orders them"
        )
    if pickle_names([file.name for file in folder.iterdir()]):
        raise pickled_weights_error(str(folder), str(folder))
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def identity_files(path: Path) -> list[Path]:
    """Return the files that tell a folder's weights from others; path: the folder, or one
    safetensors file in it.
    """
    folder = folder_of(path)
    small = (folder / name for name in (CONFIG, *TOKENIZER_FILES))
    weights = [path] if path.is_file() else weight_files(folder)
    return [*weights, *(file for file in small if file.is_file())]


def deciding_files(folder: Path, weights: Iterable[Path] = ()) -> list[Path]:
    """Return every file of a model folder that decides results."""
    small = (folder / name for name in (INDEX, *SMALL_FILES))
    return [*(file for file in small if file.is_file()), *weights]


def read_index(index: Path, must_exist: bool = True) -> dict[str, str]:
    """Return tensor name -> file name of a sharded checkpoint.

    Raises `CheckpointError` if a file is outside the folder, or missing while it `must_exist`.
    """
    shards = read_json(index).get("weight_map")
    if (
        not isinstance(shards, dict)
        or not shards
        or not all(isinstance(v, str) for v in shards.values())
    ):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    for name in sorted(set(shards.values())):
        # By name, not by where links lead: a hub snapshot consists of links to its blobs.
        if "\\" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{index} names {name}, which is outside the folder")
        if must_exist and not os.path.isfile(index.parent / name):
            raise CheckpointError(
                f"{index} names {name[:200]}, which is missing; fetch the model again"
            )
    return shards


def pickle_names(names: Collection[str]) -> list[str]:
    """Return the names of a folder's files that hold pickled weights: the usual one, else the
    index, else any others.
    """
    for usual in (PICKLE, PICKLE_INDEX):
        if usual in names:
            return [usual]
    pickles = (name for name in names if name.endswith((".bin", ".pt", ".pth")))
    return sorted(name for name in pickles if not name.startswith(_NO_WEIGHTS))


def pickled_weights_error(title: str, model: str) -> CheckpointError:
    """Make the error for a model that needs converting; `model` is what the command takes."""
    return CheckpointError(
        f"{title} has only pickled weights, which are not loaded because they can run code; "
        f"`flexgen-helm convert {model}` turns them into safetensors"
    )


def require_space(folder: Path, needed: int, subject: str, remedy: str) -> None:
    """Raise `CheckpointError` if fewer than `needed` bytes are free.

    subject, remedy: how the message begins ('the model takes') and ends.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{subject} {size(needed)} and {size(free)} are free in {folder}: "
            f"{exact_size(needed - free)} are missing; make room, or {remedy}"
        )
