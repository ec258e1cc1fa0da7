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
from array import array
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from flexgen_helm.kernels.layer_rows import add_bias
from flexgen_helm.kernels.team import KINDS, empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import imported, tried

# Most rows of x that are divided at once; bytes that a core's cache holds of their parts and of two panels of weights,
# and that the parts take on all threads.
_ROWS, _CACHE_BYTES, _MEMORY_BYTES = 128, 1_900_000, 16 << 20
# What occupies a thread for longer than it takes to wake: multiplications, and rows that it divides for itself alone.
_THREAD_PRODUCTS, _THREAD_ROWS = 1 << 19, 64
# Linux gives a process the tile registers when it asks (arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
# Rows of x below which vectors are faster, for matrices of a width below `_WIDE` and others: a tile has 16 rows, and
# weights in parts have to be divided first.
_LEAST_ROWS, _WIDE = {torch.bfloat16: (3, 6), torch.float16: (6, 14), torch.float32: (16, 28)}, 2048

_thread_local = threading.local()


def amx_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; None where there is no way.

    x, bias: in float32; weight: float16, bfloat16 or float32, rows of neighbouring elements.
    """
    products = amx_matmuls(x, [weight])
    if products is None:
        return None
    return products[0] if bias is None else add_bias(products[0], bias)


def amx_matmuls(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor] | None:
    """x times each of some matrices of one dtype, as `amx_matmul`; x is divided once."""
    dtype = weights[0].dtype
    suits = all(_suits(x, weight) and weight.dtype == dtype and weight.shape[1] == x.shape[1] for weight in weights)
    if not suits or x.shape[0] < _LEAST_ROWS[dtype][x.shape[1] >= _WIDE] or (compiled := _compiled()) is None:
        return None
    return _multiply(compiled, x, weights)


def has_amx() -> bool:
    """Return whether products on the host are by this unit, where it takes their shapes."""
    return _compiled() is not None


def multiplies_as_stored(dtype: torch.dtype, outputs: int, width: int) -> bool:
    """Return whether products of many rows with a matrix [outputs, width] on the host are by this unit."""
    return _takes(dtype, outputs, width) and has_amx()


def product_bytes(width: int) -> int:
    """Return the most bytes that a product with a matrix of this width takes besides its operands, on all threads."""
    compiled, threads = _compiled(), torch.get_num_threads()
    if compiled is None:
        return 0
    sizes = range(2 * compiled.SIDE, _most_rows(width, threads) + 1, 2 * compiled.SIDE)
    return threads * max(compiled.multiply_bytes(rows, width, _block(compiled, rows, width)) for rows in sizes)


def _most_rows(width: int, threads: int) -> int:
    """Return the most rows of x that are divided at once."""
    return max(32, min(_ROWS, _MEMORY_BYTES // threads // (6 * width) // 32 * 32))


def _block(compiled: ModuleType, rows: int, width: int) -> int:
    """Return the columns of a block: all, or whole chains of sums, whose order depends on the width alone."""
    most = _CACHE_BYTES // (2 * compiled.PARTS * rows + compiled.PANEL_BYTES)
    return width if width <= most else most // compiled.CHAIN * compiled.CHAIN


def _multiply(compiled: ModuleType, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    (count, width), outputs = x.shape, sum(weight.shape[0] for weight in weights)
    products = [empty((count, weight.shape[0])) for weight in weights]
    table, all_panels = array("q"), 0
    for weight, y in zip(weights, products):
        own, panels = weight.shape[0], -(-weight.shape[0] // compiled.PANEL)
        row_bytes = weight.element_size() * weight.stride(0)
        table.extend((weight.data_ptr(), row_bytes, y.data_ptr(), 4 * own, own, panels))
        all_panels += panels
    threads = team_size(count * outputs * width // _THREAD_PRODUCTS)
    groups = _row_groups(count, threads)
    most_rows = _most_rows(width, threads)
    # Equal blocks, nearly, of pairs of tiles.
    own_rows = -(-count // groups)
    rows = -(-own_rows // (-(-own_rows // most_rows) * 2 * compiled.SIDE)) * 2 * compiled.SIDE
    block = _block(compiled, rows, width)
    own_bytes = compiled.multiply_bytes(rows, width, block)
    arguments = [KINDS[weights[0].dtype], x.data_ptr(), 4 * x.stride(0), count, width, block, rows, groups]
    arguments += [_memory(threads * own_bytes), own_bytes, all_panels, table.buffer_info()[0]]
    run_on_threads(compiled.address_of(compiled.multiply), arguments, threads)
    return products


def _row_groups(count: int, threads: int) -> int:
    """Return into how many parts the rows are divided: as many threads as have enough of them, else parts of these."""
    most = max(1, count // _THREAD_ROWS)
    return max(groups for groups in range(1, threads + 1) if threads % groups == 0 and groups <= most)


def _memory(num_bytes: int) -> int:
    """Return the address of memory that is this thread's until its next product, at a line of the cache."""
    memory: Tensor | None = getattr(_thread_local, "memory", None)
    if memory is None or memory.numel() < num_bytes + 63:
        memory = _thread_local.memory = torch.empty(num_bytes + 63, dtype=torch.uint8, device="cpu")
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
    processor = imported("flexgen_helm.kernels.processor")
    return getattr(processor, "HAS_AMX", False) and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _is_right(compiled: ModuleType) -> bool:
    """Compare sums of one term, which nothing rounds: of numbers that have all bits, in x and in the weight."""
    bits = torch.arange(64 * 64).mul(2654435761).remainder(1 << 25).sub(1 << 24).view(64, 64).double()
    one_term = torch.eye(64, dtype=torch.float64)[torch.arange(64).mul(7).remainder(64)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        own_bits = bits.remainder(1 << 8 if dtype == torch.bfloat16 else 1 << 11) if dtype != torch.float32 else bits
        for x, weight in ((bits[:33], one_term[:35]), (one_term[:33], own_bits[:35])):
            (y,) = _multiply(compiled, x.float(), [weight.to(dtype)])
            if not torch.equal(y.double(), x @ weight.t()):
                return False
    return True
