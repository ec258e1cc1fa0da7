"""The compiled functions, by numba and parts of LLVM's language that Python cannot say (`emit`).

A function gets one address: of 64-bit numbers that `team.run_on_threads` writes, its header and then the arguments.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types

from flexgen_helm.kernels.amx_loop import (
    CHAIN_STEPS,
    DEPTH,
    PANEL,
    PANEL_BYTES,
    PARTS,
    SIDE,
    multiply,
)
from flexgen_helm.kernels.amx_loop import scratch_bytes as multiply_bytes
from flexgen_helm.kernels.attention_loop import BLOCK_KEYS, TILE_QUERIES, attend, scratch_floats
from flexgen_helm.kernels.layer_loop import (
    ADD,
    GELU_TANH,
    SILU,
    bias_rows,
    combine_rows,
    norm_rows,
    put_rows,
    rotate_rows,
)
from flexgen_helm.kernels.processor import CONVERTS_HALVES, LANES
from flexgen_helm.kernels.product_loop import few_rows

__all__ = [
    "CHAIN",
    "PANEL",
    "PANEL_BYTES",
    "PARTS",
    "SIDE",
    "multiply",
    "multiply_bytes",
    "BLOCK_KEYS",
    "ADD",
    "CONVERTS_HALVES",
    "GELU_TANH",
    "LANES",
    "SILU",
    "TILE_QUERIES",
    "address_of",
    "attend",
    "bias_rows",
    "combine_rows",
    "few_rows",
    "norm_rows",
    "put_rows",
    "rotate_rows",
    "scratch_floats",
]


# Columns whose products are one chain of sums.
CHAIN = CHAIN_STEPS * DEPTH


@cache
def address_of(function: Any) -> int:
    """Compile a function for this processor, or take what an earlier process compiled; return its address."""
    # numba keeps what it compiled by name, until the function's own file changes. What it calls is in other files.
    function.__qualname__ = f"{function.__name__}_{_digest()}"
    signature = types.void(types.CPointer(types.int64))
    try:
        compiled: Any = numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):  # numba may write nowhere, or what it writes has no room
        compiled = numba.cfunc(signature, error_model="numpy")(function)
    return int(compiled.address)


@cache
def _digest() -> str:
    """Return what names the sources of all loops."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
