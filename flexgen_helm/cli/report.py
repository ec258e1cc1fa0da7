"""`flexgen-helm report` and `compare`: throughput, time and bytes of a suite, and what precisions cost in it."""

from __future__ import annotations

import shutil
from pathlib import Path
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
    folder also gets the report as a page, as JSON and as markdown.

    Example: flexgen-helm report --suite first
    """
    from flexgen_helm.report.pages import REPORT_FILE, suite_page
    from flexgen_helm.report.suite import read_suite, suite_to_json
    from flexgen_helm.report.tables import runs_frame

    folder = output_path / "runs" / suite
    suite_report = read_suite(folder)
    content, page = suite_to_json(suite_report), suite_page(suite_report)
    _print(page, content, runs_frame(suite_report.runs), as_json, as_csv)
    html = folder / REPORT_FILE
    write_json(html.with_suffix(".json"), content)
    write_file(html.with_suffix(".md"), page.to_markdown())
    _write_page(page, html)


def compare(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[str, typer.Option(help="The precision that the others are compared with.")] = "fp16",
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Compare FP16 with other precisions of a model over the runs of a suite: differences by instance, 95 % intervals,
    tests. The suite's folder also gets the comparison as a page.

    Example: flexgen-helm run --precision fp16,4bit -c runs/quickstart.conf -m 50 --suite first, and then
    flexgen-helm compare --suite first
    """
    from flexgen_helm.report.comparison import compare_runs, comparison_to_json
    from flexgen_helm.report.pages import COMPARE_FILE, comparison_page
    from flexgen_helm.report.scores import read_finished_runs
    from flexgen_helm.report.tables import comparisons_frame

    folder = output_path / "runs" / suite
    runs = read_finished_runs(folder)
    models = compare_runs(runs, folder, baseline)
    page = comparison_page(models, suite, baseline, runs)
    _print(page, comparison_to_json(models, suite, baseline), comparisons_frame(models), as_json, as_csv)
    _write_page(page, folder / COMPARE_FILE)


def _print(page: Page, content: Any, frame: pandas.DataFrame, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(content)
    elif as_csv:
        print_csv(frame)
    else:
        from flexgen_helm.report.pages import TEXT_WIDTH

        columns = shutil.get_terminal_size((TEXT_WIDTH, 24)).columns
        print(page.to_text(min(columns, TEXT_WIDTH)), end="", flush=True)


def _write_page(page: Page, path: Path) -> None:
    write_file(path, page.to_html(path.parent))
    say(f"The same as a page: {path}")
