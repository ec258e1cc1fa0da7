"""Errors of the operating system in sentences that say what helps."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from flexgen_helm.errors import CheckpointError, FlexgenError, UnprovedModelError
from flexgen_helm.paths import state_dir

# Option -> folder that it gave this process; commands and engines add theirs.
GIVEN_FOLDERS: dict[str, Path] = {}
# What helps against an error of the system; of a missing file nothing can be said.
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
# Errors of a disk, against which another folder helps, too; it may help against unknown ones.
_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# How libraries say it: Rust "… (os error 28)", PyTorch "… in mode: No space left on device (28)".
_OS_ERROR = re.compile(r"(?:\(os error |(?:mode|>): [A-Z][\w ]+ \()(\d+)\)")


def system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error that an error came from, such as a full disk, if it is known."""
    while error is not None:
        code = error.errno if isinstance(error, OSError) else None
        if code is None and (in_text := _OS_ERROR.search(str(error))):
            code = int(in_text[1])
        if _REMEDIES.get(code or 0):
            if isinstance(error, OSError) and error.errno is not None:
                return error
            return OSError(code, os.strerror(code or 0))
        error = error.__cause__ or error.__context__
    return None


def explain(error: BaseException) -> str:
    """Return an error as a sentence; of a failed system call with the file, and what helps."""
    # Behind these may be a failed system call, against which their own advice would not help.
    if isinstance(error, (CheckpointError, UnprovedModelError)):
        system = system_error(error)
        error = system if system is not None and system.filename else error
    cause = error if isinstance(error, OSError) else error.__cause__
    text = str(error) if isinstance(error, FlexgenError) else f"{type(error).__name__}: {error}"
    text = re.sub(r"\[Errno \d+\] ", "", text)
    if not isinstance(cause, OSError):
        return text
    if (known := system_error(cause)) is None and not cause.filename:
        return text
    # One of a library in Rust has its number in its text alone.
    failed = known if known is not None and cause.errno is None else cause
    if cause is error:
        text = f"{cause.filename or 'a file'} cannot be used: {failed.strerror}"
    path = Path(str(cause.filename)).absolute()
    folders = {**GIVEN_FOLDERS, "FLEXGEN_HELM_HOME": state_dir()}
    names = [name for name, folder in folders.items() if path.is_relative_to(folder.absolute())]
    another = f"name another folder with {names[0]}" if names and cause.filename else ""
    remedies = [_REMEDIES.get(failed.errno or 0, "")]
    if failed.errno in _OF_A_DISK or failed.errno not in _REMEDIES:
        remedies.append(another)
    remedy = ", or ".join(filter(None, remedies))
    return f"{text}; {remedy}" if remedy and "name another" not in text else text
