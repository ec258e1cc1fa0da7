"""`flexgen-helm doctor`: check whether everything is here that an evaluation needs, and say what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import print_json, print_rows
from flexgen_helm.cli.flags import JsonFlag


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Also check this model's weights, which are fetched first if needed.",
            autocompletion=complete_model,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether this machine has all that an evaluation needs.

    Each line says what was found, and what to do if it is not enough. The exit code is 1 if a check failed.
    """
    from flexgen_helm.cli.checks import run_checks

    findings = run_checks(model)
    failed = any(finding.status == "failed" for finding in findings.values())
    if as_json:
        print_json(
            {"ok": not failed, "checks": [{"name": name, **asdict(finding)} for name, finding in findings.items()]}
        )
    else:
        rows = [
            (name, finding.status, "\n-> ".join(filter(None, (finding.found, finding.remedy))))
            for name, finding in findings.items()
        ]
        print_rows(["check", "", "found"], rows)  # not `print_table`: pandas may be what is broken
    raise typer.Exit(int(failed))
