"""`flexgen-helm report`: throughput, time and bytes of a suite."""

from __future__ import annotations

import json

from flexgen_helm.cli.console import print_csv, print_json, say, write_file
from flexgen_helm.cli.flags import DEFAULT_OUTPUT, CsvFlag, JsonFlag, OutputPath, SuiteName

FILE = "flexgen_report"


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
    if as_json:
        print_json(content)
    elif as_csv:
        print_csv(runs_frame(suite_report.runs))
    else:
        print(page.to_markdown(), end="", flush=True)
    html = folder / f"{FILE}.html"
    for path, text in (
        (folder / f"{FILE}.json", json.dumps(content, indent=2, allow_nan=False) + "\n"),
        (folder / f"{FILE}.md", page.to_markdown()),
        (html, page.to_html()),
    ):
        write_file(path, text)
    say(f"The same with figures: {html}")
