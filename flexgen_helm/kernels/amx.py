"""Products in float32 by the processor's matrix unit (AMX), with weights in 16 or 32 bits.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

The unit multiplies bfloat16 numbers, some 16 times as many in a second as others multiply in
float32. So x is divided into three parts whose sum it is (`amx_loop`). Results are as exact as
those of a product in float32.
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

from flexgen_helm.kernels.team import KINDS, empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import Loops, imported

# Most rows of x that are divided at once; bytes that a core's cache holds of their parts and of two
# panels of weights, and that the parts take on all threads.
_ROWS, _CACHE_BYTES, _MEMORY_BYTES = 128, 1_900_000, 16 << 20
# What occupies a thread for longer than it takes to wake: multiplications, and rows that it divides
# for itself alone.
_THREAD_PRODUCTS, _THREAD_ROWS = 1 << 19, 64
# Linux gives a process the tile registers when it asks (arch_prctl: ARCH_REQ_XCOMP_PERM,
# XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
# Rows of x below which vectors are faster, for matrices of a width below `_WIDE` and for wider
# ones: a tile has 16 rows, and weights in parts have to be divided first.
_LEAST_ROWS, _WIDE = {torch.bfloat16: (3, 6), torch.float16: (6, 14), torch.float32: (16, 28)}, 2048

_PANEL_OUTPUTS = 32

# A matrix w [outputs, width], at least 32 outputs, and its product y [T, outputs].
MATRIX = np.dtype([(name, np.int64) for name in ("w", "w_row", "y", "outputs", "panels")])
# What the loop is given: kind of the weights, x, T, width and columns of a block (multiples of 32),
# rows of a block (a multiple of 16), groups of threads with different rows, memory and bytes of a
# thread's share of it (`amx_loop.scratch_bytes`), panels of all matrices, and the matrices.
Products = namedtuple(
    "Products",
    "kind x x_row count width block rows groups memory share panels num_matrices matrices",
)

_thread_local = threading.local()


def amx_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor | None:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; None where there is
    no way.

    x, bias: in float32; weight: float16, bfloat16 or float32, rows of neighbouring elements.
    batch_invariant: it takes few rows as well, and the few outputs that a part of a streamed matrix
        may have.
    """
    outputs = weight.shape[0]
    if batch_invariant and outputs < _PANEL_OUTPUTS and has_amx():
        weight = F.pad(weight, (0, 0, 0, _PANEL_OUTPUTS - outputs))
    products = amx_matmuls(x, [weight], batch_invariant)
    if products is None:
        return None
    y = products[0][:, :outputs].contiguous()
    return y if bias is None else y.add_(bias)


def amx_matmuls(
    x: Tensor, weights: Sequence[Tensor], batch_invariant: bool = False
) -> list[Tensor] | None:
    """x times each of some matrices of one dtype, as `amx_matmul`; x is divided once."""
    (count, width), dtype = x.shape, weights[0].dtype
    if (
        x.dtype != torch.float32
        or not count
        or not all(_takes(weight.dtype, *weight.shape) for weight in weights)
    ):
        return None
    if not all(
        operand.device.type == "cpu" and operand.stride(1) == 1 for operand in (x, *weights)
    ):
        return None
    if not all(weight.dtype == dtype and weight.shape[1] == width for weight in weights):
        return None
    least_rows = 1 if batch_invariant else _LEAST_ROWS[dtype][width >= _WIDE]
    if count < least_rows or (module := _loops()) is None:
        return None
    return _multiply(module, x, weights)


def has_amx() -> bool:
    """Return whether products on the host are by this unit, where it takes their shapes."""
    return _loops() is not None


def product_bytes(width: int) -> int:
    """Return the most bytes that a product with a matrix of this width takes besides its operands,
    on all threads.
    """
    module, threads = _loops(), torch.get_num_threads()
    if module is None:
        return 0
    sizes = range(32, _most_rows(width, threads) + 1, 32)
    return threads * max(
        module.scratch_bytes(rows, width, _block(module, rows, width)) for rows in sizes
    )


def _most_rows(width: int, threads: int) -> int:
    """Return the most rows of x that are divided at once."""
    return max(32, min(_ROWS, _MEMORY_BYTES // threads // (6 * width) // 32 * 32))


def _block(module: ModuleType, rows: int, width: int) -> int:
    """Return the columns of a block: all, or whole chains of sums, whose order depends on the width
    alone.
    """
    most = _CACHE_BYTES // (2 * module.PARTS * rows + module.PANEL_BYTES)
    chain = module.CHAIN_STEPS * module.DEPTH
    return width if width <= most else most // chain * chain


def _multiply(module: ModuleType, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    count, width = x.shape
    outputs = [weight.shape[0] for weight in weights]
    products = [empty((count, number)) for number in outputs]
    panels = [-(-number // module.PANEL) for number in outputs]
    matrices = np.zeros(len(weights), MATRIX)
    matrices["w"] = [weight.data_ptr() for weight in weights]
    matrices["w_row"] = [weight.element_size() * weight.stride(0) for weight in weights]
    matrices["y"] = [y.data_ptr() for y in products]
    matrices["outputs"], matrices["panels"] = outputs, panels
    threads = team_size(count * sum(outputs) * width // _THREAD_PRODUCTS)
    groups = _row_groups(count, threads)
    # Equal blocks, nearly, of pairs of tiles.
    group_rows = -(-count // groups)
    rows = -(-group_rows // (-(-group_rows // _most_rows(width, threads)) * 32)) * 32
    block = _block(module, rows, width)
    share = module.scratch_bytes(rows, width, block)
    given = Products(
        kind=KINDS[weights[0].dtype],
        x=x.data_ptr(),
        x_row=4 * x.stride(0),
        count=count,
        width=width,
        block=block,
        rows=rows,
        groups=groups,
        memory=_memory(threads * share),
        share=share,
        panels=sum(panels),
        num_matrices=len(weights),
        matrices=matrices.ctypes.data,
    )
    run_on_threads(module.multiply, given, threads)
    return products


def _row_groups(count: int, threads: int) -> int:
    """Return into how many parts the rows are divided: as many threads as have enough of them, else
    parts of these.
    """
    most = max(1, count // _THREAD_ROWS)
    return max(
        groups for groups in range(1, threads + 1) if threads % groups == 0 and groups <= most
    )


def _memory(num_bytes: int) -> int:
    """Return the address of memory that is this thread's until its next product, at a line of the
    cache.
    """
    memory: Tensor | None = getattr(_thread_local, "memory", None)
    if memory is None or memory.numel() < num_bytes + 63:
        memory = _thread_local.memory = torch.empty(num_bytes + 63, dtype=torch.uint8, device="cpu")
    return -(-memory.data_ptr() // 64) * 64


def _takes(dtype: torch.dtype, outputs: int, width: int) -> bool:
    # The width is whole steps of the unit (`amx_loop`).
    return dtype in KINDS and width % 32 == 0 and width > 0 and outputs >= _PANEL_OUTPUTS


def _loops() -> ModuleType | None:
    return loops() if _has_unit() else None


@cache
def _has_unit() -> bool:
    """Return whether the processor has the unit and the system lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    has_unit = getattr(imported("flexgen_helm.kernels.emit"), "HAS_AMX", False)
    return has_unit and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Sums of one term, which nothing rounds: of numbers that have all bits, in x and in the
    weight.
    """
    number = torch.arange(64 * 64, device="cpu").mul(2654435761)
    bits = number.remainder(1 << 25).sub(1 << 24).view(64, 64)
    one_term = torch.eye(64, dtype=torch.int64, device="cpu")[
        torch.arange(64, device="cpu").mul(7).remainder(64)
    ]
    for dtype in KINDS:
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
