"""`--json` and `--csv`, the same on every command that prints data."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.errors import UsageError


def _refuse_both(context: typer.Context, value: bool) -> bool:
    """Raise `UsageError` if the other flag was given too; click has already stored the one that came first."""
    if value and (context.params.get("as_json") or context.params.get("as_csv")):
        raise UsageError("--json and --csv exclude each other; leave one of them out")
    return value


# The parameters of a command must be named `as_json` and `as_csv`.
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.", callback=_refuse_both)]
CsvFlag = Annotated[bool, typer.Option("--csv", help="Print the table as CSV.", callback=_refuse_both)]
