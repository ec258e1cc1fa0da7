"""`flexgen-helm quickstart`: a first score, in two precisions, without knowing HELM."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.cli.arguments import DEFAULT_OUTPUT, OutputPath
from flexgen_helm.cli.console import say
from flexgen_helm.cli.report import compare, write_report
from flexgen_helm.cli.run import run_and_show
from flexgen_helm.cli.screen import Screen

SUITE = "quickstart"
_ENTRY = f"simple_mcqa_scored:model=flexgen/{WHEEL_MODEL}"
# All that it has. So few show a difference of 10 points only if many answers change.
QUESTIONS, MARGIN = 79, 10.0


def quickstart(
    instances: Annotated[
        int,
        typer.Option("--instances", "-m", min=1, help=f"Questions; the scenario has {QUESTIONS}."),
    ] = QUESTIONS,
    precisions: Annotated[
        str, typer.Option("--precision", help="Precisions, with commas between.")
    ] = "fp16,4bit",
    output_path: OutputPath = DEFAULT_OUTPUT,
) -> None:
    """Score a small model in FP16 and in 4 bits, and say whether 4 bits are as good.

    It needs no GPU and no data, downloads a model of 93 MB, and takes about a minute. The verdict
    is within 10 percentage points, which so few questions can show.

    Example: flexgen-helm quickstart
    """
    from flexgen_helm.report.pages import COMPARE_FILE, suite_page
    from flexgen_helm.report.suite import read_suite

    say(
        f"Scoring {WHEEL_MODEL}, whose file has 4 bits: fp16 computes its values as published, "
        "4bit rounds them again."
    )
    arguments = ["-r", _ENTRY, "-m", str(instances), "--suite", SUITE, "-o", str(output_path)]
    if code := run_and_show(arguments, {"precision": precisions}):
        raise typer.Exit(code)
    names = [name for name in map(str.strip, precisions.split(",")) if name]
    folder, is_compared = output_path / "runs" / SUITE, len(names) > 1
    with Screen():
        report = read_suite(folder)
        write_report(report, suite_page(report), folder, [COMPARE_FILE] if is_compared else [])
    if is_compared:
        with Screen():
            baseline = "fp16" if "fp16" in names else names[0]
            compare(SUITE, output_path, baseline, margin=MARGIN)
    say(_NEXT)


_NEXT = """
What next:
  flexgen-helm models qwen     # which models there are, and whether they fit
  flexgen-helm entries         # what can be evaluated, and what data it needs
  # how long:
  flexgen-helm plan --model qwen3-8b --prompt-len 512 --gen-len 16 \\
    --num-seqs 1000
  flexgen-helm run -r simple_mcqa_scored:model=flexgen/qwen3-8b \\
    --precision 4bit -m 100 --suite mine"""
