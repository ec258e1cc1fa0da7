"""`flexgen-helm models`, `fetch` and `convert`: the models that can be named, and their weights."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.cli.arguments import JsonFlag, ModelName, Revision
from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import output, print_json, print_rows, say
from flexgen_helm.errors import FlexgenError, UnknownModelError
from flexgen_helm.files import size

if TYPE_CHECKING:
    from flexgen_helm.planner.fit import Fit
    from flexgen_helm.tiers import Tier

_PRECISIONS = ("fp16", "4bit")
_SHORT: dict[Fit, str] = {
    "in GPU memory": "GPU",
    "in memory": "memory",
    "offloaded to disk": "disk",
    "too large for the memory": "too large",
    "too large for the disk": "too large",
}


@dataclass(frozen=True)
class MachineLimits:
    """What the table assumes of this machine.

    limits: bytes of each tier, less what other programs keep.
    gpu: what is known of a GPU, in words.
    """

    limits: dict[Tier, int]
    gpu: str


@dataclass(frozen=True)
class Row:
    """One model. Values that follow from a configuration are None if that is not on this machine.

    name: as typed after `flexgen/`.
    is_here: the weights are on this machine; None if their folder is gone or has no usable weights.
    bytes, fits: by precision.
    """

    name: str
    parameters: int | None
    architecture: str | None
    hub_repo: str | None
    is_here: bool | None
    bytes: dict[str, int]
    fits: dict[str, Fit]


def models(
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="Part of a name, architecture or hub repository, or a pattern: 'qwen3-*b'."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the models that have a name: their sizes, whether they are here, and what fits on this
    machine.

    Names follow flexgen/ in a run entry, and -4bit may follow a name. A repository of the hub that
    is not listed is named flexgen/ORG--REPO.

    Example: flexgen-helm models llama-3
    """
    machine = this_machine()
    rows = list_models(machine, pattern or "")
    if pattern and not rows:
        from flexgen_helm.checkpoint.known_names import close_names
        from flexgen_helm.files import listed

        close = close_names(pattern)
        question = (
            f"did you mean {listed(close)}?" if close else "`flexgen-helm models` lists all names"
        )
        raise UnknownModelError(
            f"no model has {pattern!r} in its name, architecture or repository; {question}"
        )
    if as_json:
        print_json({"counted_bytes": machine.limits, "models": [asdict(row) for row in rows]})
        return
    _print_rows(rows)
    free = f"{size(machine.limits['cpu'])} of memory and {size(machine.limits['disk'])} of disk"
    output().print(
        "'in' says where the weights are during a run: in GPU memory, in memory, or on the disk, "
        f"from which each pass reads what does not fit. This machine is counted with {free}, which "
        "are free now; a model that is not here also needs disk for its download. "
        f"{machine.gpu[0].upper()}{machine.gpu[1:]}.",
        width=100,
    )
    fits = (row.name for row in rows if row.fits and not row.fits["fp16"].startswith("too large"))
    if (name := next(fits, None)) is not None:
        say_example(name)


def this_machine() -> MachineLimits:
    """Return what is free here. A GPU counts if a saved profile knows its memory: asking it would
    import torch.
    """

    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.machine_profile import load_saved
    from flexgen_helm.files import existing_folder
    from flexgen_helm.hardware.host_memory import host_memory
    from flexgen_helm.tiers import without_margin

    folder = state_dir() / "offload"
    memory, saved = host_memory(), load_saved(folder)
    gpu = saved.profile.gpu if saved is not None else None
    total = 0 if gpu is None else gpu.memory_bytes
    limits: dict[Tier, int] = {
        "gpu": without_margin(total, total),
        "cpu": without_margin(memory.available, memory.total),
        "disk": without_margin(shutil.disk_usage(existing_folder(folder)).free, 0),
    }
    if gpu is not None:
        words = f"the GPU has {size(limits['gpu'])}"
    elif saved is not None:
        words = "the machine's profile has no GPU"
    else:
        words = "a GPU is not counted before `flexgen-helm profile` has measured it"
    return MachineLimits(limits, words)


def list_models(machine: MachineLimits, pattern: str = "") -> list[Row]:
    """Return the models of the user's file, and then those of the catalog, the embedded one first.

    pattern: a part of name, architecture or repository in any case, or a pattern with `*`, `?`, or
        `[]`.
    """
    from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL
    from flexgen_helm.checkpoint.known_names import user_names

    rows = (
        _row(name, machine, pattern.lower())
        for name in dict.fromkeys([*user_names(), WHEEL_MODEL, *CATALOG])
    )
    return [row for row in rows if row is not None]


def _row(name: str, machine: MachineLimits, pattern: str) -> Row | None:
    """Return the facts of a model, None if the pattern does not match."""
    from flexgen_helm.checkpoint.fetch import GGUF_SIZE
    from flexgen_helm.checkpoint.local_files import local_weights
    from flexgen_helm.checkpoint.names import planned_precision, read_model_config, resolve
    from flexgen_helm.planner.fit import fit, weight_bytes

    model, config, is_here = None, None, None
    with suppress(FlexgenError):  # the user's file names what is gone
        model = resolve(name)
        is_here = local_weights(model) is not None
    with suppress(FlexgenError):
        # The header of a .gguf file takes longer to read than the whole list.
        config = None if model is None or model.kind == "gguf" else read_model_config(model)[0]
    architecture = None if config is None else config.architecture
    hub_repo = None if model is None else model.hub_repo
    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    if not any(
        fnmatchcase(text.lower(), wanted)
        for text in (name, architecture, hub_repo)
        if text is not None
    ):
        return None
    if model is None or config is None:
        return Row(name, None, None, hub_repo, is_here, {}, {})
    precisions = {name: planned_precision(model, name) for name in _PRECISIONS}
    sizes = {name: weight_bytes(config, precision) for name, precision in precisions.items()}
    fetched = 0 if is_here else GGUF_SIZE if model.kind == "wheel" else sizes["fp16"]
    fits = {
        name: fit(config, precision, machine.limits, fetched)
        for name, precision in precisions.items()
    }
    return Row(name, config.num_parameters, architecture, hub_repo, is_here, sizes, fits)


def _print_rows(rows: list[Row]) -> None:
    """Print a table; a narrow terminal keeps what fits where."""
    cells = []
    for row in rows:
        cells.append([row.name, _parameters(row.parameters), row.architecture or ""])
        for name in _PRECISIONS:
            cells[-1] += (
                [size(row.bytes[name]), _SHORT[row.fits[name]]] if name in row.bytes else ["", ""]
            )
        cells[-1].append("no" if row.is_here is None else "yes" if row.is_here else "")
    headings = ["model", "params", "architecture", "fp16", "fp16 in", "4bit", "4bit in", "here"]
    print_rows(headings, cells, ("architecture", "params", "fp16", "4bit"))


def _parameters(count: int | None) -> str:
    """Return '6.7B', '135M': the size that a model's name has, in three digits at most."""
    if count is None:
        return ""
    unit, factor = ("B", 1e9) if count >= 999.5e6 else ("M", 1e6)
    value = count / factor
    return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"


def say_example(model: str) -> None:
    """Print a command that runs a scenario without data with this model."""
    from flexgen_helm.checkpoint.suffixes import PREFIX

    command = f"flexgen-helm run -r simple_mcqa_scored:model={PREFIX}{model} -m 10 --suite try"
    output().print(f"Example:\n{command}", soft_wrap=True)


def fetch(
    model: ModelName,
    revision: Revision = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read all weights again, and compare them with the known hashes."
        ),
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


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of the catalog, org--repo of the Hugging Face hub, or folder with .bin "
            "weights.",
            autocompletion=complete_model,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to write. Default: one where the model's name then finds it.",
        ),
    ] = None,
    revision: Revision = None,
    as_json: JsonFlag = False,
) -> None:
    """Turn a model's pickled weights (.bin) into safetensors, and print the folder.

    No code in the pickles is executed. Needs the checkpoint's size on disk and next to no memory.
    Models with safetensors or GGUF files need no conversion.

    Example:
      flexgen-helm convert opt-30b
    """
    from flexgen_helm.checkpoint.convert import convert as convert_checkpoint

    done = convert_checkpoint(model, out, revision)
    if as_json:
        counts = {"tensors": done.tensors, "bytes": done.size, "left_out": list(done.left_out)}
        print_json({"model": model, "path": str(done.path), "origin": done.origin, **counts})
    else:
        print(done.path)
