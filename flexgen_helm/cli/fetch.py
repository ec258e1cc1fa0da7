"""`flexgen-helm fetch`: make a model's weights present and say where they lie."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say


def fetch(
    model: Annotated[str, typer.Argument(help="Catalogue name, org--repo of the hub, folder or .gguf file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub's repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Obtain and verify a model's weights; print the folder or file they are in. A second call is instant."""
    from flexgen_helm.checkpoint.fetch import fetch as obtain

    path = obtain(model, revision, progress=say)
    if as_json:
        print_json({"model": model, "path": str(path)})
    else:
        print(path)
