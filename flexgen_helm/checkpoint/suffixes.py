"""Names of models as texts: their prefix for HELM, and the suffixes of settings. No torch.

flexgen/opt-125m-no-template-paper-4bit
prefix  base    template    precision
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flexgen_helm.quant.precisions import PRECISIONS

# What HELM's names of our models begin with.
PREFIX = "flexgen/"
# Longest first: "-4bit" is also the end of "-paper-4bit".
_SUFFIXES = sorted(set(PRECISIONS) - {"fp16"}, key=len, reverse=True)
# Endings that say whether plain prompts go through the chat template; they come before a
# precision's.
TEMPLATE_SUFFIXES: Mapping[bool, str] = {True: "-with-template", False: "-no-template"}
# Before the digest of other settings of prompts, which one call of `flexgen-helm run` knows.
DIGEST_SUFFIX = "-chat-"
_DIGEST = re.compile(DIGEST_SUFFIX + r"[0-9a-f]{6}$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/|--)[A-Za-z0-9][\w.-]*")


def split_precision(name: str) -> tuple[str, str]:
    """Split `opt-125m-paper-4bit` into (`opt-125m`, 'paper-4bit'); without a suffix the precision
    is 'fp16'.
    """
    for precision in _SUFFIXES:
        base = name.removesuffix(f"-{precision}")
        if base and base != name:
            return base, precision
    return name, "fp16"


def split_template(name: str) -> tuple[str, bool | None]:
    """Split a name without precision, `opt-125m-no-template`, into (`opt-125m`, False); None
    without a suffix.
    """
    for choice, suffix in TEMPLATE_SUFFIXES.items():
        base = name.removesuffix(suffix)
        if base and base != name:
            return base, choice
    return name, None


def base_name(name: str) -> str:
    """Return a name without its suffixes, for people.

    The name as a whole may exist too; then what looks like a suffix is part of it.
    """
    return split_template(_DIGEST.sub("", split_precision(name)[0]))[0]


def without_digest(name: str) -> str:
    """Return a name without the digest of settings of prompts."""
    base, precision = split_precision(name)
    return with_suffixes(_DIGEST.sub("", base), None, precision)


def with_suffixes(base: str, template: bool | None, precision: str) -> str:
    """Return the name of a model under these settings."""
    suffix = "" if template is None else TEMPLATE_SUFFIXES[template]
    return base + suffix + ("" if precision == "fp16" else f"-{precision}")


def is_hub_name(name: str) -> bool:
    """Whether a name has the form org/repo or org--repo."""
    return _HUB_NAME.fullmatch(name) is not None and name.count("--") + name.count("/") == 1
