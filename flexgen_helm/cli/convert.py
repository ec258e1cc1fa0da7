"""`flexgen-helm convert`: pickled weights become safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say


def convert(
    model: Annotated[str, typer.Argument(help="Catalogue name, org--repo of the hub, or folder with .bin weights.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default one that the model's name finds from then on."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub's repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn a model's pickled weights (.bin) into safetensors; print the folder. Nothing in them is executed.

    Needs the checkpoint's size on disk and next to no memory. Models with safetensors or GGUF need no conversion.

    Example: flexgen-helm convert opt-30b
    """
    from flexgen_helm.checkpoint.convert import convert as turn

    done = turn(model, out, revision, progress=say)
    if as_json:
        print_json(
            {
                "model": model,
                "path": str(done.path),
                "origin": done.origin,
                "tensors": done.tensors,
                "bytes": done.size,
                "left_out": list(done.left_out),
            }
        )
    else:
        print(done.path)
