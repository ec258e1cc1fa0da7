"""`flexgen-helm profile`: measure this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.errors import UsageError


def profile(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="Also write it there.")] = None,
    offload_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the disk tier, whose disk is measured.")
    ] = None,
    cached: Annotated[
        bool, typer.Option("--cached", help="Print what was measured before, if it still holds.")
    ] = False,
) -> None:
    """Measure this machine: bandwidths, rates and capacities, as JSON. Close other programs first."""
    from flexgen_helm.engine.machine_profile import measured_profile
    from flexgen_helm.files import replace_text

    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    found = measured_profile(folder=offload_dir, fresh=not cached, tell=say).to_json()
    print_json(found)
    if out is not None:
        with writing(out):
            replace_text(out, json.dumps(found, indent=2) + "\n")
