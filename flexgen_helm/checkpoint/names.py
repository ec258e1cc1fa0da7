"""From what a user types to what it means: catalogue, hub, folder, file or a name of the user's own. No torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL, CatalogEntry
from flexgen_helm.errors import UnknownModelError, UsageError

__all__ = ["CATALOG", "CatalogEntry", "Precision", "ResolvedModel", "resolve", "split_precision"]

Precision = Literal["fp16", "fp16-s", "4bit", "4bit-s", "paper-4bit"]
Kind = Literal["wheel", "hub", "folder", "gguf", "unpublished"]

# Longest first: "-4bit" is also the end of "-paper-4bit".
_SUFFIXES: tuple[tuple[str, Precision], ...] = (
    ("-paper-4bit", "paper-4bit"),
    ("-fp16-s", "fp16-s"),
    ("-4bit-s", "4bit-s"),
    ("-4bit", "4bit"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/|--)[A-Za-z0-9][\w.-]*")
_WAYS = (
    "a model is named by the catalogue, by a hub repository (org/repo or org--repo), by a folder with config.json and "
    "safetensors files, by a .gguf file, or in the file that FLEXGEN_HELM_MODELS names"
)


@dataclass(frozen=True)
class ResolvedModel:
    """What a model name means.

    name: without `flexgen/` and without the precision's suffix. kind: where the weights come from; 'unpublished'
    has none to fetch, only dummy weights. path: the local folder or file (kinds 'folder' and 'gguf'). revision: of
    the hub's repository, None for its default branch. arguments: client arguments of the user's own models file.
    """

    name: str
    precision: Precision
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


def split_precision(name: str) -> tuple[str, Precision]:
    """`opt-125m-paper-4bit` -> (`opt-125m`, 'paper-4bit'); without a suffix the precision is 'fp16'."""
    for suffix, precision in _SUFFIXES:
        if name.endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], precision
    return name, "fp16"


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> ResolvedModel:
    """Find what a name means without touching the network.

    A name that exists as it is (in the user's models file, in the catalogue, on disk) wins over one that is read
    as base and precision suffix. `revision` wins over the models file's and the catalogue's. Raises
    `UnknownModelError` with the closest catalogue names, `UsageError` where the models file cannot be used.
    """
    text = os.fspath(name)
    text = text.removeprefix("flexgen/")
    own = _own_models()
    base, precision = split_precision(text)
    readings: list[tuple[str, Precision]] = [(text, "fp16")]
    if base != text:
        readings.append((base, precision))
    for candidate, wanted in readings:
        found = _known(candidate, wanted, revision, own)
        if found is not None:
            return found
    # Any org/repo could exist on the hub, so this reading comes last, and there the suffix is ours.
    if _HUB_NAME.fullmatch(base) and base.count("--") + base.count("/") == 1:
        repo = base.replace("--", "/")
        entry = next((e for e in CATALOG.values() if e.hub_repo == repo), None)
        return ResolvedModel(repo.replace("/", "--"), precision, "hub", hub_repo=repo, revision=revision, entry=entry)
    raise UnknownModelError(_unknown(base, own))


def _known(
    name: str, precision: Precision, revision: str | None, own: Mapping[str, dict[str, Any]]
) -> ResolvedModel | None:
    if name in own:
        arguments = dict(own[name])
        path = arguments.pop("path", None)
        own_revision = arguments.pop("revision", None)
        target = _known(name if path is None else path, precision, revision or own_revision, {})
        if target is None:
            what = "needs a path, for it is no catalogue name" if path is None else f"has the path {path}, not found"
            raise UnknownModelError(f"model {name} of the file that FLEXGEN_HELM_MODELS names {what}")
        return ResolvedModel(
            name, precision, target.kind, target.path, target.hub_repo, target.revision, target.entry, arguments
        )
    if (entry := CATALOG.get(name)) is not None:
        kind: Kind = "hub" if entry.hub_repo else "wheel" if name == WHEEL_MODEL else "unpublished"
        return ResolvedModel(name, precision, kind, None, entry.hub_repo, revision or entry.revision, entry)
    if not name:
        return None  # as a path it would be the current folder
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return ResolvedModel(path.resolve().stem if path.is_file() else path.resolve().name, precision, "folder", path)
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(path.stem, precision, "gguf", path)
    return None


def _own_models() -> dict[str, dict[str, Any]]:
    """Name -> client arguments of the file that `FLEXGEN_HELM_MODELS` names; its paths are relative to it."""
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
        arguments = dict(arguments)
        if "path" in arguments and arguments["path"] not in CATALOG:
            arguments["path"] = str(file.parent / Path(arguments["path"]).expanduser())
        models[str(name).removeprefix("flexgen/")] = arguments
    return models


def _unknown(name: str, own: Mapping[str, Any]) -> str:
    if name.endswith((".gguf", ".safetensors")) or name.startswith((".", "/", "~")):
        return f"there is no model file or folder {name}; {_WAYS}"
    close = difflib.get_close_matches(name.lower(), [*CATALOG, *own], n=3, cutoff=0.5)
    ways = f"did you mean {' or '.join(close)}? {_WAYS[0].upper()}{_WAYS[1:]}" if close else _WAYS
    return f"model {name!r} is not known; {ways}"
