"""Triton without a GPU: its compiler for any architecture, and a driver that records launches."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# Shared memory of a program in bytes, by compute capability: T4, A100, RTX 3090, H100.
SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 90: 227 << 10}


@dataclass(frozen=True)
class Launched:
    """A launch: the compiled kernel, its grid and arguments."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


@dataclass
class RecordingDriver:
    """A driver for Triton's runtime, whose launches end in `launched`."""

    capability: int
    launched: list[Launched] = field(default_factory=list)

    def get_current_device(self):
        return self.capability  # Triton caches kernels by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    @property
    def utils(self):
        return SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[self.capability]},
            load_binary=lambda name, binary, shared, device: (name, name, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source, metadata):
        # A compiled kernel keeps its launcher, whichever driver is active later.
        def launch(x, y, z, *rest):
            kernels = source.fn.device_caches[self.capability][0].values()
            kernel = next(kernel for kernel in kernels if kernel.src is source)
            driver.active.launched.append(Launched(kernel, (x, y, z), rest))

        return launch


@contextmanager
def recording_driver(capability):
    """Launch nowhere; kernels are compiled for `capability`."""
    recording, before = RecordingDriver(capability), driver._active
    driver.set_active(recording)
    try:
        yield recording
    finally:
        driver._active = before


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, and bytes of its stack, which holds
    spilled registers.
    """

    registers: int
    stack_bytes: int


def resources(kernel, folder):
    """Read the resources from a compiled kernel's binary."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return Resources(int(registers), int(stack))


def instructions(kernel, pattern):
    """Count the instructions of a compiled kernel that match, by name."""
    return Counter(
        re.findall(rf"^\s*(?:@%\w+ )?((?:{pattern})[\w.:]*)", kernel.asm["ptx"], re.MULTILINE)
    )
