"""One module per architecture: how its configuration becomes a `ModelConfig`, and its tensor names. No torch.

A module with an `ARCHITECTURE` registers itself by being here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.unlisted import MULTI_PART_CLASSES, UNLISTED_CLASSES
from flexgen_helm.models.config import ModelConfig

_MODULES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
ARCHITECTURES: Mapping[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE for module in _MODULES if hasattr(module, "ARCHITECTURE")
}


def architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    """Find the architecture of a `config.json`: a record of ours, else one that runs by transformers' modules.

    Raises `UnsupportedArchitectureError` with the supported ones, and if class and `model_type` are of two of them:
    `transformers` takes the one or the other, depending on how it is called.
    """
    named = config.get("architectures") or ()
    names = named if isinstance(named, (list, tuple)) else (named,)
    kind = config.get("model_type")
    for architecture in ARCHITECTURES.values():
        is_named = any(name in architecture.hf_names for name in names)
        if is_named and kind != architecture.name and isinstance(kind, str) and kind in ARCHITECTURES:
            raise UnsupportedArchitectureError(
                f"{', '.join(map(str, names))} with the model_type {kind!r} is not supported; they are two models"
            )
        if is_named or (not names and kind == architecture.name):
            return architecture
    return architecture_by_modules(config)


def architecture_by_modules(config: Mapping[str, Any]) -> Architecture:
    """Find the architecture of a `config.json` that runs by transformers' modules, whether it has a record or not.

    Raises `UnsupportedArchitectureError` with the supported ones.
    """
    named = config.get("architectures") or ()
    names = named if isinstance(named, (list, tuple)) else (named,)
    if (found := transformers_architecture(names)) is not None:
        return found
    wanted = ", ".join(map(str, names)) or config.get("model_type") or "(none named)"
    supported = ", ".join(architecture.hf_names[0] for architecture in ARCHITECTURES.values())
    raise UnsupportedArchitectureError(f"architecture {wanted} is not supported; supported are {supported}")


def transformers_architecture(names: Sequence[Any]) -> Architecture | None:
    """Return the architecture of a class of `transformers`; None for names that it does not know.

    Of a model that also sees or hears, it is that of its language model.
    """
    if not names or not isinstance(names[0], str) or find_spec("transformers") is None:
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MULTI_PART_CLASSES | UNLISTED_CLASSES
    if names[0] not in known and names[0] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    return Architecture(names[0], tuple(names), _read_by_modules, {}, overflows_float16=True)


def overflows_float16(architecture: str) -> bool:
    """Whether hidden states of an architecture exceed float16; of those that nobody has looked at, it is assumed."""
    return architecture not in ARCHITECTURES or ARCHITECTURES[architecture].overflows_float16


def _read_by_modules(config: Mapping[str, Any]) -> ModelConfig:
    from flexgen_helm.models.transformers_backend.read_config import read_transformers_config

    return read_transformers_config(config)


def architecture_of_gguf(name: str) -> Architecture:
    """Find the architecture of a GGUF file by its `general.architecture`. Raises `UnsupportedArchitectureError`."""
    known = {gguf_name: a for a in ARCHITECTURES.values() for gguf_name in a.gguf_names}
    if name not in known:
        raise UnsupportedArchitectureError(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(known)}"
        )
    return known[name]
