"""`flexgen-helm compare`: what precisions cost, over the runs of a suite."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import print_csv, print_json, say, write_file
from flexgen_helm.cli.flags import DEFAULT_OUTPUT, CsvFlag, JsonFlag, OutputPath, SuiteName

HTML_FILE = "flexgen_compare.html"


def compare(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[str, typer.Option(help="The precision that the others are compared with.")] = "fp16",
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Compare FP16 with other precisions of a model over the runs of a suite: differences by instance, 95 % intervals,
    tests. The suite's folder also gets the comparison as a page with figures.

    Example: flexgen-helm run --precision fp16,4bit -c runs/quickstart.conf -m 50 --suite first, and then
    flexgen-helm compare --suite first
    """
    from flexgen_helm.report.comparison import compare_suite, comparison_to_json
    from flexgen_helm.report.pages import comparison_page
    from flexgen_helm.report.tables import comparisons_frame

    folder = output_path / "runs" / suite
    models = compare_suite(folder, baseline)
    page = comparison_page(models, suite, baseline)
    if as_json:
        print_json(comparison_to_json(models, suite, baseline))
    elif as_csv:
        print_csv(comparisons_frame(models))
    else:
        print(page.to_markdown(), end="", flush=True)
    html = folder / HTML_FILE
    write_file(html, page.to_html())
    say(f"The same with figures: {html}")
