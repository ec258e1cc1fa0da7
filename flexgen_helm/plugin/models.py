"""Model names as HELM users write them, and what stands behind a name. No HELM, no torch before it is needed.

A name is `flexgen/` and then a catalogue name, `<org>--<repo>` of the hub, or a name of the user's own file
(`FLEXGEN_HELM_MODELS`); any of them may end in a precision suffix such as `-4bit`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import UnknownModelError, UsageError
from flexgen_helm.request import MemoryLimits

if TYPE_CHECKING:
    from flexgen_helm.checkpoint.names import ResolvedModel
    from flexgen_helm.models.config import ModelConfig
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

PREFIX = "flexgen/"
_INSTRUCT_NAME = re.compile(r"instruct|chat|[-_]it\b|[-_]iml[-_]")


@dataclass(frozen=True)
class ModelArguments:
    """One deployment: a checkpoint and how to run it. Equal arguments share one engine.

    name: as the user wrote it, without `flexgen/`. path: what `Engine.from_pretrained` takes. None everywhere
    else means the engine's own default.
    """

    name: str
    path: str
    revision: str | None = None
    precision: str | None = None
    policy: str | None = None
    schedule: str | None = None
    limits: MemoryLimits | None = None
    offload_dir: str | None = None
    device: str | None = None
    max_latency: float | None = None
    kv_dtype: str | None = None
    weights: str | None = None
    seed: int | None = None
    overlap: bool | None = None
    cpu_attention: bool | None = None
    link_gb_s: tuple[float, float] | None = None

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.from_pretrained`, only those that were given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None and name not in ("name", "path")}


@dataclass(frozen=True)
class ModelFacts:
    """What HELM must know before the model is loaded. Filled from the catalogue or the checkpoint's configuration."""

    display_name: str
    max_positions: int
    num_parameters: int
    instruct: bool


# What a deployment entry may say in its `args`.
ARGUMENTS = tuple(field.name for field in fields(ModelArguments) if field.name != "name")


def find_model(
    name: str, arguments: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> ModelArguments:
    """Return the model behind a deployment's name.

    arguments: those of its entry in a file. overrides: engine options that win over the entry's.
    Raises UnknownModelError with one sentence. It is no ValueError on purpose: HELM takes a ValueError in a name
    look-up for 'no such model' and drops the sentence.
    """
    from flexgen_helm.checkpoint import names

    short = name.removeprefix(PREFIX)
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    path, revision = given.pop("path", None), given.pop("revision", None)
    if path is None and "/" in short:
        raise UnknownModelError(
            f"'{name}' has one slash too many for HELM, which would mix its results up with those of another "
            f"client; write '{PREFIX}{short.replace('/', '--')}'"
        )
    found = names.resolve(path or short, revision)
    precision = names.split_precision(short)[1] if path else found.precision
    suffix = {} if precision == "fp16" else {"precision": precision}
    given = {"precision": "fp16", **found.arguments, **suffix, **given, **(overrides or {})}
    _check(given, name)
    if isinstance(given.get("limits"), Mapping):
        given["limits"] = _limits(given["limits"], name)
    return ModelArguments(name=short, path=_target(found), revision=found.revision, **given)


def _target(found: ResolvedModel) -> str:
    """The shortest name or path by which the engine finds the same weights, without suffix or arguments."""
    if found.path is not None:
        return str(found.path)
    return found.entry.name if found.entry is not None else str(found.hub_repo)


def _check(given: Mapping[str, Any], name: str) -> None:
    unknown = sorted(set(given) - set(ARGUMENTS))
    if unknown:
        raise UsageError(f"the model {name} has the unknown argument {unknown[0]!r}; known are {', '.join(ARGUMENTS)}")


def _limits(given: Mapping[str, Any], name: str) -> MemoryLimits:
    tiers = [field.name for field in fields(MemoryLimits)]
    for tier, size in given.items():
        if tier not in tiers or not isinstance(size, (int, type(None))):
            raise UsageError(f"limits of {name}: {tier}={size!r}, but {', '.join(tiers)} take a number of bytes")
    return MemoryLimits(**given)


def read_facts(model: ModelArguments) -> ModelFacts:
    """From the catalogue where it knows the model, else from the checkpoint's configuration; never weights."""
    from flexgen_helm.checkpoint import names

    found = names.resolve(model.path, model.revision)
    if found.entry is not None:
        return _facts_of(model, found.entry.config, found.entry.instruct)
    path = _local(model)
    if path.is_dir():
        from flexgen_helm.checkpoint.folder import read_config

        config = read_config(path)[1]
    else:
        from flexgen_helm.checkpoint.open import open_checkpoint

        config = open_checkpoint(path).config
    # A chat template proves nothing: base models carry one too.
    return _facts_of(model, config, bool(_INSTRUCT_NAME.search(f"{model.name} {model.path}".lower())))


def _facts_of(model: ModelArguments, config: ModelConfig, instruct: bool) -> ModelFacts:
    return ModelFacts(model.name, config.max_positions, config.num_parameters, instruct)


def load_tokenizer(model: ModelArguments) -> Tokenizer:
    """The model's tokenizer, without its weights."""
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

    found = Tokenizer.from_path(_local(model))
    if found is None:
        raise UsageError(f"the model {model.name} has no tokenizer files, and HELM works with text")
    return found


def _local(model: ModelArguments) -> Path:
    """The model's folder or .gguf file on this machine, fetched first where needed."""
    from flexgen_helm.checkpoint.fetch import fetch

    path = fetch(model.path, model.revision)
    return path.parent if path.suffix == ".safetensors" else path


def with_precision(name: str, precision: str) -> str:
    """The name that means `name` at `precision`, because results of two precisions must not share a directory."""
    from flexgen_helm.checkpoint.names import split_precision

    base, own = split_precision(name.removeprefix(PREFIX))
    if own not in ("fp16", precision):
        raise UsageError(f"the model name {name} says {own}, the command line says {precision}")
    return PREFIX + base + ("" if precision == "fp16" else f"-{precision}")
