"""`flexgen-helm report`: what a suite took."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.cli.flags import DEFAULT_OUTPUT, OutputPath, SuiteName

FILE = "flexgen_report"


def report(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of markdown.")] = False,
) -> None:
    """Throughput, padding, time, bytes and predictions of a suite, and its precisions compared. Also written into the
    suite's folder as a page with pictures, as JSON and as markdown.

    Example: flexgen-helm report --suite first
    """
    from flexgen_helm.files import replace_text
    from flexgen_helm.report.suite import read_suite, to_json
    from flexgen_helm.report.suite_view import to_html, to_markdown

    folder = output_path / "runs" / suite
    found = read_suite(folder)
    content, text = to_json(found), to_markdown(found)
    if as_json:
        print_json(content)
    else:
        print(text, end="", flush=True)
    page = folder / f"{FILE}.html"
    for path, written in (
        (folder / f"{FILE}.json", json.dumps(content, indent=2, allow_nan=False) + "\n"),
        (folder / f"{FILE}.md", text),
        (page, to_html(found)),
    ):
        with writing(path):
            replace_text(path, written)
    say(f"The same with pictures: {page}")
