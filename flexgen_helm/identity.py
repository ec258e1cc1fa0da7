"""Texts that digests are made of: fingerprints, packed weights, cached answers. Standard library
only.

The text of a record has the fields of its first version, by the names that they had then. A field
that was added later is part of the text only if it differs from its default. So neither a rename
nor a new field changes a digest, and a changed value always does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar


class Identified:
    """Base of frozen dataclasses that are part of digests.

    Class arguments:
    name: what digests call the class.
    first_version: the first version's fields in order, separated by spaces: `field`, or
        `old_name=field` if the field was renamed since.
    later: likewise those that were added since, in the order of their addition; needed only where a
        field was renamed or moved. All others follow in the record's own order.
    constants: first-version fields that the record has no more -> the value that all its records
        had.
    """

    _name_in_digests: ClassVar[str]
    _first_version: ClassVar[dict[str, str]]  # name in digests -> attribute
    _later: ClassVar[dict[str, str]]
    _constants: ClassVar[Mapping[str, object]]

    def __init_subclass__(
        cls,
        name: str = "",
        first_version: str = "",
        later: str = "",
        constants: Mapping[str, object] | None = None,
    ) -> None:
        if name:  # else a subclass of a record, which keeps the record's
            cls._name_in_digests = name
            cls._first_version, cls._later = _attributes(first_version), _attributes(later)
            cls._constants = constants or {}

    def identity_text(self) -> str:
        """Write the record as `Name(field=value, ...)`."""
        record: Any = self
        defaults = {entry.name: entry.default for entry in fields(record)}
        values = {name: self._constants.get(name) for name in self._first_version}
        values |= {
            name: getattr(self, field)
            for name, field in self._first_version.items()
            if name not in self._constants
        }
        known = {*self._first_version.values(), *self._later.values()}
        for name, field in (
            *self._later.items(),
            *((field, field) for field in defaults if field not in known),
        ):
            assert defaults[field] is not MISSING or field in self._later.values(), (
                f"{field} has no default"
            )
            if getattr(self, field) != defaults[field]:
                values[name] = getattr(self, field)
        inside = ", ".join(f"{name}={text_of(value)}" for name, value in values.items())
        return f"{self._name_in_digests}({inside})"


def _attributes(words: str) -> dict[str, str]:
    """Return {name in digests: attribute} of words such as `field` and `old_name=field`."""
    parts = (word.partition("=") for word in words.split())
    return {old_name: field or old_name for old_name, _, field in parts}


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


@cache
def own_digest(package: str) -> str:
    """Return the SHA-256 digest, in hexadecimal, of the source of a package of flexgen_helm."""
    folder = Path(__file__).parent / package
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(
            f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()
