"""`flexgen-helm convert`: turn pickled weights into safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json
from flexgen_helm.cli.engine_flags import JsonFlag, Revision, complete_model


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of the catalog, org--repo of the Hugging Face hub, or folder with .bin weights.",
            autocompletion=complete_model,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to write. Default: one where the model's name then finds it."),
    ] = None,
    revision: Revision = None,
    as_json: JsonFlag = False,
) -> None:
    """Turn a model's pickled weights (.bin) into safetensors, and print the folder.

    No code in the pickles is executed. Needs the checkpoint's size on disk and next to no memory. Models with
    safetensors or GGUF files need no conversion.

    Example:
      flexgen-helm convert opt-30b
    """
    from flexgen_helm.checkpoint.convert import convert as convert_checkpoint

    done = convert_checkpoint(model, out, revision)
    if as_json:
        counts = {"tensors": len(done.tensors), "bytes": done.size, "left_out": list(done.left_out)}
        print_json({"model": model, "path": str(done.path), "origin": done.origin, **counts})
    else:
        print(done.path)
