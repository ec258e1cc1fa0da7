"""`flexgen-helm convert`: turn pickled weights into safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json
from flexgen_helm.cli.flags import JsonFlag, Revision


def convert(
    model: Annotated[str, typer.Argument(help="Catalog name, org--repo of the hub, or folder with .bin weights.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default one that the model's name finds from then on."),
    ] = None,
    revision: Revision = None,
    as_json: JsonFlag = False,
) -> None:
    """Turn a model's pickled weights (.bin) into safetensors; print the folder. Nothing in them is executed.

    Needs the checkpoint's size on disk and next to no memory. Models with safetensors or GGUF need no conversion.

    Example: flexgen-helm convert opt-30b
    """
    from flexgen_helm.checkpoint.convert import convert as convert_checkpoint

    done = convert_checkpoint(model, out, revision)
    if as_json:
        counts = {"tensors": len(done.tensors), "bytes": done.size, "left_out": list(done.left_out)}
        print_json({"model": model, "path": str(done.path), "origin": done.origin, **counts})
    else:
        print(done.path)
