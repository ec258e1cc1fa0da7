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
    """A command whose switches show no `<bool>`, and whose help may have brackets, as `flexgen-helm[serve]` has."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.markup import escape

        text, self.help = self.help, escape(self.help or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = text

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
