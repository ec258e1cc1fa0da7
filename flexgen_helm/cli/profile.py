"""`flexgen-helm profile`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, write_json
from flexgen_helm.cli.flags import OutFile


def profile(
    out: OutFile = None,
    offload_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the disk tier, whose disk is measured.")
    ] = None,
    cached: Annotated[
        bool, typer.Option("--cached", help="Print what was measured before, if it is still valid.")
    ] = False,
) -> None:
    """Measure this machine: bandwidths, rates and capacities, as JSON. Close other programs first."""
    from flexgen_helm.engine.machine_profile import measured_profile

    measured = measured_profile(folder=offload_dir, fresh=not cached).to_json()
    print_json(measured)
    if out is not None:
        write_json(out, measured)
