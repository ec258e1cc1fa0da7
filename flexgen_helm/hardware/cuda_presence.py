"""Whether this machine can have a CUDA device, as far as can be told without importing torch."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

from flexgen_helm.errors import UsageError

# Device files of NVIDIA's driver on a PC, under WSL, and on a Jetson.
_DEVICE_FILES = ("nvidia*", "dxg", "nvhost*", "nvgpu*")


def require_cuda(device: str) -> None:
    """Raise `UsageError` if there is certainly no CUDA device; in doubt, torch is asked when a
    model loads.

    device: as the user named it.
    """
    if (reason := why_no_cuda()) is not None:
        raise UsageError(f"device {device!r} was asked for and {reason}; take --device cpu")


def why_no_cuda(devices: Path = Path("/dev")) -> str | None:
    """Say why no CUDA device can be there; None if there may be one."""
    spec = find_spec("torch")
    build = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if build is None or not build.is_file():
        return None
    text = build.read_text(encoding="utf-8")
    cuda, hip = (
        re.search(rf"^{name}\b.*?=\s*(.+)$", text, re.MULTILINE) for name in ("cuda", "hip")
    )
    if cuda is None or hip is None or hip[1].strip() != "None":
        return None  # of another version, or ROCm's, whose devices torch calls cuda too
    if cuda[1].strip() == "None":
        return "this torch is built for CPUs only"
    if _has_driver() or any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES):
        return None
    return "this machine has no NVIDIA driver"


def _has_driver() -> bool:
    """Whether the library that torch's CUDA runtime loads can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
