"""The folders of our state and of data, and small JSON files and locks in the state folder."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from flexgen_helm.files import read_object, replace_text
from flexgen_helm.locks import InUseError, locked


def state_dir() -> Path:
    """Folder of all our state (`FLEXGEN_HELM_HOME`, default `~/.cache/flexgen_helm`); it need not
    exist yet.
    """
    named = os.environ.get("FLEXGEN_HELM_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "flexgen_helm"


def data_dir() -> Path | None:
    """Folder of scenario data that is used before the hub (`FLEXGEN_HELM_DATA`), or None if the
    variable is unset.
    """
    named = os.environ.get("FLEXGEN_HELM_DATA")
    return Path(named).expanduser() if named else None


@contextmanager
def state_lock(name: str, timeout: float = math.inf) -> Iterator[None]:
    """Hold a lock of the state folder, as `locked` does; hold none where no file can be made in the
    folder.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(state_dir() / name, timeout))
        except OSError as error:
            if error.errno not in (
                errno.EROFS,
                errno.EACCES,
                errno.EPERM,
                errno.EEXIST,
                errno.ENOTDIR,
            ):
                raise
        yield


def read_state(name: str) -> dict[str, Any]:
    """Read a JSON object in the state folder; {} if it is missing or damaged."""
    with suppress(OSError):
        return read_object(state_dir() / name)
    return {}


def update_state(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON object in the state folder, one process at a time; do nothing if it cannot be
    written.

    For facts that can be found out again: losing them costs time, not correctness.
    """
    file = state_dir() / name
    try:
        with locked(file.with_name(f"{name}.lock"), timeout=10):
            content = read_state(name)
            change(content)
            replace_text(file, json.dumps(content, indent=1, sort_keys=True))
    except (OSError, InUseError):
        pass
