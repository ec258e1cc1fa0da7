"""`flexgen-helm bench`: the benchmarks by name, their JSON and a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.cli.engine_options import EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.files import replace_text


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="clients: helm-run with us against HELM's own Hugging Face client. "
            "accuracy: LAMBADA and WikiText-2 beside lm-evaluation-harness. "
            "offload: weights streamed from the disk against memory, and against Accelerate. "
            "ablation: each technique left out, on a simulated gpu. "
            "policy: predicted against measured time, and the chosen policy against a grid. "
            "kernels: unpacking 4 bits, by implementation, and products with packed weights. "
            "formats: what formats of weights and cache cost in accuracy."
        ),
    ],
    engine: EngineOptions,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="Also write the JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    entry: Annotated[
        str | None, typer.Option(help="HELM run entry, without a model; default: the benchmark's.")
    ] = None,
    instances: Annotated[int | None, typer.Option("--instances", "-m", min=1, help="Instances of the entry.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Measurements of each side, in alternation.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke test: few instances, one repeat, no figures.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(help="accuracy: a Python with lm-evaluation-harness; default: $FLEXGEN_HELM_LM_EVAL_PYTHON."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="accuracy: keep the harness's results there, and reuse those of before."),
    ] = None,
) -> None:
    """Run a benchmark: both sides in one invocation, in alternation, medians. Close other programs first."""
    from flexgen_helm.benchmarks import Options, load

    measure = load(name)
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    result = measure(
        Options(
            engine=engine.engine_arguments(),
            entry=entry,
            instances=instances,
            repeats=repeats,
            quick=quick,
            python=python,
            reference=reference,
            tell=say,
        )
    )
    if as_json:
        print_json(result)
    else:
        _print_tables(result)
    if out is not None:
        with writing(out):
            replace_text(out, json.dumps(result, indent=2, allow_nan=False) + "\n")


def _print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A table in a file is read with a wider page than 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 200)
    columns = list(dict.fromkeys(key for row in result["rows"] for key, value in row.items() if _is_plain(value)))
    table = Table(title=result["name"])
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "label" else "right")
    for row in result["rows"]:
        table.add_row(*(_show(row.get(column, "")) for column in columns))
    console.print(table)
    for key, value in result["ratios"].items():
        console.print(f"{key.replace('_', ' ')}: {value:.2f}x", highlight=False)
    for line in result.get("notes", ()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) >= 100 else f"{value:.5g}"
