"""`flexgen-helm report` and `compare`: throughput, time and bytes of a suite, and what precisions cost in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.console import print_csv, print_json, say, write_file, write_json
from flexgen_helm.cli.flags import DEFAULT_OUTPUT, CsvFlag, JsonFlag, OutputPath, SuiteName

if TYPE_CHECKING:
    import pandas

    from flexgen_helm.report.pages import Page


def report(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Report throughput, padding, time, bytes and predictions of a suite, and compare its precisions. The suite's
    folder also gets the report as a page with figures, as JSON and as markdown.

    Example: flexgen-helm report --suite first
    """
    from flexgen_helm.report.pages import suite_page
    from flexgen_helm.report.suite import read_suite, suite_to_json
    from flexgen_helm.report.tables import runs_frame

    folder = output_path / "runs" / suite
    suite_report = read_suite(folder)
    content, page = suite_to_json(suite_report), suite_page(suite_report)
    _print(page, content, runs_frame(suite_report.runs), as_json, as_csv)
    html = folder / "flexgen_report.html"
    write_json(html.with_suffix(".json"), content)
    write_file(html.with_suffix(".md"), page.to_markdown())
    write_file(html, page.to_html())
    say(f"The same with figures: {html}")


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
    _print(page, comparison_to_json(models, suite, baseline), comparisons_frame(models), as_json, as_csv)
    html = folder / "flexgen_compare.html"
    write_file(html, page.to_html())
    say(f"The same with figures: {html}")


def _print(page: Page, content: Any, frame: pandas.DataFrame, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(content)
    elif as_csv:
        print_csv(frame)
    else:
        print(page.to_markdown(), end="", flush=True)
