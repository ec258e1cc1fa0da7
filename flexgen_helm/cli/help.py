"""Help texts as typer shows them: switches without a value's placeholder, paragraphs that fill the lines."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup


def help_text(docstring: str) -> str:
    """Return a docstring with each paragraph on one line; one with indented lines keeps its lines."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in text else " ".join(text.split()) for text in paragraphs)


class Command(TyperCommand):
    """A command whose switches show no `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """The same for the root's own switches."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
