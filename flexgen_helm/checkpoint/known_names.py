"""Names of the catalog's models and the user's, and what is said of a name that is neither. No
torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.suffixes import PREFIX, with_suffixes
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.suggestions import closest, listed

# An ending that other programs use for a precision: '-8bit', '-int4', '-bf16', '-q4_0'.
_FOREIGN_PRECISION = re.compile(
    r"[-.]((?:paper-)?\d+-?bit\S*|int\d+|b?fp?\d+\S*|i?q\d\w*|awq|gptq)$", re.IGNORECASE
)
_KINDS_OF_NAMES = (
    "a model is named by the catalog, by a hub repository (org/repo or org--repo), by a folder "
    "with config.json and safetensors files, by a .gguf file, or in the file that "
    "FLEXGEN_HELM_MODELS names"
)


def read_user_models() -> dict[str, dict[str, Any]]:
    """Return name -> client arguments of the file that `FLEXGEN_HELM_MODELS` names; its paths are
    relative to it.
    """
    named = os.environ.get("FLEXGEN_HELM_MODELS")
    if not named:
        return {}
    file = Path(named).expanduser()
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"FLEXGEN_HELM_MODELS names {file}, which cannot be read: {error}"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(
            f"FLEXGEN_HELM_MODELS names {file}, which must map model names to paths or arguments"
        )
    models: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        arguments = {"path": value} if isinstance(value, str) else value
        if not isinstance(arguments, dict) or not isinstance(arguments.get("path", ""), str):
            raise UsageError(
                f"model {name} of {file} must be a path, or arguments of which `path` is a string"
            )
        if "path" in arguments and arguments["path"] not in CATALOG:
            arguments = {
                **arguments,
                "path": str(file.parent / Path(arguments["path"]).expanduser()),
            }
        models[str(name).removeprefix(PREFIX)] = arguments
    return models


def known_names() -> dict[str, str]:
    """Return all aliases of catalog and user models: alias -> name."""
    aliases = {name: name for name in [*read_user_models(), *CATALOG]}
    for entry in CATALOG.values():
        if entry.hub_repo is not None:
            aliases |= {entry.hub_repo: entry.name}
            aliases.setdefault(entry.hub_repo.partition("/")[2], entry.name)
    return aliases


def original_of(name: str) -> str | None:
    """Return the catalog model that was quantized, from the quantized one's name or file name; None
    if that does not tell.
    """
    known = {alias.lower(): model for alias, model in known_names().items()}
    base = re.split(r"/|--", name.partition("@")[0].removesuffix(".gguf").lower())[-1]
    while ending := _FOREIGN_PRECISION.search(base):
        base = base[: ending.start()]
        if base in known:
            return known[base]
    return None


def close_names(name: str) -> list[str]:
    """Return the catalog names and names of the user's own that `name` may mean, best first."""
    aliases = known_names()
    # A short name is not like a repository, whose organization differs from it in any case.
    candidates = aliases if "/" in name else [alias for alias in aliases if "/" not in alias]
    # More than are returned, because several aliases may mean one model.
    return list(dict.fromkeys(aliases[alias] for alias in closest(name, candidates, count=9)))[:3]


def no_such_path_message(path: str) -> str:
    """Return what is said of a path without a model."""
    return f"there is no model file or folder {path}; {_KINDS_OF_NAMES}"


def unknown_model_message(name: str, template: bool | None, precision: str) -> str:
    """Return what is said of a name that means no model, with the names that it may be meant for.

    template, precision: what its suffixes said; the names that are offered get them too.
    """
    if name.endswith((".gguf", ".safetensors")) or name.startswith((".", "/", "~")):
        return no_such_path_message(name)
    unknown = f"model {name!r} is not known"
    ending = _FOREIGN_PRECISION.search(name)
    if ending is not None and (base := name[: ending.start()]) in known_names():
        longer = [known for known in known_names() if known.startswith(name)]
        names = listed([*longer, *(with_suffixes(base, template, known) for known in PRECISIONS)])
        return f"{unknown}: {ending[1]!r} is no precision of flexgen_helm; write {names}"
    if close := close_names(name):
        names = listed(with_suffixes(known, template, precision) for known in close)
        return f"{unknown}; did you mean {names}? `flexgen-helm models` lists all names"
    return f"{unknown}; {_KINDS_OF_NAMES}; `flexgen-helm models` lists the catalog"
