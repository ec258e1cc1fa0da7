"""The flags of `flexgen-helm run` for several machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.distributed.ray_cluster import RaySession

_PANEL = "Several machines"
RAY_FLAGS = ("--ray", "--ray-workers", "--ray-cores")

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|local|HOST:PORT",
        help="Compute with all machines or GPUs of a Ray cluster: the one that this machine is part of (auto), one of "
        "this machine alone that is started for this run (local), or the one at an address.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
RayWorkers = Annotated[
    int | None,
    typer.Option(
        "--ray-workers",
        metavar="N",
        help="Most workers; Ray's autoscaler is asked for room for so many. Default: one for each GPU, or for each "
        "machine of a cluster without GPUs.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
RayCores = Annotated[
    int | None,
    typer.Option(
        "--ray-cores",
        metavar="N",
        help="Cores of each worker, so that several share a machine and its memory. Default: all of a machine, or a "
        "GPU's share of them.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


def ray_session(address: str | None, workers: int | None, cores: int | None) -> RaySession | None:
    """Return what the flags say, None without `--ray`. Raises `UsageError` for what cannot be used."""
    if address is None:
        if workers is not None or cores is not None:
            raise UsageError("--ray-workers and --ray-cores need --ray; write for example --ray auto")
        return None
    from flexgen_helm.distributed.ray_cluster import RayOptions, RaySession

    return RaySession(RayOptions(address, workers, cores))
