"""Arguments and flags that several commands have; the engine flags are in `engine_flags`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.completion import complete_model
from flexgen_helm.errors import UsageError


def _refuse_both(context: typer.Context, value: bool) -> bool:
    # click has already stored the flag that came first.
    if value and (context.params.get("as_json") or context.params.get("as_csv")):
        raise UsageError("--json and --csv exclude each other; leave one of them out")
    return value


def require_folder(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a file in a folder that does not exist, before anything is computed."""
    if value is not None and not value.parent.is_dir():
        raise UsageError(f"--{parameter.name} {value}: there is no folder {value.parent}")
    return value


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of the catalog, org--repo of the Hugging Face hub, folder, or .gguf file.",
        autocompletion=complete_model,
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of the hub's repository.")
]
# The parameters of a command must be named `as_json` and `as_csv`.
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead.", callback=_refuse_both)]
CsvFlag = Annotated[bool, typer.Option("--csv", help="Print the table as CSV instead.", callback=_refuse_both)]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE.json", help="Also write the JSON there.", callback=require_folder),
]
SuiteName = Annotated[str, typer.Option("--suite", metavar="NAME", help="Name of the suite, as given to run.")]
OutputPath = Annotated[
    Path, typer.Option("--output-path", "-o", metavar="DIR", help="HELM's output folder, as given to run.")
]
DEFAULT_OUTPUT = Path("benchmark_output")
