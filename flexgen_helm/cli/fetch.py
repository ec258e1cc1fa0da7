"""`flexgen-helm fetch`: make a model's weights present and say where they lie."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say


def fetch(
    model: Annotated[str, typer.Argument(help="Catalogue name, org--repo of the hub, folder or .gguf file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub's repository.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all weights again and compare them with every hash that is known.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Obtain and verify a model's weights; print the folder or file they are in. A second call is instant."""
    from flexgen_helm.checkpoint.fetch import fetch as obtain

    path = obtain(model, revision, progress=say)
    if verify:
        from flexgen_helm.checkpoint.fingerprint import forget
        from flexgen_helm.checkpoint.open import open_checkpoint

        if path.is_file():
            forget(path)  # the embedded model's hash is compared as it is fetched, and remembered
        checkpoint = open_checkpoint(model, revision=revision, progress=say)
        checkpoint.verify()
        say(f"{len(checkpoint.shapes)} tensors of {checkpoint.origin} are as they should be")
    if as_json:
        print_json({"model": model, "path": str(path)})
    else:
        print(path)
