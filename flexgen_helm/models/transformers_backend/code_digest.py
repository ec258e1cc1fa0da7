"""Which of `transformers`' files decide what a model computes, and their digest."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from flexgen_helm.concurrency import import_lock

# Caches, masks, rotations, attention, experts, and how checkpoints become state dicts: for every
# class.
_SHARED = (
    "activations", "cache_utils", "configuration_utils", "conversion_mapping", "core_model_loading",
    "integrations.moe", "masking_utils", "modeling_layers", "modeling_rope_utils", "modeling_utils",
    "pytorch_utils",
)  # fmt: skip
_LOADING = ("conversion_mapping", "core_model_loading")
_MODELS = "transformers.models."


@cache
def code_digest(class_name: str) -> str:
    """Return the digest of the files of a class, of those that they take names from, and of the
    shared ones.

    A release of `transformers` that changes none of them computes the same.
    """
    with import_lock("transformers"):
        import transformers

        cls = getattr(transformers, class_name)
        names = {cls.__module__, cls.config_class.__module__}
        unread = list(names)
        while unread:
            new = _named_by(sys.modules[unread.pop()]) - names
            names |= new
            unread += new
        modules = [importlib.import_module(f"transformers.{name}") for name in _SHARED]
    return _digest([sys.modules[name] for name in names] + modules)


@cache
def loading_digest() -> str:
    """Return the digest of the files by which checkpoints become state dicts, of any class."""
    with import_lock("transformers"):
        return _digest([importlib.import_module(f"transformers.{name}") for name in _LOADING])


def _digest(modules: Iterable[ModuleType]) -> str:
    files = sorted({module.__file__ or "" for module in modules})
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            f"{Path(file).name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def _named_by(module: ModuleType) -> set[str]:
    """Return the modules of models that a module's names come from."""
    owners = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
    return {owner for owner in owners if owner.startswith(_MODELS) and owner in sys.modules}
