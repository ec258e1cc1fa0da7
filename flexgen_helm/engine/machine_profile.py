"""The profile of this machine: measured once, saved below `FLEXGEN_HELM_HOME`, measured again if
the machine changes.

A profile that was measured while other programs computed is saved with a mark. It is used until the
machine is quiet, and then replaced: so a busy machine is not measured again by every process, and
no plan believes its rates for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.rank import rank_of_process
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import existing_folder, replace_text, require_writable
from flexgen_helm.hardware.device_profile import profile_for_device
from flexgen_helm.hardware.processor import processor_name
from flexgen_helm.hardware.profile import MEASURED, HardwareProfile, load_profile
from flexgen_helm.hardware.threads import busy_cores, read_cpu_times
from flexgen_helm.paths import state_dir, state_lock
from flexgen_helm.progress import Message, ProgressPhase, report
from flexgen_helm.system_errors import explain
from flexgen_helm.tiers import Tier

if TYPE_CHECKING:
    from flexgen_helm.offload.copy_engine import CopyEngine

# Version of the profiler: raised when it measures something else.
_VERSION = 9
# Share of the processors' time that other programs take on a busy machine.
_BUSY_SHARE = 0.25
_WATCHED_S = 0.5


@dataclass(frozen=True)
class SavedProfile:
    """A profile, and what disturbed its measuring.

    busy_share: share of the processors' time that other programs took meanwhile.
    """

    profile: HardwareProfile
    busy_share: float

    @property
    def is_marked(self) -> bool:
        """Whether it was measured on a busy machine, so that its rates are too low."""
        return self.busy_share > _BUSY_SHARE


def profile_named(name: str) -> HardwareProfile:
    """Return a shipped profile, one from a file, or for 'measured' this machine's."""
    return measured_profile() if name == "measured" else load_profile(name)


def measured_profile(*, folder: Path | None = None, fresh: bool = False) -> HardwareProfile:
    """Return this machine's profile, the saved one if it still holds.

    folder: of the disk tier, whose disk is measured.
    fresh: measure again in any case.
    """
    folder = folder or state_dir() / "offload"
    if not fresh and (saved := _usable(folder)) is not None:
        return saved
    # One process at a time: two that measure at once would each find half a machine.
    with state_lock("profile.lock"):
        return (None if fresh else _usable(folder)) or _measured_now(folder)


def _usable(folder: Path) -> HardwareProfile | None:
    """Return what is saved, unless a quiet machine can now be measured better."""
    saved = load_saved(folder)
    return (
        saved.profile
        if saved is not None and (not saved.is_marked or busy_share() > _BUSY_SHARE)
        else None
    )


def measure(folder: Path) -> HardwareProfile:
    """Measure everything; `folder` is on the disk that is measured."""
    from flexgen_helm.engine import profiler  # imports torch

    return profiler.measure(folder)


def _measured_now(folder: Path) -> HardwareProfile:
    """Measure and save this machine's profile, with a mark if the machine is busy."""
    require_writable(folder, "the offload directory", "name another folder with --offload-dir")
    report(ProgressPhase("measure", "takes half a minute; close programs that compute"))
    before = busy_share()
    measured = SavedProfile(measure(folder), max(before, busy_share()))
    if measured.is_marked:
        report(
            Message(
                f"other programs take {measured.busy_share:.0%} of the processors, so the measured "
                "rates are too low; they are replaced when the machine is quiet: run `flexgen-helm "
                "profile` then"
            )
        )
    save(measured, folder)
    return measured.profile


def busy_share() -> float:
    """Return the share of all processors' time that other programs take, watched for half a
    second.
    """
    earlier = read_cpu_times()
    time.sleep(_WATCHED_S)
    return busy_cores(earlier, read_cpu_times()) / (psutil.cpu_count() or 1)


def load_saved(folder: Path) -> SavedProfile | None:
    """Return what was measured before; None if nothing was, or the machine is another one now."""
    path = _path()
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.get("identity") == machine_identity(folder):
            profile = HardwareProfile.from_json(saved["profile"], str(path))
            return SavedProfile(profile, float(saved.get("busy_share", 0.0)))
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        pass  # of another version, or damaged
    return None


def save(saved: SavedProfile, folder: Path) -> None:
    """Save a profile as this machine's."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "identity": machine_identity(folder),
        "busy_share": saved.busy_share,
        "profile": saved.profile.to_json(),
    }
    replace_text(path, json.dumps(content, indent=2))


def machine_identity(folder: Path) -> dict[str, Any]:
    """Return what a profile depends on: if one of these differs, the machine is measured again."""
    from importlib.metadata import version

    flags = next(
        (line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))), ""
    )
    return {
        "version": _VERSION,
        "processor": processor_name(),
        # Two virtual machines have one name with and without some instructions.
        "features": hashlib.sha256(flags.encode()).hexdigest()[:16],
        "cores": psutil.cpu_count(logical=True),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_bytes": psutil.virtual_memory().total,
        "device": os.stat(existing_folder(folder)).st_dev,
        "gpu": _gpu_lines(),
        "torch": version("torch"),
    }


def _path() -> Path:
    """Return the file of this process's profile: ranks of a pipeline may compute on GPUs of several
    models.
    """
    rank = rank_of_process()
    models = {line for line in _gpu_lines() if line.startswith("Model:")}
    number = rank.local_number if rank is not None and len(models) > 1 else 0
    return state_dir() / (f"profile-gpu{number}.json" if number else "profile.json")


def _gpu_lines() -> list[str]:
    """Return the lines in which the driver describes all GPUs."""
    paths = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [line for path in paths for line in _lines(path)]


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


# Names another profile than this machine's measured one: a shipped machine, or a file that
# `profile -o` wrote.
HARDWARE_VARIABLE = "FLEXGEN_HELM_HARDWARE"


class EngineProfile:
    """The machine's profile as one engine has it: with its own tiers, and with a gpu that it
    simulates. Its planner takes the machine's rates from here.

    name: of the profile that takes the place of the measured one; None if there is none.
    """

    def __init__(
        self,
        limits: Mapping[Tier, int],
        folder: Path,
        options: EngineConfig,
        link: CopyEngine | None,
    ) -> None:
        """Check the profile that `HARDWARE_VARIABLE` names; measure nothing yet.

        limits: bytes of the engine's tiers.
        folder: of the disk tier.
        link: copies to and from the device; None where the host computes.
        """
        self._limits, self._folder, self._options, self._link = limits, folder, options, link
        named = os.environ.get(HARDWARE_VARIABLE) or MEASURED
        self.name = None if named == MEASURED else named
        self._known = None if self.name is None else self._adapted(profile_named(self.name))
        self._cannot_be_measured = False

    @property
    def pins_host_memory(self) -> bool:
        """Whether the driver has pinned all memory that it was asked for so far."""
        return self._link is None or self._link.pins

    def profile(self, measure: bool) -> HardwareProfile | None:
        """Return the profile; None where none is saved and `measure` is false, or the machine
        cannot be measured.

        A full disk or device, for example, must not end a run: that is said once.
        """
        if self._known is not None or self._cannot_be_measured:
            return self._known
        if not measure:
            saved = load_saved(self._folder)
            return None if saved is None else self._adapted(saved.profile)
        try:
            self._known = self._adapted(measured_profile(folder=self._folder))
        except (FlexgenError, OSError, RuntimeError) as error:
            self._cannot_be_measured = True
            report(
                Message(f"this machine cannot be measured, so nothing is planned: {explain(error)}")
            )
        return self._known

    def _adapted(self, profile: HardwareProfile) -> HardwareProfile:
        """Return a profile with the engine's device and rates, and room for its limits."""
        options = self._options
        device_type = "cpu" if self._link is None else "cuda"
        profile = profile_for_device(
            profile,
            "sim" if options.device == "sim" else device_type,
            options.link_gb_s,
            options.disk_gb_s,
            f"run `flexgen-helm profile`, or name another with {HARDWARE_VARIABLE}",
        )
        # Limits follow from what is free now; a saved profile may have seen less.
        cpu, disk, gpu = profile.cpu, profile.disk, profile.gpu
        if gpu is not None:
            gpu = replace(gpu, memory_bytes=max(gpu.memory_bytes, self._limits["gpu"]))
        return replace(
            profile,
            cpu=replace(cpu, memory_bytes=max(cpu.memory_bytes, self._limits["cpu"])),
            disk=replace(disk, bytes=max(disk.bytes, self._limits["disk"])),
            gpu=gpu,
        )
