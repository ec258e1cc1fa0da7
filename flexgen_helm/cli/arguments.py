"""Arguments and flags that several commands have, beside the engine flags."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.cli.completion import complete_model
from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.distributed.ray_cluster import RaySession


def require_folder(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a file in a folder that does not exist, before anything is computed."""
    if value is not None and not value.parent.is_dir():
        raise UsageError(f"--{parameter.name} {value}: there is no folder {value.parent}")
    return value


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of the catalog, org--repo of the Hugging Face hub, folder, or .gguf file.",
        autocompletion=complete_model,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="Branch, tag, or commit of the hub's repository."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE.json",
        help="Also write the JSON there.",
        callback=require_folder,
    ),
]
SuiteName = Annotated[
    str, typer.Option("--suite", metavar="NAME", help="Name of the suite, as given to run.")
]
OutputPath = Annotated[
    Path,
    typer.Option(
        "--output-path", "-o", metavar="DIR", help="HELM's output folder, as given to run."
    ),
]
DEFAULT_OUTPUT = Path("benchmark_output")


def output_flags(output_path: Path) -> list[str]:
    """Return the flags that name HELM's output folder, none for the default."""
    return [] if output_path == DEFAULT_OUTPUT else ["-o", str(output_path)]


# When a suite ends: of `run` and `plan`.

UntilTime = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="HH:MM",
        help="Score a random sample of the instances of every run entry, as large as is done by "
        "this time.",
    ),
]
Hours = Annotated[
    float | None, typer.Option(metavar="HOURS", help="As --until, so many hours from now.")
]


def seconds_left(until: str | None, hours: float | None) -> float | None:
    """Return the seconds to the next such time of day, or of the hours; None where neither is
    given.
    """
    if until is not None and hours is not None:
        raise UsageError("--until and --hours both say when the suite ends; leave one of them out")
    if until is not None:
        now = datetime.now()
        try:
            end = datetime.combine(now, datetime.strptime(until, "%H:%M").time())
        except ValueError:
            raise UsageError(
                f"--until {until!r} is no time of day; write for example --until 07:00"
            ) from None
        return (end if end > now else end + timedelta(days=1)).timestamp() - now.timestamp()
    if hours is not None and not 0 < hours < math.inf:
        raise UsageError(f"--hours {hours:g} is no duration; write for example --hours 8")
    return None if hours is None else 3600 * hours


# The flags of `flexgen-helm run` for several machines.

_PANEL = "Several machines"
RAY_FLAGS = ("--ray", "--ray-workers", "--ray-cores")

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|local|HOST:PORT",
        help="Compute with all machines or GPUs of a Ray cluster: the one that this machine is "
        "part of (auto), one of this machine alone that is started for this run (local), or the "
        "one at an address.",
        rich_help_panel=_PANEL,
    ),
]
RayWorkers = Annotated[
    int | None,
    typer.Option(
        "--ray-workers",
        metavar="N",
        help="Maximum number of workers. Ray Data starts as many as the cluster has room for, and "
        "more when machines join. Default: one for each GPU, or for each machine of a cluster "
        "without GPUs.",
        rich_help_panel=_PANEL,
    ),
]
RayCores = Annotated[
    int | None,
    typer.Option(
        "--ray-cores",
        metavar="N",
        help="Cores of each worker, so that several share a machine and its memory. Default: all "
        "of the largest machine, or a GPU's share of them.",
        rich_help_panel=_PANEL,
    ),
]


def ray_session(address: str | None, workers: int | None, cores: int | None) -> RaySession | None:
    """Return what the flags say, None without `--ray`. Raises `UsageError` for what cannot be
    used.
    """
    if address is None:
        if workers is not None or cores is not None:
            raise UsageError(
                "--ray-workers and --ray-cores need --ray; write for example --ray auto"
            )
        return None
    from flexgen_helm.distributed.ray_cluster import RayOptions, RaySession

    return RaySession(RayOptions(address, workers, cores))
