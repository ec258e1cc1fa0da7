"""`flexgen-helm bench`: the benchmarks by name, their JSON and a table."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import output, print_csv, print_json, print_table, say, write_json
from flexgen_helm.cli.flags import CsvFlag, JsonFlag, OutFile
from flexgen_helm.config import EngineOptions


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="clients: helm-run with flexgen_helm against HELM's own Hugging Face client. "
            "accuracy: LAMBADA and WikiText-2 beside lm-evaluation-harness. "
            "offload: weights streamed from the disk against memory, and against Accelerate. "
            "ablation: each technique left out, on a simulated gpu. "
            "policy: predicted against measured time, and the chosen policy against a grid. "
            "kernels: unpacking 4 bits, by implementation, and products with packed weights. "
            "formats: what formats of weights and cache cost in accuracy."
        ),
    ],
    engine: EngineOptions,
    out: OutFile = None,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
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
    import pandas

    from flexgen_helm.benchmarks import Options, load

    options = Options(engine, entry, instances, repeats, quick, python, reference, tell=say)
    result = load(name)(options)
    # The table leaves out what is no plain value, such as the seconds of each repetition.
    rows = [
        {name: value for name, value in row.items() if isinstance(value, (str, int, float))} for row in result["rows"]
    ]
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv(pandas.DataFrame(rows))
    else:
        print_table(pandas.DataFrame(rows), title=result["name"])
        console = output()
        for key, value in result["ratios"].items():
            console.print(f"{key.replace('_', ' ')}: {value:.2f}x")
        for line in result.get("notes", ()):
            console.print(line, soft_wrap=True)
    if out is not None:
        write_json(out, result)
