"""What numba compiles for: the processor at hand, or the one that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name."""

from __future__ import annotations

import llvmlite.binding
from numba.core import config


def has(feature: str) -> bool:
    """Return whether numba compiles for an extension of the processor, by LLVM's name."""
    chosen: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


HAS_AVX512 = has("avx512f")
# Tile registers and products of bfloat16 tiles, beside vectors of 16 numbers.
HAS_AMX = HAS_AVX512 and has("amx-tile") and has("amx-bf16")
# Numbers of a vector register.
LANES = 16 if HAS_AVX512 else 8
# Whether the processor itself converts IEEE's 16-bit numbers. Else LLVM calls a function that may not exist.
CONVERTS_HALVES = has("f16c") or has("neon")
