"""Griffe extension: read this project's docstrings, in which arguments and fields are lines
`name: description`.

They become the sections that mkdocstrings shows as tables. A longer description continues on
indented lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any

import griffe

from flexgen_helm.config import OPTIONS, document_options

_FIELD = re.compile(r"(\w+(?:, \w+)*): +(\S.*)")


def with_section(text: str, names: Collection[str], section: str) -> str:
    """Move lines `name: description` of the given names into a Google-style section at their
    place.
    """
    lines: list[str] = []
    in_section = False
    for line in inspect.cleandoc(text).splitlines():
        match = _FIELD.fullmatch(line)
        fields = match[1].split(", ") if match else []
        if match and set(fields) <= set(names):
            if not in_section:
                lines += ["", f"{section}:"]
            lines += [f"    {name}: {match[2]}" for name in fields]
            in_section = True
        elif in_section and line.startswith(" "):
            lines.append(f"    {line}")
        elif line and in_section:
            lines += ["", line]
            in_section = False
        else:
            lines.append(line)
    return "\n".join(lines)


class FieldLines(griffe.Extension):
    """Applies `with_section` to classes (fields) and functions (arguments)."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        _rewrite(
            cls, [name for name, member in cls.members.items() if member.is_attribute], "Attributes"
        )

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if any(
            str(decorator.value).startswith("with_options_of(") for decorator in func.decorators
        ):
            _show_options(func)
        _rewrite(func, [parameter.name for parameter in func.parameters], "Args")


def _show_options(func: griffe.Function) -> None:
    """Replace `**options` by the options of `EngineConfig`, as `config.with_options_of` does for
    `help()`.
    """
    own = [parameter for parameter in func.parameters if parameter.name != "options"]
    options = [
        griffe.Parameter(
            name,
            annotation=str(spec.type),
            kind=griffe.ParameterKind("keyword-only"),
            default=repr(spec.default),
        )
        for name, spec in OPTIONS.items()
    ]
    func.parameters = griffe.Parameters(*own, *options)
    if func.docstring is not None:
        func.docstring.value = document_options(func.docstring.value)


def _rewrite(owner: griffe.Object, names: Collection[str], section: str) -> None:
    if owner.docstring is not None:
        owner.docstring.value = with_section(owner.docstring.value, names, section)
