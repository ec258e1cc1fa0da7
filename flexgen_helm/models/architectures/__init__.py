"""One module per architecture: how its configuration becomes a `ModelConfig`, and its tensor names. No torch.

A module with an `ARCHITECTURE` registers itself by being here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.base import Architecture

_MODULES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
ARCHITECTURES: Mapping[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE for module in _MODULES if hasattr(module, "ARCHITECTURE")
}


def architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    """Find the architecture of a `config.json`. Raises `UnsupportedArchitectureError` with the supported ones."""
    named = config.get("architectures") or ()
    names = named if isinstance(named, (list, tuple)) else (named,)
    for architecture in ARCHITECTURES.values():
        is_named = any(name in architecture.hf_names for name in names)
        if is_named or (not names and config.get("model_type") == architecture.name):
            return architecture
    wanted = ", ".join(map(str, names)) or config.get("model_type") or "(none named)"
    supported = ", ".join(architecture.hf_names[0] for architecture in ARCHITECTURES.values())
    raise UnsupportedArchitectureError(f"architecture {wanted} is not supported; supported are {supported}")


def architecture_of_gguf(name: str) -> Architecture:
    """Find the architecture of a GGUF file by its `general.architecture`. Raises `UnsupportedArchitectureError`."""
    known = {gguf_name: a for a in ARCHITECTURES.values() for gguf_name in a.gguf_names}
    if name not in known:
        raise UnsupportedArchitectureError(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(known)}"
        )
    return known[name]
