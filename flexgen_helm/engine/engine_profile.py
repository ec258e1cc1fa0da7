"""The machine's profile as one engine has it: with its own tiers, and with a gpu that it simulates. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from flexgen_helm.engine.machine_profile import load_saved, measured_profile, profile_named
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner.placement import Tier
from flexgen_helm.planner.plan import simulated_gpu
from flexgen_helm.planner.problem import MEASURED
from flexgen_helm.progress import Message, report

# Names another profile than this machine's measured one: a shipped machine, or a file that `profile -o` wrote.
HARDWARE_VARIABLE = "FLEXGEN_HELM_HARDWARE"


class EngineProfile:
    """Where the planner of one engine has the machine's rates from.

    name: of the profile that takes the place of the measured one; None if there is none.
    """

    def __init__(
        self,
        limits: Mapping[Tier, int],
        folder: Path,
        device: Literal["cpu", "cuda", "sim"],
        link_gb_s: tuple[float, float] | None,
        disk_gb_s: tuple[float, float] | None,
        pins_host_memory: Callable[[], bool],
    ) -> None:
        """Check the profile that `HARDWARE_VARIABLE` names; measure nothing yet.

        limits: bytes of the engine's tiers.
        folder: of the disk tier.
        link_gb_s, disk_gb_s: of a simulated gpu, and of the disk beside it.
        """
        self._limits, self._folder, self._device = limits, folder, device
        self._link_gb_s, self._disk_gb_s = link_gb_s, disk_gb_s
        self._pins_host_memory = pins_host_memory
        named = os.environ.get(HARDWARE_VARIABLE) or MEASURED
        self.name = None if named == MEASURED else named
        self._known = None if self.name is None else self._adapted(profile_named(self.name))
        self._cannot_be_measured = False

    @property
    def pins_host_memory(self) -> bool:
        return self._pins_host_memory()

    def profile(self, measure: bool) -> HardwareProfile | None:
        """Return the profile; None where none is saved and `measure` is false, or the machine cannot be measured.

        A full disk or device, for example, must not end a run: that is said once.
        """
        if self._known is not None or self._cannot_be_measured:
            return self._known
        if not measure and load_saved(self._folder) is None:
            return None
        try:
            self._known = self._adapted(measured_profile(folder=self._folder))
        except (FlexgenError, OSError, RuntimeError) as error:
            self._cannot_be_measured = True
            report(Message(f"this machine cannot be measured, so nothing is planned: {error}"))
        return self._known

    def _adapted(self, profile: HardwareProfile) -> HardwareProfile:
        if self._device == "sim":
            profile = simulated_gpu(replace(profile, gpu=None, link=None), self._link_gb_s, self._disk_gb_s)
        elif self._device == "cpu":
            profile = replace(profile, gpu=None, link=None)
        elif profile.gpu is None:
            raise UsageError(
                f"the hardware {profile.name!r} has 0 GPUs and --device is cuda: run `flexgen-helm profile`, or name "
                f"another with {HARDWARE_VARIABLE}"
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
