"""`flexgen-helm doctor`: is everything here that an evaluation needs, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Also read and verify this model's weights (fetched first where needed).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check installation, plugin, machine and data; each line says what to do. The exit code is 1 if a check failed."""
    from flexgen_helm.cli.checks import run_checks

    checks = run_checks(model)
    failed = any(check.status == "failed" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for title in ("check", "", "found"):
            table.add_column(title, overflow="fold")
        for check in checks:
            found = check.found if check.remedy is None else f"{check.found}\n-> {check.remedy}"
            table.add_row(check.name, Text(check.status, style=_COLOURS[check.status]), Text(found))
        Console().print(table)
    raise typer.Exit(int(failed))
