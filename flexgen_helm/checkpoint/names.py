"""What a model name means: the catalog, the hub, a folder, a file, or a name of the user's own. No torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL, CatalogEntry, HalfType
from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.errors import UnknownModelError, UsageError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.quant.precisions import PRECISIONS

Kind = Literal["wheel", "hub", "folder", "gguf", "unpublished"]

# Longest first: "-4bit" is also the end of "-paper-4bit".
_SUFFIXES = sorted(set(PRECISIONS) - {"fp16"}, key=len, reverse=True)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/|--)[A-Za-z0-9][\w.-]*")
_KINDS_OF_NAMES = (
    "a model is named by the catalog, by a hub repository (org/repo or org--repo), by a folder with config.json and "
    "safetensors files, by a .gguf file, or in the file that FLEXGEN_HELM_MODELS names"
)


@dataclass(frozen=True)
class ResolvedModel:
    """What a model name means. Filled by `resolve`.

    name: without `flexgen/` and without the precision suffix.
    kind: where the weights come from; 'unpublished' has only dummy weights.
    path: the local folder or file (kinds 'folder' and 'gguf').
    revision: of the hub repository, None for its default branch.
    arguments: client arguments of the user's own models file.
    """

    name: str
    precision: str
    kind: Kind
    path: Path | None = None
    hub_repo: str | None = None
    revision: str | None = None
    entry: CatalogEntry | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine that the name stands for; its suffix goes before the models file."""
        suffix = {} if self.precision == "fp16" else {"precision": self.precision}
        return {**self.arguments, **suffix}


def split_precision(name: str) -> tuple[str, str]:
    """Split `opt-125m-paper-4bit` into (`opt-125m`, 'paper-4bit'); without a suffix the precision is 'fp16'."""
    for precision in _SUFFIXES:
        base = name.removesuffix(f"-{precision}")
        if base and base != name:
            return base, precision
    return name, "fp16"


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> ResolvedModel:
    """Find out what a name means, without the network.

    A name that exists as a whole (in the user's models file, in the catalog, on disk) wins over the same name split
    into base and precision suffix. `revision` wins over the models file's. Raises `UnknownModelError` with the closest
    names, `UsageError` if the models file cannot be used.
    """
    text = os.fspath(name).removeprefix("flexgen/")
    user_models = _read_user_models()
    base, suffix = split_precision(text)
    candidates: dict[str, str] = {text: "fp16", base: suffix}
    for candidate, precision in candidates.items():
        if candidate in user_models:
            return _resolve_user_model(candidate, precision, revision, user_models[candidate])
        if (model := _resolve_known(candidate, precision, revision)) is not None:
            return model
    # Any org/repo may exist on the hub, so the hub comes last, and there the suffix is ours.
    if _HUB_NAME.fullmatch(base) and base.count("--") + base.count("/") == 1:
        repo = base.replace("--", "/")
        entry = next((entry for entry in CATALOG.values() if entry.hub_repo == repo), None)
        return ResolvedModel(repo.replace("/", "--"), suffix, "hub", hub_repo=repo, revision=revision, entry=entry)
    raise UnknownModelError(_unknown_model(base, user_models))


def read_model_config(model: str | os.PathLike[str] | ResolvedModel) -> tuple[ModelConfig, HalfType]:
    """Return the model config, and the type in which the weights are stored, without weights: what a plan needs.

    Raises `UsageError` for a model that is neither in the catalog nor on this machine.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve(model)
    if resolved.entry is not None:
        return resolved.entry.config, resolved.entry.default_dtype
    if resolved.path is None or resolved.kind != "folder":
        raise UsageError(
            f"neither the catalog nor this machine has the sizes of {resolved.name}; name a catalog model or a folder "
            "with config.json"
        )
    _, config, content = read_config(resolved.path.parent if resolved.path.is_file() else resolved.path)
    dtype = content.get("dtype") or content.get("torch_dtype")
    return config, "bfloat16" if dtype == "bfloat16" else "float16"


def _resolve_known(name: str, precision: str, revision: str | None) -> ResolvedModel | None:
    """Look a name up in the catalog and on disk."""
    if (entry := CATALOG.get(name)) is not None:
        kind: Kind = "hub" if entry.hub_repo else "wheel" if name == WHEEL_MODEL else "unpublished"
        return ResolvedModel(name, precision, kind, None, entry.hub_repo, revision, entry)
    if not name:
        return None  # as a path it would be the current folder
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return ResolvedModel(path.resolve().stem if path.is_file() else path.resolve().name, precision, "folder", path)
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(path.stem, precision, "gguf", path)
    return None


def _resolve_user_model(name: str, precision: str, revision: str | None, arguments: Mapping[str, Any]) -> ResolvedModel:
    path = arguments.get("path")
    model = _resolve_known(path or name, precision, revision or arguments.get("revision"))
    if model is None:
        problem = f"has the path {path}, not found" if path else "needs a path, for it is no catalog name"
        raise UnknownModelError(f"model {name} of the file that FLEXGEN_HELM_MODELS names {problem}")
    others = {key: value for key, value in arguments.items() if key not in ("path", "revision")}
    return replace(model, name=name, arguments=others)


def _read_user_models() -> dict[str, dict[str, Any]]:
    """Return name -> client arguments of the file that `FLEXGEN_HELM_MODELS` names; its paths are relative to it."""
    named = os.environ.get("FLEXGEN_HELM_MODELS")
    if not named:
        return {}
    file = Path(named).expanduser()
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"FLEXGEN_HELM_MODELS names {file}, which cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"FLEXGEN_HELM_MODELS names {file}, which must map model names to paths or arguments")
    models: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        arguments = {"path": value} if isinstance(value, str) else value
        if not isinstance(arguments, dict) or not isinstance(arguments.get("path", ""), str):
            raise UsageError(f"model {name} of {file} must be a path, or arguments of which `path` is a string")
        if "path" in arguments and arguments["path"] not in CATALOG:
            arguments = {**arguments, "path": str(file.parent / Path(arguments["path"]).expanduser())}
        models[str(name).removeprefix("flexgen/")] = arguments
    return models


def _unknown_model(name: str, user_models: Mapping[str, Any]) -> str:
    if name.endswith((".gguf", ".safetensors")) or name.startswith((".", "/", "~")):
        return f"there is no model file or folder {name}; {_KINDS_OF_NAMES}"
    close = difflib.get_close_matches(name.lower(), [*CATALOG, *user_models], n=3, cutoff=0.5)
    if not close:
        return f"model {name!r} is not known; {_KINDS_OF_NAMES}"
    return f"model {name!r} is not known; did you mean {' or '.join(close)}? A{_KINDS_OF_NAMES[1:]}"
