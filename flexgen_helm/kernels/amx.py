"""Products in float32 by the processor's matrix unit (AMX), with weights in 16 or 32 bits.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

The unit multiplies bfloat16 numbers, some 16 times as many in a second as others multiply in float32. So x is divided
into three parts whose sum it is (`amx_loop`). Results are as exact as those of a product in float32.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from flexgen_helm.kernels.team import run_on_threads
from flexgen_helm.kernels.trial import tried

# Rows of x whose parts a core's cache holds, columns of a block, and bytes that the parts take on all threads.
_ROWS, _BLOCK, _MEMORY_BYTES = 128, 1536, 16 << 20
# What occupies a thread for longer than it takes to wake: multiplications, and rows that it divides for itself alone.
_THREAD_PRODUCTS, _THREAD_ROWS = 1 << 19, 64
# Linux gives a process the tile registers when it asks (arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
# Rows of x below which vectors are faster: a tile has 16 rows, and weights in parts have to be divided first.
_LEAST_ROWS = {torch.bfloat16: 5, torch.float16: 15, torch.float32: 24}

_thread_local = threading.local()


def amx_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; None where there is no way.

    x, bias: in float32; weight: float16, bfloat16 or float32, rows of neighbouring elements.
    """
    compiled = _compiled() if _suits(x, weight) and x.shape[0] >= _LEAST_ROWS[weight.dtype] else None
    if compiled is None:
        return None
    y = _multiply(compiled, x, weight)
    return y if bias is None else y.add_(bias)


def has_amx() -> bool:
    """Return whether products on the host are by this unit, where it takes their shapes."""
    return _compiled() is not None


def multiplies_as_stored(dtype: torch.dtype, outputs: int, width: int) -> bool:
    """Return whether products of many rows with a matrix [outputs, width] on the host are by this unit."""
    return _takes(dtype, outputs, width) and has_amx()


def product_bytes(width: int) -> int:
    """Return the most bytes that a product with a matrix of this width takes besides its operands, on all threads."""
    compiled, threads = _compiled(), torch.get_num_threads()
    return 0 if compiled is None else threads * compiled.multiply_bytes(*_most_rows_and_block(width, threads))


def _most_rows_and_block(width: int, threads: int) -> tuple[int, int, int]:
    """Return the most rows of x that are divided at once, the width, and the columns of a block: equal ones, nearly."""
    block = -(-width // -(-width // _BLOCK) // 32) * 32
    return max(32, min(_ROWS, _MEMORY_BYTES // threads // (6 * width) // 32 * 32)), width, block


def _multiply(compiled: ModuleType, x: Tensor, weight: Tensor) -> Tensor:
    (count, width), outputs = x.shape, weight.shape[0]
    y = torch.empty((count, outputs), dtype=torch.float32)
    threads = max(1, min(torch.get_num_threads(), count * weight.numel() // _THREAD_PRODUCTS))
    groups = _row_groups(count, threads)
    most_rows, _, block = _most_rows_and_block(width, threads)
    rows = min(most_rows, -(-count // (groups * compiled.SIDE)) * compiled.SIDE)
    own = compiled.multiply_bytes(rows, width, block)
    kinds = {torch.bfloat16: compiled.BFLOAT16, torch.float16: compiled.FLOAT16, torch.float32: compiled.FLOAT32}
    operands = [(x, x.stride(0)), (weight, weight.stride(0)), (y, outputs)]
    addresses = [number for one, row in operands for number in (one.data_ptr(), one.element_size() * row)]
    sizes = [count, outputs, width, block, rows, groups, _memory(threads * own), own]
    run_on_threads(compiled.address_of(compiled.multiply), [kinds[weight.dtype], *addresses, *sizes], threads)
    return y


def _row_groups(count: int, threads: int) -> int:
    """Return into how many parts the rows are divided: as many threads as have enough of them, else parts of these."""
    most = max(1, count // _THREAD_ROWS)
    return max(groups for groups in range(1, threads + 1) if threads % groups == 0 and groups <= most)


def _memory(num_bytes: int) -> int:
    """Return the address of memory that is this thread's until its next product, at a line of the cache."""
    memory: Tensor | None = getattr(_thread_local, "memory", None)
    if memory is None or memory.numel() < num_bytes + 63:
        memory = _thread_local.memory = torch.empty(num_bytes + 63, dtype=torch.uint8)
    return -(-memory.data_ptr() // 64) * 64


def _suits(x: Tensor, weight: Tensor) -> bool:
    on_host = x.device.type == weight.device.type == "cpu"
    rows = x.dtype == torch.float32 and x.shape[0] > 0 and x.stride(1) == 1 == weight.stride(1)
    return on_host and rows and _takes(weight.dtype, *weight.shape)


def _takes(dtype: torch.dtype, outputs: int, width: int) -> bool:
    is_known = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return is_known and width % 32 == 0 and width > 0 and outputs >= 32  # whole steps, and a panel (`amx_loop`)


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("products by the matrix unit", _is_right) if _has_unit() else None


def _has_unit() -> bool:
    """Return whether the processor has the unit and the system lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        from flexgen_helm.kernels.processor import HAS_AMX
    except ImportError:  # a machine without numba
        return False
    return HAS_AMX and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _is_right(compiled: ModuleType) -> bool:
    """Compare sums of one term, which nothing rounds: of numbers that have all bits, in x and in the weight."""
    bits = torch.arange(64 * 64).mul(2654435761).remainder(1 << 25).sub(1 << 24).view(64, 64).double()
    one_term = torch.eye(64, dtype=torch.float64)[torch.arange(64).mul(7).remainder(64)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        own_bits = bits.remainder(1 << 8 if dtype == torch.bfloat16 else 1 << 11) if dtype != torch.float32 else bits
        for x, weight in ((bits[:33], one_term[:35]), (one_term[:33], own_bits[:35])):
            y = _multiply(compiled, x.float(), weight.to(dtype))
            if not torch.equal(y.double(), x @ weight.t()):
                return False
    return True
