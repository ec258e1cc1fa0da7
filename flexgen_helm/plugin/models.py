"""Model names of HELM deployments and the models behind them. Imports neither HELM nor torch.

A name is `flexgen/` and then a catalog name, `<org>--<repo>` of the hub, or a name of the user's own file
(`FLEXGEN_HELM_MODELS`). Suffixes may follow: of the chat template (`-no-template`), of other settings of prompts
(`-chat-1f09ab`, which one call of `flexgen-helm run` knows), and of the precision (`-4bit`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.checkpoint.names import PREFIX
from flexgen_helm.config import OPTIONS, PROMPT_OPTIONS, EngineConfig, EngineOptions
from flexgen_helm.errors import UnknownModelError, UsageError

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

# What the `args` of a deployment and an entry of the user's own file may contain.
ARGUMENTS = ("path", *OPTIONS)


@dataclass(frozen=True)
class ModelArguments:
    """The model of a deployment.

    name: as the user wrote it, without `flexgen/`
    path: name, folder or file for `Engine.from_config`, without suffixes
    options: those of `EngineConfig` that were given
    """

    name: str
    path: str
    revision: str | None = None
    options: EngineOptions = field(default_factory=dict, hash=False)

    @cached_property
    def config(self) -> EngineConfig:
        """Check the options. Raises UsageError, on use and not before: other models of the suite are still run."""
        return EngineConfig(revision=self.revision, **self.options)

    @cached_property
    def engine_key(self) -> ModelArguments:
        """What decides the engine: models with equal keys share it, whatever their names and settings of prompts."""
        options = {name: value for name, value in self.options.items() if name not in PROMPT_OPTIONS}
        return replace(self, name=self.path, options=options)


@dataclass(frozen=True)
class ModelFacts:
    """What must be known before the model is loaded.

    instruct, is_base: tuned to follow instructions, or not; both are false where neither catalog nor name says it.
    """

    display_name: str
    max_positions: int
    num_parameters: int
    instruct: bool
    is_base: bool = False


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
    base, precision = names.split_precision(short)
    if digest := prompt_digest(overrides or {}):
        base = base.removesuffix(names.DIGEST_SUFFIX + digest)
    template = names.split_template(base)[1]
    if path is None and "/" in short:
        if not names.is_hub_name(short) or Path(short).is_dir():
            raise UnknownModelError(names.naming_advice(short))
        raise UnknownModelError(
            f"'{name}' has one slash too many for HELM, which would mix its results up with those of another "
            f"client; write '{PREFIX}{short.replace('/', '--')}'"
        )
    resolved = names.resolve(path or names.with_suffixes(base, None, precision), revision)
    options = {"precision": "fp16", **resolved.options}
    if path is not None and precision != "fp16":
        options["precision"] = precision
    if path is not None and template is not None:
        options["apply_chat_template"] = template
    options |= {**given, **(overrides or {})}
    unknown = sorted(set(options) - set(ARGUMENTS))
    if unknown:
        raise UsageError(f"the model {name} has the unknown argument {unknown[0]!r}; known are {', '.join(ARGUMENTS)}")
    options = {option: value for option, value in options.items() if value is not None}
    # The shortest name or path by which the engine finds the same weights, without suffixes or arguments.
    target = resolved.path or (resolved.entry.name if resolved.entry is not None else resolved.hub_repo)
    return ModelArguments(short, str(target), resolved.revision, options)


def read_facts(model: ModelArguments) -> ModelFacts:
    """Read facts from the catalog if it has the model, else from the checkpoint's configuration; never weights."""
    from flexgen_helm.checkpoint import names

    resolved = names.resolve(model.path, model.revision)
    if resolved.path is not None and model.options.get("weights") != "dummy":
        from flexgen_helm.checkpoint.fetch import local_weights

        local_weights(resolved)  # refuses a folder without weights before HELM reads data
    if resolved.entry is not None:
        config = resolved.entry.config
    else:
        path = _fetch(model)
        if path.is_dir():
            from flexgen_helm.checkpoint.folder import read_config

            config = read_config(path)[1]
        else:
            from flexgen_helm.checkpoint.open import open_checkpoint

            config = open_checkpoint(path).config
    named = replace(resolved, name=names.base_name(model.name))
    return ModelFacts(model.name, config.max_positions, config.num_parameters, named.is_instruct, named.is_base)


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


def prompt_digest(options: Mapping[str, Any]) -> str:
    """Return a digest of those settings of prompts that have no suffix of their own; '' without any."""
    given = {name: options[name] for name in PROMPT_OPTIONS if name != "apply_chat_template" and name in options}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:6] if given else ""


def with_settings(name: str, precision: str | None, template: bool | None, digest: str = "") -> str:
    """Return `name` with the suffixes of settings: results of two settings must not share a directory.

    precision, template: None keeps what the name says. digest: as `prompt_digest` returns it.
    Raises `UsageError` where the name says otherwise.
    """
    from flexgen_helm.checkpoint import names

    short = name.removeprefix(PREFIX)
    base, own_precision = names.split_precision(short)
    if precision is not None and own_precision not in ("fp16", precision):
        raise UsageError(f"the model name {name} says {own_precision}, the command line says {precision}")
    end = f"{names.DIGEST_SUFFIX}{digest}" if digest else ""
    base, own_template = names.split_template(base.removesuffix(end))
    if template is not None and own_template not in (None, template):
        raise UsageError(f"the model name {name} and --chat-template {str(template).lower()} contradict each other")
    template = own_template if template is None else template
    return PREFIX + names.with_suffixes(
        names.with_suffixes(base, template, "fp16") + end, None, precision or own_precision
    )
