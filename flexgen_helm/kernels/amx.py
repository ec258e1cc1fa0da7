"""Products in float32 by the processor's matrix unit (AMX), with weights in 16 or 32 bits.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

The unit multiplies bfloat16 numbers, about 16 times as many in a second as vector units multiply in
float32. So x is split into three parts in bfloat16, whose sum it is (`amx_loop`). Results are as
exact as those of a product in float32.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.kernels.team import DTYPE_CODES, empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import Loops, imported

# Most rows of a block, whose parts are made at once.
_MAX_BLOCK_ROWS = 128
# What a core's L2 cache holds of a block's parts and of two panels of weights.
_CACHE_BYTES = 1_900_000
# Most bytes of the parts of x on all threads.
_PARTS_BYTES = 16 << 20
# Least work of a thread, for which it is worth waking: multiplications, and rows of x that no other
# thread splits.
_THREAD_PRODUCTS = 1 << 19
_THREAD_ROWS = 64
# Linux gives a process the tile registers when it asks: the number of the system call arch_prctl,
# its ARCH_REQ_XCOMP_PERM, and XFEATURE_XTILEDATA.
_ARCH_PRCTL = 158
_REQUEST = 0x1023
_TILE_DATA = 18
# Rows of x below which vectors are faster, for matrices of a width below `_WIDE` and for wider
# ones: a tile has 16 rows whether used or not, and float16 and float32 weights are split first.
_MIN_ROWS = {torch.bfloat16: (3, 6), torch.float16: (6, 14), torch.float32: (16, 28)}
_WIDE = 2048

# Rows of a matrix that the unit multiplies together (`amx_loop`).
PANEL_OUTPUTS = 32

# A matrix as the loop reads it: addresses of w [outputs, width] and its product y [T, outputs],
# bytes from a row of w to the next, and the number of panels.
MATRIX = np.dtype([(name, np.int64) for name in ("w", "w_stride", "y", "outputs", "panels")])
# Arguments of `amx_loop.multiply`:
#
#     dtype                     of the weights, one of `DTYPE_CODES`
#     x, x_stride, x_rows       address, bytes from a row to the next, and rows of x
#     width                     columns of x and of the matrices, a multiple of 32
#     block_columns             columns of a block, a multiple of 32
#     block_rows                rows of x in a block, a multiple of 16
#     row_groups                into how many parts threads divide the rows of x
#     scratch, scratch_bytes    address of the threads' memory, and bytes of each thread
#     panels                    of all matrices together
#     matrices, num_matrices    address of records `MATRIX`, and how many
AmxArgs = namedtuple(
    "AmxArgs",
    "dtype x x_stride x_rows width block_columns block_rows row_groups scratch scratch_bytes "
    "panels num_matrices matrices",
)

_thread_local = threading.local()


def amx_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor | None:
    """Multiply x [T, in] with weight [out, in] transposed, and add bias [out] -> [T, out]; None
    where the unit does not take such tensors, or is slower.

    x, bias: in float32; weight: float16, bfloat16 or float32, rows of neighbouring elements.
    batch_invariant: use the unit for few rows of x as well, and for the few outputs that a part of
        a streamed matrix may have.
    """
    outputs = weight.shape[0]
    if batch_invariant and outputs < PANEL_OUTPUTS and has_amx():
        weight = F.pad(weight, (0, 0, 0, PANEL_OUTPUTS - outputs))
    products = amx_matmuls(x, [weight], batch_invariant)
    if products is None:
        return None
    y = products[0][:, :outputs].contiguous()
    return y if bias is None else y.add_(bias)


def amx_matmuls(
    x: Tensor, weights: Sequence[Tensor], batch_invariant: bool = False
) -> list[Tensor] | None:
    """Multiply x with each of some matrices of one dtype and width, as `amx_matmul`; x is split
    once for all.
    """
    (count, width), dtype = x.shape, weights[0].dtype
    if (
        x.dtype != torch.float32
        or not count
        or not all(_is_supported(weight.dtype, *weight.shape) for weight in weights)
    ):
        return None
    if not all(
        operand.device.type == "cpu" and operand.stride(1) == 1 for operand in (x, *weights)
    ):
        return None
    if not all(weight.dtype == dtype and weight.shape[1] == width for weight in weights):
        return None
    min_rows = 1 if batch_invariant else _MIN_ROWS[dtype][width >= _WIDE]
    if count < min_rows or (module := _amx_loops()) is None:
        return None
    return _multiply(module, x, weights)


def has_amx() -> bool:
    """Return whether the unit is used here, for the shapes that it takes."""
    return _amx_loops() is not None


def product_bytes(width: int) -> int:
    """Return the most bytes that a product with a matrix of this width allocates besides its
    result, on all threads.
    """
    module, threads = _amx_loops(), torch.get_num_threads()
    if module is None:
        return 0
    sizes = range(32, _max_block_rows(width, threads) + 1, 32)
    return threads * max(
        module.scratch_bytes(rows, width, _block_columns(module, rows, width)) for rows in sizes
    )


def _max_block_rows(width: int, threads: int) -> int:
    """Return the most rows of a block, a multiple of 32 (two tiles)."""
    return max(32, min(_MAX_BLOCK_ROWS, _PARTS_BYTES // threads // (6 * width) // 32 * 32))


def _block_columns(module: ModuleType, rows: int, width: int) -> int:
    """Return the columns of a block: all, or whole chains of sums, so that the order of a sum does
    not depend on where blocks end.
    """
    max_columns = _CACHE_BYTES // (2 * module.X_PARTS * rows + module.PANEL_BYTES)
    chain = module.CHAIN_STEPS * module.STEP_COLUMNS
    return width if width <= max_columns else max_columns // chain * chain


def _multiply(module: ModuleType, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    x_rows, width = x.shape
    outputs = [weight.shape[0] for weight in weights]
    products = [empty((x_rows, number)) for number in outputs]
    panels = [-(-number // PANEL_OUTPUTS) for number in outputs]
    matrices = np.zeros(len(weights), MATRIX)
    matrices["w"] = [weight.data_ptr() for weight in weights]
    matrices["w_stride"] = [weight.element_size() * weight.stride(0) for weight in weights]
    matrices["y"] = [y.data_ptr() for y in products]
    matrices["outputs"], matrices["panels"] = outputs, panels
    threads = team_size(x_rows * sum(outputs) * width // _THREAD_PRODUCTS)
    row_groups = _row_groups(x_rows, threads)
    # blocks of nearly equal size, each of whole pairs of tiles
    group_rows = -(-x_rows // row_groups)
    block_rows = -(-group_rows // (-(-group_rows // _max_block_rows(width, threads)) * 32)) * 32
    block_columns = _block_columns(module, block_rows, width)
    scratch_bytes = module.scratch_bytes(block_rows, width, block_columns)
    args = AmxArgs(
        dtype=DTYPE_CODES[weights[0].dtype],
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        x_rows=x_rows,
        width=width,
        block_columns=block_columns,
        block_rows=block_rows,
        row_groups=row_groups,
        scratch=_scratch_memory(threads * scratch_bytes),
        scratch_bytes=scratch_bytes,
        panels=sum(panels),
        num_matrices=len(weights),
        matrices=matrices.ctypes.data,
    )
    run_on_threads(module.multiply, args, threads)
    return products


def _row_groups(count: int, threads: int) -> int:
    """Return into how many parts threads divide `count` rows: the largest divisor of `threads` for
    which each part has enough rows. The threads of a part divide the panels.
    """
    max_groups = max(1, count // _THREAD_ROWS)
    return max(
        groups for groups in range(1, threads + 1) if threads % groups == 0 and groups <= max_groups
    )


def _scratch_memory(num_bytes: int) -> int:
    """Return the address, at a cache line, of memory that the calling thread keeps for its next
    products.
    """
    memory: Tensor | None = getattr(_thread_local, "memory", None)
    if memory is None or memory.numel() < num_bytes + 63:
        memory = _thread_local.memory = torch.empty(num_bytes + 63, dtype=torch.uint8, device="cpu")
    return -(-memory.data_ptr() // 64) * 64


def _is_supported(dtype: torch.dtype, outputs: int, width: int) -> bool:
    # 32 columns are a step of the unit (`amx_loop`)
    return dtype in DTYPE_CODES and width % 32 == 0 and width > 0 and outputs >= PANEL_OUTPUTS


def _amx_loops() -> ModuleType | None:
    return loops() if _has_unit() else None


@cache
def _has_unit() -> bool:
    """Return whether the processor has the unit and the system lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    # where numba is missing, `imported` returns the reason, a str, which has no such attribute
    has_unit = getattr(imported("flexgen_helm.kernels.emit"), "HAS_AMX", False)
    return has_unit and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Sums of one term, so that nothing is rounded: x or the weight has all bits of its dtype, the
    other has a single 1 in each row.
    """
    number = torch.arange(64 * 64, device="cpu").mul(2654435761)
    bits = number.remainder(1 << 25).sub(1 << 24).view(64, 64)
    one_term = torch.eye(64, dtype=torch.int64, device="cpu")[
        torch.arange(64, device="cpu").mul(7).remainder(64)
    ]
    for dtype in DTYPE_CODES:
        weight_bits = bits.remainder(
            {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}.get(dtype, 1 << 24)
        )
        for x, weight in ((bits[:33], one_term[:35]), (one_term[:33], weight_bits[:35])):
            yield partial(_product, x.float(), weight.to(dtype))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    y = amx_matmul(x, weight)
    return x @ weight.float().t() if y is None else y


loops = Loops(
    "products by the matrix unit", "flexgen_helm.kernels.amx_loop", _examples, tolerance=0.0
)
