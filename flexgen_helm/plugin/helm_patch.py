"""A private part of HELM that the plugin replaces or uses: how it is checked, and replaced once."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Any, Literal

from flexgen_helm.errors import UsageError

Command = Literal["helm-run", "flexgen-helm run"]


@dataclass(frozen=True)
class HelmPatch:
    """One place of HELM that the plugin depends on though it is private.

    command: whose patches it belongs to.
    target: `module:name`, below `helm.benchmark`.
    parameters: the function's; None where a decorator hides them, or the target is data.
    purpose: what the plugin does there, and why.
    fallback: what users lose where it looks different.
    replacement: called with HELM's function and its arguments; None where the target is called or
        edited.
    """

    command: Command
    target: str
    parameters: tuple[str, ...] | None
    purpose: str
    fallback: str
    replacement: Callable[..., Any] | None = None

    def owner(self) -> tuple[Any, str]:
        """Return the object that has the target as an attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        return reduce(getattr, outer, importlib.import_module(f"helm.benchmark.{module}")), name

    def check(self) -> None:
        """Raise `UsageError` if HELM's target is missing or has other parameters."""
        try:
            target = getattr(*self.owner())
            if (
                self.parameters is not None
                and tuple(inspect.signature(target).parameters) != self.parameters
            ):
                raise TypeError(f"it takes {inspect.signature(target)}")
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"flexgen_helm does not know this version of HELM ({self.target}: {error}); run: "
                "pip install crfm-helm==0.5.16"
            ) from error

    def install(self) -> None:
        """Replace the target, once."""
        owner, name = self.owner()
        original, replacement = getattr(owner, name), self.replacement
        if replacement is None or hasattr(original, "flexgen_helm"):
            return

        @wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        patched.flexgen_helm = True  # type: ignore[attr-defined]
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(patched) if is_static else patched)
