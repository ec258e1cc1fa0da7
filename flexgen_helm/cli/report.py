"""`flexgen-helm report`: throughput, time and bytes of a suite."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.cli.suite_options import DEFAULT_OUTPUT, OutputPath, SuiteName

FILE = "flexgen_report"


def report(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of markdown.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="The runs as CSV instead of markdown.")] = False,
) -> None:
    """Report throughput, padding, time, bytes and predictions of a suite, and compare its precisions. The suite's
    folder also gets the report as a page with figures, as JSON and as markdown.

    Example: flexgen-helm report --suite first
    """
    from flexgen_helm.files import replace_text
    from flexgen_helm.report.pages import suite_page
    from flexgen_helm.report.suite import read_suite, suite_to_json
    from flexgen_helm.report.tables import runs_frame

    folder = output_path / "runs" / suite
    suite_report = read_suite(folder)
    content, page = suite_to_json(suite_report), suite_page(suite_report)
    if as_json:
        print_json(content)
    elif as_csv:
        print(runs_frame(suite_report.runs).to_csv(index=False), end="", flush=True)
    else:
        print(page.to_markdown(), end="", flush=True)
    html = folder / f"{FILE}.html"
    for path, text in (
        (folder / f"{FILE}.json", json.dumps(content, indent=2, allow_nan=False) + "\n"),
        (folder / f"{FILE}.md", page.to_markdown()),
        (html, page.to_html()),
    ):
        with writing(path):
            replace_text(path, text)
    say(f"The same with figures: {html}")
