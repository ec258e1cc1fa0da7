"""`flexgen-helm report` and `compare`: throughput, time and bytes of a suite, and what precisions cost in it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.checkpoint.names import PREFIX
from flexgen_helm.cli.console import output, print_csv, print_json, say, write_file, write_json
from flexgen_helm.cli.engine_flags import DEFAULT_OUTPUT, CsvFlag, JsonFlag, OutputPath, SuiteName
from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.report.pages import Page
    from flexgen_helm.report.suite import SuiteReport


def report(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Report a suite's scores, throughput, time, memory and predictions, and compare its precisions.

    The suite's folder also gets the report as a page, as JSON and as markdown.

    Example: flexgen-helm report --suite first
    """
    from flexgen_helm.report.pages import suite_page
    from flexgen_helm.report.suite import read_suite, suite_to_json
    from flexgen_helm.report.tables import runs_frame

    folder = output_path / "runs" / suite
    suite_report = read_suite(folder)
    page = suite_page(suite_report)
    if as_json:
        print_json(suite_to_json(suite_report))
    elif as_csv:
        print_csv(runs_frame(suite_report.runs))
    else:
        print_page(page)
    write_report(suite_report, page, folder)


def compare(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[str, typer.Option(help="The precision, or model, that the others are compared with.")] = "fp16",
    margin: Annotated[
        float,
        typer.Option(
            help="Differences within it count as equal: percentage points of shares, percent of perplexities."
        ),
    ] = 1.0,
    flips: Annotated[
        Path | None,
        typer.Option(help="Write every instance whose answer changed into this file, as JSON lines.", metavar="FILE"),
    ] = None,
    divergence: Annotated[
        Path | None,
        typer.Option(
            help="Show KL divergences beside it: a file that flexgen-helm divergence --json printed.",
            metavar="FILE.json",
        ),
    ] = None,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Compare FP16 with other precisions of a model: verdicts, flips, costs, differences by instance, 95 % intervals.

    With a model as --baseline, such as the original of a GGUF file, all models of the suite are compared with it.

    Stdout gets a table, as markdown if it is no terminal; the suite's folder gets the comparison as a page.

    Example:
      flexgen-helm run -c runs/quickstart.conf -m 50 --suite first \\
        --precision fp16,4bit
      flexgen-helm compare --suite first
    """
    from flexgen_helm.report.comparison import compare_suite, flip_groups, read_divergence
    from flexgen_helm.report.pages import COMPARE_FILE, comparison_page
    from flexgen_helm.report.scores import finite
    from flexgen_helm.report.tables import comparison_to_json, comparisons_frame

    fraction = check_margin(margin)
    folder = output_path / "runs" / suite
    baseline = baseline.removeprefix(PREFIX).replace("/", "--")
    models = compare_suite(folder, baseline, fraction)
    if divergence is not None:
        models = read_divergence(divergence, models, suite)
    page = comparison_page(models, suite)
    if flips is not None:
        every = [flip for group in flip_groups(models) for flip in group.flips]
        write_file(flips, "".join(f"{json.dumps(finite(asdict(flip)), ensure_ascii=False)}\n" for flip in every))
    if as_json:
        print_json(comparison_to_json(models, suite))
    elif as_csv:
        print_csv(comparisons_frame(models))
    elif sys.stdout.isatty():
        print_page(page)
    else:
        print(page.to_markdown(), end="", flush=True)
    _write_page(page, folder / COMPARE_FILE)


def check_margin(points: float) -> float:
    """Return the margin as a fraction."""
    if not 0 < points < 50:
        raise UsageError(f"--margin {points:g} is not between 0 and 50 percentage points")
    return points / 100


def write_report(suite_report: SuiteReport, page: Page, folder: Path) -> None:
    """Write a suite's report into its folder, as page, JSON and markdown; and its comparison as a page, if any."""
    from flexgen_helm.report.pages import COMPARE_FILE, REPORT_FILE, comparison_page
    from flexgen_helm.report.suite import suite_to_json

    html = folder / REPORT_FILE
    write_json(html.with_suffix(".json"), suite_to_json(suite_report))
    write_file(html.with_suffix(".md"), page.to_markdown())
    if suite_report.compared:
        comparison = comparison_page(suite_report.compared, suite_report.suite)
        write_file(folder / COMPARE_FILE, comparison.to_html(folder, beside=[REPORT_FILE]))
    _write_page(page, html)


def print_page(page: Page) -> None:
    """Print a page as text of at most 100 columns."""
    from flexgen_helm.report.pages import TEXT_WIDTH

    print(page.to_text(min(output().width, TEXT_WIDTH)), end="", flush=True)


def _write_page(page: Page, path: Path) -> None:
    write_file(path, page.to_html(path.parent))
    say(f"As a page: {path}")
