"""Where state and data live; both places are named by the environment."""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """Folder of everything we keep (`FLEXGEN_HELM_HOME`, default `~/.cache/flexgen_helm`); it need not exist yet."""
    named = os.environ.get("FLEXGEN_HELM_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "flexgen_helm"


def data_dir() -> Path | None:
    """Folder of scenario data that is used before the hub (`FLEXGEN_HELM_DATA`), or None where none is named."""
    named = os.environ.get("FLEXGEN_HELM_DATA")
    return Path(named).expanduser() if named else None
