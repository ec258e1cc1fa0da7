"""`flexgen-helm profile`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.console import print_json, write_json
from flexgen_helm.cli.engine_flags import OutFile


def profile(
    out: OutFile = None,
    offload_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Measure the disk of this folder. Default: offload in FLEXGEN_HELM_HOME."),
    ] = None,
    cached: Annotated[bool, typer.Option("--cached", help="Print the stored measurement if it still holds.")] = False,
) -> None:
    """Measure this machine for `plan` and --policy auto. Close other programs first.

    Takes about 20 s. The bandwidths, rates, and capacities are printed as JSON and stored in FLEXGEN_HELM_HOME.
    """
    from flexgen_helm.engine.machine_profile import measured_profile

    measured = measured_profile(folder=offload_dir, fresh=not cached).to_json()
    print_json(measured)
    if out is not None:
        write_json(out, measured)
