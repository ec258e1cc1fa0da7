"""Commands as typer makes them: switches without a value's placeholder, no option twice, help that
fills the lines.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from typer.core import TyperCommand, TyperGroup

from flexgen_helm.errors import UsageError


def flag_parameter(name: str, settings: Any, is_switch: bool) -> inspect.Parameter:
    """Return a parameter of a command: a switch, or a text that need not be given."""
    kind: Any = bool if is_switch else str | None
    default, annotation = False if is_switch else None, Annotated[kind, settings]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_parameters(
    command: Callable[..., None],
    wrapper: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Return the wrapper of a command as typer takes it: with its name, its help, and these
    parameters.
    """
    functools.update_wrapper(wrapper, command)
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def help_text(docstring: str) -> str:
    """Return a docstring with each paragraph on one line; one with indented lines keeps its
    lines.
    """
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in text else " ".join(text.split()) for text in paragraphs)


def refuse_twice(options: Iterable[str]) -> None:
    """Raise `UsageError` for an option that is given more than once and takes one value: parsers
    take the last.
    """
    seen: set[str] = set()
    for option in options:
        if option in seen:
            raise UsageError(
                f"{option} is given twice, and only the last would count; give it once"
            )
        seen.add(option)


class Command(TyperCommand):
    """A command whose switches show no `<bool>`, and whose help may have brackets, as
    `flexgen-helm[serve]` has.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.markup import escape

        text, self.help = self.help, escape(self.help or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = text

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            parsed = parse(args)
            if not ctx.resilient_parsing:  # completion
                single = [
                    param
                    for param in parsed[2]
                    if not (param.multiple or getattr(param, "is_flag", False))
                ]
                refuse_twice(
                    max(param.opts, key=len)
                    for param in single
                    if param.param_type_name == "option"
                )
            return parsed

        vars(parser)["parse_args"] = parse_once
        return parser

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
