"""`flexgen-helm clean`: list what is stored and can be made again, and remove what is named."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen_helm.cli.console import output, print_json, print_rows, say
from flexgen_helm.cli.engine_flags import JsonFlag
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import count, size

_DAY_S = 86_400.0


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="What to remove, as it is listed; * stands for any letters."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0, help="Only what was not used for so many days."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this flag nothing is removed.")] = False,
    offload_dir: Annotated[
        Path | None, typer.Option("--offload-dir", metavar="DIR", help="Another offload directory to look into.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List stored weights and answers with their size and last use; remove those that are named, with --yes.

    All of it can be made again: answers by computing, conversions by convert, offloaded weights by the next run. What
    a running process uses is never removed. Nothing else removes it either.

    Example:
      flexgen-helm clean 'offload/*' --older-than 30 --yes
    """
    from flexgen_helm import stored_files
    from flexgen_helm.checkpoint.paths import state_dir

    home = state_dir()
    items = stored_files.stored_items(home, offload_dir)
    if names:
        items = stored_files.select(items, names)
    if older_than is not None:
        items = [item for item in items if item.last_used < time.time() - older_than * _DAY_S]
    if yes and not names and older_than is None:
        raise UsageError("--yes removes what is named; name it as flexgen-helm clean lists it, or give --older-than")
    removed, refusals = [], []
    for item in items if yes else ():
        try:
            stored_files.remove(item, home)
            removed.append(item)
        except FlexgenError as error:
            refusals.append(f"flexgen-helm: {error}")
    if as_json:
        rows = [{**asdict(item), "path": str(item.path), "is_removed": item in removed} for item in items]
        print_json({"home": str(home), "items": rows})
    elif items:
        _show(items, removed)
        total = sum(item.num_bytes for item in removed or items)
        done = "freed" if removed else "in all"
        say(f"{count(len(removed or items), 'item')}, {size(total)} {done}; names are folders and files in {home}")
    else:
        say(f"Nothing of this is stored in {home}.")
    if not yes and (names or older_than is not None) and items:
        refusals.append("Nothing was removed; the same command with --yes removes these.")
    for refusal in refusals:
        say(refusal)
    raise typer.Exit(int(yes and bool(refusals)))


def _show(items: list[Any], removed: list[Any]) -> None:
    """Print one line an item; where room is short, * stands for most of a hash in its name, as it does in [NAME]."""
    rows, width = [], output().width
    for item in items:
        days = int((time.time() - item.last_used) // _DAY_S)
        kind = f"{item.kind} of {item.model}" if item.model else item.kind
        kind += ", removed" if item in removed else ", in use" if item.is_in_use else ""
        name = item.name if width > 140 else re.sub(r"([0-9a-f]{8})[0-9a-f]{24}.*(?=.{8})", r"\1*", item.name)
        rows.append((size(item.num_bytes), f"{count(days, 'day')} ago" if days > 0 else "today", kind, name))
    width = max(width, 11 + max(len(row[-1]) for row in rows))
    print_rows(["size", "last use", "what", "name"], rows, ("last use", "what"), width)
