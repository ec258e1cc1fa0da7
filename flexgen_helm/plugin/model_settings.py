"""Flags of a suite that change its models and so their names, as two settings share no folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark.model_deployment_registry import get_model_deployment

from flexgen_helm.checkpoint.suffixes import split_precision
from flexgen_helm.config import OPTIONS, PROMPT_OPTIONS, parse_option
from flexgen_helm.errors import UsageError
from flexgen_helm.plugin import registration
from flexgen_helm.plugin.context import get_context
from flexgen_helm.plugin.model_names import with_settings
from flexgen_helm.quant.precisions import Precision

_SLASH_NAME = re.compile(r"\bflexgen/([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_NAME = re.compile(r"\bflexgen/[A-Za-z0-9][\w.-]*")


def without_slash(text: str) -> str:
    """Write our models' names without a second slash, as HELM needs them."""
    return _SLASH_NAME.sub(r"flexgen/\1--\2", text)


@dataclass(frozen=True)
class ModelSettings:
    """Flags of `flexgen-helm run` that are suffixes of its models' names.

    precisions: every run of ours is run in each of them; empty for those that the names say.
    chat_template: whether prompts go through it; None for what the names say.
    prompt_digest: of other settings of prompts, as `model_names.prompt_digest` returns it.
    """

    precisions: Sequence[str] = ()
    chat_template: bool | None = None
    prompt_digest: str = ""

    def in_each_setting(self, text: str) -> list[str]:
        """Return a text with our models' names as HELM needs them: without a second slash, once per
        precision of the flags.

        A suffix would make another name of a deployment that has an entry in `prod_env`, so these
        stay unchanged.
        """
        text = without_slash(text)

        def in_precision(precision: str | None) -> str:
            def with_suffixes(match: re.Match[str]) -> str:
                if _has_entry(match[0]):
                    return match[0]
                return with_settings(match[0], precision, self.chat_template, self.prompt_digest)

            return _NAME.sub(with_suffixes, text)

        precisions: Sequence[str | None] = self.precisions or [None]
        return list(dict.fromkeys(map(in_precision, precisions)))

    def check(self, name: str) -> None:
        """Raise `UsageError` if a flag differs from what an entry says of the deployment `name`.

        Its runs would be computed under one setting and filed under another, or written over those
        of another.
        """
        model = registration.model_of(name)
        if model is None:
            return
        # Without the flag a model's options are not read: they are refused when it is run.
        precision = (model.config.precision or "fp16") if self.precisions else ""
        if _has_entry(name):
            self._check_entry(name, precision)
        elif self.precisions and precision != split_precision(name)[1]:
            raise UsageError(
                f"--precision {','.join(self.precisions)} cannot change {name}, which the file "
                f"that FLEXGEN_HELM_MODELS names says is {precision}; take `precision` out of its "
                "entry there, or leave out --precision"
            )

    def _check_entry(self, name: str, precision: str | Precision) -> None:
        """Raise `UsageError` if a flag differs from the entry of a deployment in `prod_env`."""
        # The flags of the digest are among the model's options already; the entry alone says what
        # its name stands for.
        entry = get_model_deployment(name).client_spec.args or {}
        flags = {**get_context().engine_options, "apply_chat_template": self.chat_template}
        for option in PROMPT_OPTIONS:
            wanted = flags.get(option)
            if wanted is not None and (
                entry.get(option) is None or parse_option(option, entry[option]) != wanted
            ):
                raise UsageError(
                    f"{OPTIONS[option].metadata['flags'][0].name} cannot change {name}, which has "
                    f"an entry in model_deployments.yaml; write `{option}` into the args of an "
                    "entry with a name of its own"
                )
        flag = ",".join(self.precisions)
        if flag and flag != precision:
            raise UsageError(
                f"--precision {flag} cannot change {name}, which its entry in "
                f"model_deployments.yaml says is {precision}; give each precision an entry of its "
                "own, with `precision` in its args, and leave out --precision"
            )


def _has_entry(name: str) -> bool:
    """Whether a user's file defines the deployment `name`; ours are generated and never in HELM's
    registry.
    """
    return name in deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT
