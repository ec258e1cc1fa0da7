"""The host's processor: its name, and what decides the bits of products on it. No torch."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    model = re.search(r"^model name\s*:\s*(.*)$", _first_processor(_CPUINFO), re.MULTILINE)
    return model[1].strip() if model else platform.processor()


def processor_kind(cpuinfo: Path = _CPUINFO) -> str:
    """Return the vendor of the host's processor and its extensions for vectors and matrices, as
    Linux names them.
    """
    text = _first_processor(cpuinfo)
    vendor = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(.*)$", text, re.MULTILINE)
    extensions = sorted(set(re.findall(r"\b(?:amx|avx|fma|f16c|asimd|sve)\w*", text)))
    return " ".join((platform.machine(), vendor[1] if vendor else "unknown", *extensions))


def _first_processor(cpuinfo: Path) -> str:
    """Return what Linux says of the first processor; '' where it says nothing."""
    try:
        return cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return ""
