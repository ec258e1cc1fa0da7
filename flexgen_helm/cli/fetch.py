"""`flexgen-helm fetch`: download and verify a model's weights."""

from __future__ import annotations

from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say
from flexgen_helm.cli.engine_flags import JsonFlag, ModelName, Revision


def fetch(
    model: ModelName,
    revision: Revision = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all weights again, and compare them with the known hashes.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Download a model's weights, check them, and print where they are.

    Other commands fetch what they need by themselves. A second call is instant.

    Example:
      flexgen-helm fetch smollm2-135m-instruct-q4_1
    """
    from flexgen_helm.checkpoint.fetch import fetch as obtain

    path = obtain(model, revision)
    if verify:
        from flexgen_helm.checkpoint.fingerprint import forget
        from flexgen_helm.checkpoint.open import open_checkpoint

        if path.is_file():
            forget(path)  # the embedded model's hash is remembered when it is fetched
        checkpoint = open_checkpoint(model, revision=revision)
        checkpoint.verify()
        say(f"{len(checkpoint.shapes)} tensors of {checkpoint.origin} are intact")
    if as_json:
        print_json({"model": model, "path": str(path)})
    else:
        print(path)
