"""How commands that read a finished suite are told which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SuiteName = Annotated[str, typer.Option("--suite", help="Name of the suite, as given to run.")]
OutputPath = Annotated[
    Path, typer.Option("--output-path", "-o", metavar="DIR", help="HELM's output folder, as given to run.")
]
DEFAULT_OUTPUT = Path("benchmark_output")
