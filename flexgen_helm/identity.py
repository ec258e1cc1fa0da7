"""Texts that digests are made of: fingerprints, packed weights, cached answers. Standard library only.

The text of a record has the fields of its first version, by the names that they had then. A field that was added later
is part of the text only if it differs from its default. So neither a rename nor a new field changes a digest, and a
changed value always does.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Identified(Protocol):
    """A record that writes its own text."""

    def identity_text(self) -> str: ...


def text_of(value: object) -> str:
    """Write a value for a digest.

    value: None, a boolean, a number, a string, a tuple of these, or a record with an `identity_text`.
    Raises `TypeError` for anything else, so that no text depends on how a class prints itself.
    """
    if isinstance(value, Identified):
        return value.identity_text()
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no text for digests")


def record_text(record: Any, name: str, first_version: str) -> str:
    """Write a frozen dataclass as `Name(field=value, ...)`.

    record: the dataclass instance.
    name: the class's name in digests.
    first_version: the first version's fields in order, separated by spaces: `field`, or `old_name=field` if the
        field was renamed since.
    """
    names = {}  # in digests -> attribute
    for word in first_version.split():
        old_name, _, field_name = word.partition("=")
        names[old_name] = field_name or old_name
    added = [field for field in fields(record) if field.name not in names.values()]
    for field in added:
        assert field.default is not MISSING, f"{field.name} was added to {name} without a default"
    names |= {field.name: field.name for field in added if getattr(record, field.name) != field.default}
    return f"{name}({', '.join(f'{key}={text_of(getattr(record, attribute))}' for key, attribute in names.items())})"
