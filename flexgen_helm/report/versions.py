"""Versions that results depend on."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result depends on."""
    installed = {"python": platform.python_version()}
    for package in ("flexgen-helm", "crfm-helm", "torch", "transformers", "tokenizers", "numpy"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
