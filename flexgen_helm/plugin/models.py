"""Model names of HELM deployments and the models behind them. Imports neither HELM nor torch.

A name is `flexgen/` and then a catalog name, `<org>--<repo>` of the hub, or a name of the user's own file
(`FLEXGEN_HELM_MODELS`). A precision suffix such as `-4bit` may follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.checkpoint.names import PREFIX
from flexgen_helm.config import OPTIONS, EngineConfig, EngineOptions
from flexgen_helm.errors import UnknownModelError, UsageError

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

# What the `args` of a deployment and an entry of the user's own file may contain.
ARGUMENTS = ("path", *OPTIONS)
_INSTRUCT_NAME = re.compile(r"instruct|chat|[-_]it\b|[-_]iml[-_]")


@dataclass(frozen=True)
class ModelArguments:
    """The model of a deployment. Equal records share one engine.

    name: as the user wrote it, without `flexgen/`
    path: name, folder or file for `Engine.from_config`, without precision suffix
    options: of the engine, only those given
    """

    name: str
    path: str
    revision: str | None = None
    options: EngineOptions = field(default_factory=dict, hash=False)

    @cached_property
    def config(self) -> EngineConfig:
        """Check the options. Raises UsageError, on use and not before: other models of the suite are still run."""
        return EngineConfig(revision=self.revision, **self.options)


@dataclass(frozen=True)
class ModelFacts:
    """What HELM must know before the model is loaded."""

    display_name: str
    max_positions: int
    num_parameters: int
    instruct: bool


def find_model(
    name: str, arguments: Mapping[str, Any] | None = None, overrides: EngineOptions | None = None
) -> ModelArguments:
    """Return the model behind a deployment's name.

    arguments: those of the deployment's entry in a file
    overrides: options that win over the entry's: the flags of `flexgen-helm run`
    Raises UnknownModelError, or UsageError for an argument that does not exist. Neither is a ValueError: HELM takes
    a ValueError in a name look-up for 'no such model' and drops the message.
    """
    from flexgen_helm.checkpoint import names

    short = name.removeprefix(PREFIX)
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    path, revision = given.pop("path", None), given.pop("revision", None)
    if path is None and "/" in short:
        if not names.is_hub_name(short) or Path(short).is_dir():
            raise UnknownModelError(names.naming_advice(short))
        raise UnknownModelError(
            f"'{name}' has one slash too many for HELM, which would mix its results up with those of another "
            f"client; write '{PREFIX}{short.replace('/', '--')}'"
        )
    resolved = names.resolve(path or short, revision)
    options = {"precision": "fp16", **resolved.options}
    if path is not None and (suffix := names.split_precision(short)[1]) != "fp16":
        options["precision"] = suffix
    options |= {**given, **(overrides or {})}
    unknown = sorted(set(options) - set(ARGUMENTS))
    if unknown:
        raise UsageError(f"the model {name} has the unknown argument {unknown[0]!r}; known are {', '.join(ARGUMENTS)}")
    options = {option: value for option, value in options.items() if value is not None}
    # The shortest name or path by which the engine finds the same weights, without suffix or arguments.
    target = resolved.path or (resolved.entry.name if resolved.entry is not None else resolved.hub_repo)
    return ModelArguments(short, str(target), resolved.revision, options)


def read_facts(model: ModelArguments) -> ModelFacts:
    """Read facts from the catalog if it has the model, else from the checkpoint's configuration; never weights."""
    from flexgen_helm.checkpoint import names

    resolved = names.resolve(model.path, model.revision)
    entry = resolved.entry
    if resolved.path is not None and model.options.get("weights") != "dummy":
        from flexgen_helm.checkpoint.fetch import local_weights

        local_weights(resolved)  # refuses a folder without weights before HELM reads data
    if entry is not None:
        config, instruct = entry.config, entry.instruct
    else:
        path = _fetch(model)
        if path.is_dir():
            from flexgen_helm.checkpoint.folder import read_config

            config = read_config(path)[1]
        else:
            from flexgen_helm.checkpoint.open import open_checkpoint

            config = open_checkpoint(path).config
        # A chat template proves nothing: base models have one too.
        instruct = bool(_INSTRUCT_NAME.search(f"{model.name} {model.path}".lower()))
    return ModelFacts(model.name, config.max_positions, config.num_parameters, instruct)


def needs_download(model: ModelArguments) -> bool:
    """Whether facts of the model are read from a hub repository."""
    from flexgen_helm.checkpoint import names

    resolved = names.resolve(model.path, model.revision)
    return resolved.path is None and resolved.entry is None


def load_tokenizer(model: ModelArguments) -> Tokenizer:
    """Load the model's tokenizer, without its weights."""
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_path(_fetch(model))
    if tokenizer is None:
        raise UsageError(f"the model {model.name} has no tokenizer files, and HELM works with text")
    return tokenizer


def _fetch(model: ModelArguments) -> Path:
    """Return the model's folder or .gguf file on this machine; fetch it first if needed."""
    from flexgen_helm.checkpoint.fetch import fetch

    path = fetch(model.path, model.revision)
    return path.parent if path.suffix == ".safetensors" else path


def with_precision(name: str, precision: str) -> str:
    """Return `name` with the suffix of `precision`: results of two precisions must not share a directory."""
    from flexgen_helm.checkpoint.names import split_precision

    base, own = split_precision(name.removeprefix(PREFIX))
    if own not in ("fp16", precision):
        raise UsageError(f"the model name {name} says {own}, the command line says {precision}")
    return PREFIX + base + ("" if precision == "fp16" else f"-{precision}")
