"""Texts that digests are made of: fingerprints, packed weights, cached answers. Standard library only.

The text of a record is its first version's fields by the names they had then, whatever the code calls them now.
A field that was added later is part of the text only where it differs from its default. So neither a rename nor a new
field changes a digest, and a changed value always does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Identified(Protocol):
    """A record that spells its own text."""

    def identity_text(self) -> str: ...


def text_of(value: object) -> str:
    """Spell a value for a digest.

    Takes None, booleans, numbers, strings, tuples of these, and records with an `identity_text`.
    Raises `TypeError` for anything else, so that no text depends on how a class prints itself.
    """
    if isinstance(value, Identified):
        return value.identity_text()
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no text for digests")


def record_text(record: Any, name: str, first_version: Mapping[str, str]) -> str:
    """Spell a frozen dataclass as `Name(field=value, ...)`.

    record: the dataclass instance.
    name: what the digests call the class.
    first_version: name in digests -> attribute, in the order of the first version.
    """
    spelt = dict(first_version)
    known = set(spelt.values())
    for field in fields(record):
        if field.name in known:
            continue
        assert field.default is not MISSING, f"{field.name} was added to {name} without a default"
        if getattr(record, field.name) != field.default:
            spelt[field.name] = field.name
    inside = ", ".join(f"{key}={text_of(getattr(record, attribute))}" for key, attribute in spelt.items())
    return f"{name}({inside})"


def same_names(names: str) -> dict[str, str]:
    """Map the words of `names` to themselves: fields that digests call as the code does."""
    return {name: name for name in names.split()}
