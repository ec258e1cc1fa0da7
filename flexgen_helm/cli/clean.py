"""`flexgen-helm clean`: list what is stored and can be made again, and remove what is named."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import psutil
import typer

from flexgen_helm.cli.arguments import JsonFlag
from flexgen_helm.cli.console import output, print_json, print_rows, say
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.locks import InUseError, locked
from flexgen_helm.paths import state_dir
from flexgen_helm.units import count, size

_DAY_S = 86_400.0
# Folders whose names begin with a point are what an ended conversion or removal has left.
_STORED = (
    "journal/*.sqlite", "converted/*/*", "models/[!.]*", "offload/weights-*", "offload/run-*",
    "offload/logits-*", "offload/hidden-*", "*/.*.removed",
)  # fmt: skip


@dataclass
class StoredItem:
    """A folder or file that can be removed as a whole.

    name: path below the state folder.
    last_used: seconds since 1970, as far as the file system notes it.
    """

    name: str
    path: Path
    num_bytes: int
    last_used: float
    is_in_use: bool
    is_removed: bool = False


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="What to remove, as it is listed; * stands for any letters."
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", metavar="DAYS", min=0, help="Only what was not used for so many days."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove it. Without this flag nothing is removed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List stored weights and answers with their size and last use; remove those that are named,
    with --yes.

    All of it can be made again: answers by computing, conversions by convert, offloaded weights by
    the next run. What a process of this machine uses is never removed. Nothing else removes it
    either.

    Example:
      flexgen-helm clean 'offload/*' --older-than 30 --yes
    """
    if yes and not names and older_than is None:
        raise UsageError(
            "--yes removes what is named; name it as flexgen-helm clean lists it, or give "
            "--older-than"
        )
    home = state_dir()
    items = _chosen(stored_items(home), names or (), older_than)
    for item in items if yes else ():
        remove(item)
    if as_json:
        rows = [{**asdict(item), "path": str(item.path)} for item in items]
        print_json({"home": str(home), "items": rows})
    else:
        cells = [
            (
                size(item.num_bytes),
                _age(item),
                "removed" if item.is_removed else "in use" if item.is_in_use else "",
                item.name,
            )
            for item in items
        ]
        width = max([output().width, *(44 + len(item.name) for item in items)])  # names are copied
        print_rows(["size", "last use", "state", "name"], cells, width=width)
        total = size(sum(item.num_bytes for item in items))
        say(f"{count(len(items), 'item')}, {total}; names are paths in {home}")
    if items and not yes and (names or older_than is not None):
        say("Nothing was removed; the same command with --yes removes these.")
    raise typer.Exit(int(yes and not all(item.is_removed for item in items)))


def _chosen(
    items: Iterable[StoredItem], patterns: Sequence[str], older_than: float | None
) -> list[StoredItem]:
    """Return the named items, the largest first. Raises `UsageError` for a name of none."""
    chosen = sorted(items, key=lambda item: (-item.num_bytes, item.name))
    for pattern in patterns:
        if not any(fnmatchcase(item.name, pattern) for item in chosen):
            raise UsageError(
                f"nothing is stored under the name {pattern}; flexgen-helm clean lists what there "
                "is"
            )
    if patterns:
        chosen = [item for item in chosen if any(fnmatchcase(item.name, p) for p in patterns)]
    latest = math.inf if older_than is None else time.time() - older_than * _DAY_S
    return [item for item in chosen if item.last_used < latest]


def stored_items(home: Path) -> Iterator[StoredItem]:
    """Yield what can be removed."""
    open_files: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # what may not be seen
            open_files |= {file.path for file in process.open_files()}
    found = [path for pattern in _STORED for path in home.glob(pattern)]
    for path in found:
        if path.is_symlink() or path.suffix == ".lock":
            continue
        statuses = []
        with ExitStack() as stack:
            is_in_use = not _lock(stack, path)
        for file in (path, *path.rglob("*")):
            with suppress(OSError):  # it goes away meanwhile
                statuses += [file.stat()] if file.is_file() else []
        yield StoredItem(
            name=str(path.relative_to(home)),
            path=path,
            num_bytes=sum(status.st_blocks * 512 for status in statuses),
            last_used=max(
                (max(status.st_atime, status.st_mtime) for status in statuses), default=0.0
            ),
            is_in_use=is_in_use or any(f"{file}/".startswith(f"{path}/") for file in open_files),
        )


def _lock(stack: ExitStack, path: Path) -> bool:
    """Hold the locks of what is stored at a path until the stack is closed; False where a process
    has one of them.

    They are files beside `path`: of engines, downloads and conversions.
    """
    target = path.with_name(path.name.removeprefix(".").removesuffix(".partial"))
    locks = [path.with_suffix(".lock"), target.with_name(f".{target.name}.lock")]
    if path.name.startswith("weights-"):
        locks += [path.parent / ".lock", *path.parent.glob("run-*.lock")]
    try:
        for lock in filter(Path.exists, locks):
            stack.enter_context(locked(lock, timeout=0))
    except (OSError, InUseError):
        return False
    return True


def remove(item: StoredItem) -> None:
    """Remove an item that no process uses. Raises `FlexgenError` if it cannot be removed."""
    with ExitStack() as stack:
        if item.is_in_use or not _lock(stack, item.path):
            return
        try:
            if item.path.is_dir():  # renamed first: what is half removed is never taken for whole
                doomed = item.path.with_name(f".{item.path.name}.removed")
                shutil.rmtree(doomed, ignore_errors=True)
                os.rename(item.path, doomed)
                shutil.rmtree(doomed)
            else:
                item.path.unlink()
        except OSError as error:
            raise FlexgenError(f"{item.path} cannot be removed: {error.strerror}") from error
    item.is_removed = True


def _age(item: StoredItem) -> str:
    days = int((time.time() - item.last_used) // _DAY_S)
    return f"{count(days, 'day')} ago" if days > 0 else "today"
