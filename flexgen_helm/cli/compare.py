"""`flexgen-helm compare`: what precisions cost, over the runs of a suite."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.cli.flags import DEFAULT_OUTPUT, OutputPath, SuiteName

HTML_FILE = "flexgen_compare.html"


def compare(
    suite: SuiteName,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[str, typer.Option(help="The precision that the others are compared with.")] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of markdown.")] = False,
) -> None:
    """Compare FP16 with other precisions of a model over the runs of a suite: differences by instance, 95 % intervals,
    tests. The same as a page with pictures is written into the suite's folder.

    Example: flexgen-helm run --precision fp16,4bit -c runs/quickstart.conf -m 50 --suite first, and then
    flexgen-helm compare --suite first
    """
    from flexgen_helm.files import replace_text
    from flexgen_helm.report.comparison import compare_suite
    from flexgen_helm.report.comparison_view import to_html, to_json, to_markdown

    folder = output_path / "runs" / suite
    found = compare_suite(folder, baseline)
    if as_json:
        print_json(to_json(found, suite, baseline))
    else:
        print(to_markdown(found, suite, baseline), end="", flush=True)
    page = folder / HTML_FILE
    with writing(page):
        replace_text(page, to_html(found, suite, baseline))
    say(f"The same with pictures: {page}")
