"""Folders of state and data, what names them, and small JSON files in the state folder."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from flexgen_helm.errors import CheckpointError, FlexgenError, UnprovedModelError
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


# Folders that this command was given, by option; commands and engines add theirs.
GIVEN_FOLDERS: dict[str, Path] = {}
# What helps against an error of the system; against the first four another folder does, too.
_REMEDIES = {
    errno.ENOSPC: "free some room",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EIO: "look at the disk (dmesg)",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close programs with many open files",
    errno.ENOMEM: "free some memory",
    errno.ENOENT: "",
}
_ELSEWHERE = [*_REMEDIES][:4]
# How libraries in Rust and PyTorch say it.
_OS_ERROR = re.compile(r"(?:\(os error |(?:mode|>): [A-Z][\w ]+ \()(\d+)\)")


def system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error that another one came from, such as a full disk; None if that is
    unknown.
    """
    while error is not None:
        code = error.errno if isinstance(error, OSError) else None
        if code is None and (said := _OS_ERROR.search(str(error))):
            code = int(said[1])
        if _REMEDIES.get(code or 0):
            return error if isinstance(error, OSError) else OSError(code, os.strerror(code or 0))
        error = error.__cause__ or error.__context__
    return None


def explain(error: BaseException) -> str:
    """Return an error as a sentence; if a system call failed, it says on which file, and what
    helps.
    """
    if isinstance(error, (CheckpointError, UnprovedModelError)):  # whose advice would not help
        system = system_error(error)
        error = system if system is not None and system.filename else error
    cause = error if isinstance(error, OSError) else error.__cause__
    text = str(error) if isinstance(error, FlexgenError) else f"{type(error).__name__}: {error}"
    text = re.sub(r"\[Errno \d+\] ", "", text)
    if not isinstance(cause, OSError) or not (cause.filename or system_error(cause)):
        return text
    if cause is error:
        text = f"{cause.filename or 'a file'} cannot be used: {cause.strerror}"
    path = Path(str(cause.filename)).absolute()
    folders = {**GIVEN_FOLDERS, "FLEXGEN_HELM_HOME": state_dir()}
    names = [name for name, folder in folders.items() if path.is_relative_to(folder.absolute())]
    another = f"name another folder with {names[0]}" if names and cause.filename else ""
    remedies = [_REMEDIES.get(cause.errno or 0, "")]
    if cause.errno in _ELSEWHERE or cause.errno not in _REMEDIES:
        remedies.append(another)
    remedy = ", or ".join(filter(None, remedies))
    return f"{text}; {remedy}" if remedy and "name another" not in text else text


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
