"""Model names of HELM deployments and the models behind them. Imports neither HELM nor torch.

A name is `flexgen/` and then a catalog name, `<org>--<repo>` of the hub, or a name of the user's
own file (`FLEXGEN_HELM_MODELS`). Suffixes may follow: of the chat template (`-no-template`), of
other settings of prompts (`-chat-1f09ab`, which one call of `flexgen-helm run` knows), and of the
precision (`-4bit`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexgen_helm.checkpoint import names, suffixes
from flexgen_helm.checkpoint.naming_advice import naming_advice
from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.config import OPTIONS, PROMPT_OPTIONS, EngineOptions
from flexgen_helm.errors import UnknownModelError, UsageError
from flexgen_helm.service.models import ModelArguments

# What the `args` of a deployment and an entry of the user's own file may contain.
ARGUMENTS = ("path", *OPTIONS)


def find_model(
    name: str, arguments: Mapping[str, Any] | None = None, overrides: EngineOptions | None = None
) -> ModelArguments:
    """Return the model behind a deployment's name.

    arguments: those of the deployment's entry in a file
    overrides: options that win over the entry's: the flags of `flexgen-helm run`
    Raises UnknownModelError, or UsageError for an argument that does not exist. Neither is a
    ValueError: HELM takes a ValueError in a name look-up for 'no such model' and drops the message.
    """
    short = name.removeprefix(PREFIX)
    entry_options = _without_empty(arguments or {})
    path, revision = entry_options.pop("path", None), entry_options.pop("revision", None)
    base, precision = suffixes.split_precision(short)
    if digest := prompt_digest(overrides or {}):
        base = base.removesuffix(suffixes.DIGEST_SUFFIX + digest)
    suffix_options: dict[str, Any] = {}
    if path:
        suffix_options = _without_empty(
            {
                "precision": precision if precision != "fp16" else None,
                "apply_chat_template": suffixes.split_template(base)[1],
            }
        )
    else:
        _refuse_slash(name, short)
        path = suffixes.with_suffixes(base, None, precision)
    resolved = names.resolve(path, revision)
    options = {
        "precision": "fp16",
        **resolved.options,
        **suffix_options,
        **entry_options,
        **(overrides or {}),
    }
    if unknown := sorted(set(options) - set(ARGUMENTS)):
        raise UsageError(
            f"the model {name} has the unknown argument {unknown[0]!r}; known are "
            f"{', '.join(ARGUMENTS)}"
        )
    # The shortest name or path by which the engine finds the same weights, without suffixes or
    # arguments.
    target = resolved.path or (
        resolved.entry.name if resolved.entry is not None else resolved.hub_repo
    )
    return ModelArguments(short, str(target), resolved.revision, _without_empty(options))


def _without_empty(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse_slash(name: str, short: str) -> None:
    """Raise `UnknownModelError` for a folder, and for a hub name as other commands take it."""
    if "/" not in short:
        return
    if not suffixes.is_hub_name(short) or Path(short).is_dir():
        raise UnknownModelError(naming_advice(short))
    raise UnknownModelError(
        f"'{name}' has one slash too many for HELM, which would mix its results up with those of "
        f"another client; write '{PREFIX}{short.replace('/', '--')}'"
    )


def prompt_digest(options: Mapping[str, Any]) -> str:
    """Return a digest of those settings of prompts that have no suffix of their own; '' without
    any.
    """
    given = {
        name: options[name]
        for name in PROMPT_OPTIONS
        if name != "apply_chat_template" and name in options
    }
    return (
        hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:6] if given else ""
    )


def with_settings(name: str, precision: str | None, template: bool | None, digest: str = "") -> str:
    """Return `name` with the suffixes of settings: results of two settings must not share a
    directory.

    precision, template: None keeps what the name says. digest: as `prompt_digest` returns it.
    Raises `UsageError` where the name says otherwise.
    """
    short = name.removeprefix(PREFIX)
    base, named_precision = suffixes.split_precision(short)
    if precision is not None and named_precision not in ("fp16", precision):
        raise UsageError(
            f"the model name {name} says {named_precision}, the command line says {precision}"
        )
    end = f"{suffixes.DIGEST_SUFFIX}{digest}" if digest else ""
    base, named_template = suffixes.split_template(base.removesuffix(end))
    if template is not None and named_template not in (None, template):
        raise UsageError(
            f"the model name {name} and --chat-template {str(template).lower()} contradict each "
            "other"
        )
    template = named_template if template is None else template
    return PREFIX + suffixes.with_suffixes(
        suffixes.with_suffixes(base, template, "fp16") + end, None, precision or named_precision
    )
