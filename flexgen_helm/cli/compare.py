"""`flexgen-helm compare`: what precisions cost, over the runs of a suite."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.cli.suite_options import DEFAULT_OUTPUT, OutputPath, SuiteName

HTML_FILE = "flexgen_compare.html"


def compare(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[str, typer.Option(help="The precision that the others are compared with.")] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of markdown.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of markdown.")] = False,
) -> None:
    """Compare FP16 with other precisions of a model over the runs of a suite: differences by instance, 95 % intervals,
    tests. The suite's folder also gets the comparison as a page with figures.

    Example: flexgen-helm run --precision fp16,4bit -c runs/quickstart.conf -m 50 --suite first, and then
    flexgen-helm compare --suite first
    """
    from flexgen_helm.files import replace_text
    from flexgen_helm.report.comparison import compare_suite, comparison_to_json
    from flexgen_helm.report.pages import comparison_page
    from flexgen_helm.report.tables import comparisons_frame

    folder = output_path / "runs" / suite
    models = compare_suite(folder, baseline)
    page = comparison_page(models, suite, baseline)
    if as_json:
        print_json(comparison_to_json(models, suite, baseline))
    elif as_csv:
        print(comparisons_frame(models).to_csv(index=False), end="", flush=True)
    else:
        print(page.to_markdown(), end="", flush=True)
    html = folder / HTML_FILE
    with writing(html):
        replace_text(html, page.to_html())
    say(f"The same with figures: {html}")
