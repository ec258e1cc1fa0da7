"""A machine's profile as the device of a run has it: without its gpu, or with a simulated one. No
torch.
"""

from __future__ import annotations

from dataclasses import replace

from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import HardwareProfile, Link


def simulated_gpu(
    hardware: HardwareProfile,
    link_gb_s: tuple[float, float] | None,
    disk_gb_s: tuple[float, float] | None = None,
) -> HardwareProfile:
    """Add a simulated gpu: the machine's own processor with host memory behind a link.

    Its limit is the user's, and its capacity the host's: the workspace of computing is there and no
    limit counts it.

    link_gb_s: GB/s in and out, at most and by default as fast as memory is copied.
    disk_gb_s: GB/s of reads and writes of a simulated disk, at most and by default the machine's
        own.
    """
    copy = hardware.cpu.memory_bytes_s / 2
    to_gpu, to_cpu = (min(rate * 1e9, copy) for rate in link_gb_s) if link_gb_s else (copy, copy)
    disk = hardware.disk
    if disk_gb_s is not None:
        read, write = (1e9 * rate for rate in disk_gb_s)
        disk = replace(
            disk,
            read_bytes_s=min(read, disk.read_bytes_s),
            write_bytes_s=min(write, disk.write_bytes_s),
            duplex=1.0,
        )
    return replace(hardware, gpu=hardware.cpu, link=Link(to_gpu, to_cpu, to_gpu, to_cpu), disk=disk)


def profile_for_device(
    profile: HardwareProfile,
    device: str,
    link_gb_s: tuple[float, float] | None,
    disk_gb_s: tuple[float, float] | None,
    remedy: str,
) -> HardwareProfile:
    """Return a machine's profile as a device has it: 'cpu', 'cuda', 'sim', or 'auto' for what is
    there.

    link_gb_s, disk_gb_s: see `simulated_gpu`.

    Raises `UsageError`, with a remedy, for 'cuda' on a machine without a gpu.
    """
    if device == "sim":
        return simulated_gpu(profile, link_gb_s, disk_gb_s)
    if device.startswith("cpu"):
        return replace(profile, gpu=None, link=None)
    if device.startswith("cuda") and profile.gpu is None:
        raise UsageError(
            f"the hardware {profile.name!r} has 0 GPUs and --device is {device}: {remedy}"
        )
    return profile
