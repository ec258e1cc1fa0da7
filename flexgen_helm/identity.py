"""Texts that digests are made of: fingerprints, packed weights, cached answers. Standard library only.

The text of a record has the fields of its first version, by the names that they had then. A field that was added later
is part of the text only if it differs from its default. So neither a rename nor a new field changes a digest, and a
changed value always does.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, ClassVar


class Identified:
    """Base of frozen dataclasses that are part of digests.

    Class arguments:
    name: what digests call the class.
    first_version: the first version's fields in order, separated by spaces: `field`, or `old_name=field` if the field
        was renamed since.
    """

    _name_in_digests: ClassVar[str]
    _first_version: ClassVar[dict[str, str]]  # name in digests -> attribute

    def __init_subclass__(cls, name: str = "", first_version: str = "") -> None:
        if name:  # else a subclass of a record, which keeps the record's
            cls._name_in_digests = name
            words = (word.partition("=") for word in first_version.split())
            cls._first_version = {old_name: field or old_name for old_name, _, field in words}

    def identity_text(self) -> str:
        """Write the record as `Name(field=value, ...)`."""
        names = dict(self._first_version)
        record: Any = self
        for field in fields(record):
            if field.name not in self._first_version.values():
                assert field.default is not MISSING, f"{field.name} was added without a default"
                if getattr(self, field.name) != field.default:
                    names[field.name] = field.name
        inside = ", ".join(f"{name}={text_of(getattr(self, attribute))}" for name, attribute in names.items())
        return f"{self._name_in_digests}({inside})"


def text_of(value: object) -> str:
    """Write a value for a digest.

    value: None, a boolean, a number, a string, an `Identified` record, or a tuple of these.
    Raises `TypeError` for anything else, so that no text depends on how a class prints itself.
    """
    if isinstance(value, Identified):
        return value.identity_text()
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no text for digests")
