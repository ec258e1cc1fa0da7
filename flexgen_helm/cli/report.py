"""`flexgen-helm report` and `compare`: throughput, time and bytes of a suite, and what precisions
cost in it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.cli.arguments import DEFAULT_OUTPUT, JsonFlag, OutputPath, SuiteName
from flexgen_helm.cli.console import output, print_json, say, write_file, write_json
from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.report.pages import Page
    from flexgen_helm.report.suite import SuiteReport


def report(
    suite: SuiteName, output_path: OutputPath = DEFAULT_OUTPUT, as_json: JsonFlag = False
) -> None:
    """Report a suite's scores, throughput, time, memory and predictions.

    The suite's folder also gets the report as a page and as JSON.

    Example: flexgen-helm report --suite first
    """
    from flexgen_helm.report.pages import suite_page
    from flexgen_helm.report.suite import read_suite, suite_to_json

    folder = output_path / "runs" / suite
    suite_report = read_suite(folder)
    page = suite_page(suite_report)
    if as_json:
        print_json(suite_to_json(suite_report))
    else:
        print_page(page)
    write_report(suite_report, page, folder)


def compare(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[
        str, typer.Option(help="The precision, or model, that the others are compared with.")
    ] = "fp16",
    margin: Annotated[
        float,
        typer.Option(
            help="Differences within it count as equal: percentage points of shares, percent of "
            "perplexities."
        ),
    ] = 1.0,
    flips: Annotated[
        Path | None,
        typer.Option(
            help="Write every instance whose answer changed into this file, as JSON lines.",
            metavar="FILE",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare FP16 with other precisions of a model: verdicts, flips, costs, differences by
    instance, 95 % intervals.

    With a model as --baseline, such as the original of a GGUF file, all models of the suite are
    compared with it.

    The suite's folder gets the comparison as a page.

    Example:
      flexgen-helm run -c runs/quickstart.conf -m 50 --suite first \\
        --precision fp16,4bit
      flexgen-helm compare --suite first
    """
    from flexgen_helm.report.comparison import compare_suite
    from flexgen_helm.report.comparison_tables import comparison_to_json
    from flexgen_helm.report.flips import flip_groups
    from flexgen_helm.report.pages import COMPARE_FILE, comparison_page
    from flexgen_helm.report.scores import finite

    fraction = check_margin(margin)
    folder = output_path / "runs" / suite
    baseline = baseline.removeprefix(PREFIX).replace("/", "--")
    models = compare_suite(folder, baseline, fraction)
    page = comparison_page(models, suite)
    if flips is not None:
        every = [flip for group in flip_groups(models) for flip in group.flips]
        write_file(
            flips,
            "".join(f"{json.dumps(finite(asdict(flip)), ensure_ascii=False)}\n" for flip in every),
        )
    if as_json:
        print_json(comparison_to_json(models, suite))
    else:
        print_page(page)
    _write_page(page, folder / COMPARE_FILE)


def check_margin(points: float) -> float:
    """Return the margin as a fraction."""
    if not 0 < points < 50:
        raise UsageError(f"--margin {points:g} is not between 0 and 50 percentage points")
    return points / 100


def write_report(
    suite_report: SuiteReport, page: Page, folder: Path, beside: Collection[str] = ()
) -> None:
    """Write a suite's report into its folder, as page and JSON.

    beside: pages that will be written there too, so that this one links to them.
    """
    from flexgen_helm.report.pages import REPORT_FILE
    from flexgen_helm.report.suite import suite_to_json

    html = folder / REPORT_FILE
    write_json(html.with_suffix(".json"), suite_to_json(suite_report))
    _write_page(page, html, beside)


def print_page(page: Page) -> None:
    """Print a page as text of at most 100 columns."""
    from flexgen_helm.report.pages import TEXT_WIDTH

    print(page.to_text(min(output().width, TEXT_WIDTH)), end="", flush=True)


def _write_page(page: Page, path: Path, beside: Collection[str] = ()) -> None:
    write_file(path, page.to_html(path.parent, beside=beside))
    say(f"As a page: {path}")
