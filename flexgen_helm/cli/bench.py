"""`flexgen-helm bench`: the benchmarks by name, their JSON and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen_helm.cli.console import output, print_csv, print_json, print_table, say, write_json
from flexgen_helm.cli.engine_flags import CsvFlag, JsonFlag, OutFile, check_engine_flags, complete_benchmark
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import UsageError

# Options that only one benchmark has.
_BENCHMARK_OF = {
    "tasks": "clients", "peers": "clients", "chat": "clients", "python": "accuracy", "reference": "accuracy",
    "table": "paper", "measure": "paper", "prompt_len": "paper", "gen_len": "paper",
}  # fmt: skip


def bench(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="One of those above.", autocompletion=complete_benchmark),
    ],
    engine: EngineOptions,
    out: OutFile = None,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
    entry: Annotated[
        str | None, typer.Option(metavar="ENTRY", help="HELM run entry, without a model. Default: the benchmark's.")
    ] = None,
    instances: Annotated[
        int | None, typer.Option("--instances", "-m", min=1, metavar="N", help="Instances of the entry.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measurements of each side, in alternation.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only try it out: few instances, one repeat. The figures mean nothing.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="clients: put prompts through the model's chat template, in both clients.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="accuracy: a Python with lm-evaluation-harness. Default: what FLEXGEN_HELM_LM_EVAL_PYTHON names.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="accuracy: keep the harness's results there, and reuse them."),
    ] = None,
    table: Annotated[str | None, typer.Option(metavar="TABLE", help="paper: one of its tables.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="paper: measure its tables on this machine. It says how long that takes.")
    ] = False,
    prompt_len: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="paper: of each prompt in the table of throughputs.")
    ] = None,
    gen_len: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="paper: new tokens in the table of throughputs.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="clients: these tasks, with commas. What is in --out stays, and is added to."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="clients: against these (huggingface, llama.cpp). --out is added to as well."
        ),
    ] = None,
) -> None:
    """Run a benchmark of flexgen_helm itself. Close other programs first.

    All sides of a comparison are measured in one call, in alternation. The table shows medians.

    Benchmarks:
      clients   whole runs with our client, and with HELM's own
      accuracy  LAMBADA and WikiText-2, beside lm-evaluation-harness
      offload   weights streamed from the disk, against memory and Accelerate
      ablation  each technique left out, on a simulated GPU
      gpu       a GPU's links and products, and large models in 16 GB of it
      policy    predicted against measured time, and other policies
      kernels   unpacking 4 bits, and products with packed weights
      paper     tables of the FlexGen paper, predicted for its T4 and measured
    """
    check_engine_flags(engine)
    if folder := engine.get("offload_dir"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    from flexgen_helm.benchmarks import KNOWN, Options, load

    given: dict[str, Any] = {
        "tasks": _names("tasks", tasks),
        "peers": _names("peers", peers),
        "chat": chat,
        "python": python,
        "reference": reference,
        "table": table,
        "measure": measure,
        "prompt_len": prompt_len,
        "gen_len": gen_len,
    }
    for option, value in given.items():
        if value and name in KNOWN and name != _BENCHMARK_OF[option]:
            flag = f"--{option.replace('_', '-')}"
            raise UsageError(f"bench {name} has no {flag}, which is of bench {_BENCHMARK_OF[option]}")
    earlier = _result_in(out) if given["tasks"] or given["peers"] else None
    options = Options(engine, entry, instances, repeats, quick, **given, earlier=earlier, tell=say)
    result = load(name)(options)
    # The table leaves out what is no plain value, such as the seconds of each repetition.
    rows = [
        {name: value for name, value in row.items() if isinstance(value, (str, int, float))} for row in result["rows"]
    ]
    if as_json:
        print_json(result)
    elif as_csv:
        import pandas

        print_csv(pandas.DataFrame(rows))
    else:
        console = output()
        console.print(result["name"])
        print_table(rows)
        for key, value in result["ratios"].items():
            console.print(f"{key.replace('_', ' ')}: {value:.2f}x")
        for line in result.get("notes", ()):
            console.print(line, soft_wrap=True)
    if out is not None:
        write_json(out, result)


def _names(flag: str, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"--{flag} {text!r}: an empty name; write them as a,b")
    return names


def _result_in(file: Path | None) -> dict[str, Any] | None:
    """Return the result in a file; None if there is no file. Raises `UsageError` for other content."""
    if file is None or not file.exists():
        return None
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {file} cannot be added to: {error}") from error
    if not isinstance(result, dict):
        raise UsageError(f"--out {file} cannot be added to: it has no result of a benchmark")
    return result
