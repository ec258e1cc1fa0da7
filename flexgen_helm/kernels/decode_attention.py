"""Attention of decoding tokens on the host, each over its own part of the cache as it rests.

A token takes as long as its keys and values take to come from memory, so they are read once for all query heads that
share them, and 16 bits are half of the bytes of a float32 copy.

Shapes: T tokens, Hq query heads, Hk key heads, S keys, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.team import run_on_threads
from flexgen_helm.kernels.trial import tried

Integers = np.ndarray[Any, np.dtype[np.int64]]

_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Keys and values that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 14


class Row(NamedTuple):
    """What a token sees of its own cache.

    first: key that it sees; last: its own.
    follows: it has a result over earlier keys, which is merged with this one.
    """

    first: int
    last: int
    follows: bool = False


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows as the compiled function reads them; the same for all layers of one window.

    rows: [B, 4] (`decode_loop.attend_rows`).
    pieces: of all rows; keys: that they see.
    """

    rows: Integers
    pieces: int
    keys: int

    @classmethod
    def of(cls, rows: Iterable[Row], piece_keys: int | None = None) -> RowTable:
        """piece_keys: None for those of the compiled function."""
        if piece_keys is None:
            compiled = _compiled()
            assert compiled is not None
            piece_keys = compiled.PIECE_KEYS
        table, pieces, keys = [], 0, 0
        for row in rows:
            table.append((row.first, row.last + 1, pieces, row.follows))
            pieces += row.last // piece_keys - row.first // piece_keys + 1
            keys += row.last + 1 - row.first
        return cls(np.array(table, np.int64), pieces, keys)


def can_attend_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend_rows` takes caches in `dtype` on a device."""
    compiled = _compiled() if device.type == "cpu" and dtype in _KINDS else None
    return compiled is not None and (compiled.CONVERTS_HALVES or dtype != torch.float16)


def attend_rows(
    table: RowTable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    before: tuple[Tensor, Tensor] | None = None,
    compiled: ModuleType | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D], k and v [B, Hk, S, D] -> output [B, Hq, D], log-sum-exp [B, Hq] in float32.

    `can_attend_rows` is true of k and v, whose elements of a head are neighbours.

    slopes: [Hq] of ALiBi, in float32, neighbours.
    before: output and log-sum-exp over earlier keys, in float32, for the rows that follow some; both are written.
        None: no row has any.
    compiled: on trial; None: what has passed its trial.
    """
    if compiled is None:
        assert can_attend_rows(k.device, k.dtype) and k.dtype == v.dtype and k.stride(-1) == v.stride(-1) == 1
        compiled = _compiled()
        assert compiled is not None
    assert len(table.rows) == len(q) and table.rows[:, 1].max() <= k.shape[2]
    (rows, heads, dim), key_heads = q.shape, k.shape[1]
    q = q.float()
    if q.stride(2) != 1:
        q = q.contiguous()
    out, lse = before if before is not None else (torch.empty(q.shape), torch.empty((rows, heads)))
    strides = [x.element_size() * x.stride(axis) for x in (k, v) for axis in range(3)]
    cache = np.array([k.data_ptr(), v.data_ptr(), *strides], np.int64)
    factors = np.array([scale, softcap or 0.0], np.float32)
    parts = torch.empty(table.pieces * heads * (dim + 1))
    counters = torch.zeros(table.pieces * key_heads, dtype=torch.int64)
    threads = max(1, min(torch.get_num_threads(), table.keys * key_heads * dim // _THREAD_ELEMENTS))
    floats = compiled.row_scratch_floats(dim)
    scratch = torch.empty(threads * floats)
    arguments = [table.rows.ctypes.data, rows]
    for x in (q, out):
        arguments += [x.data_ptr(), 4 * x.stride(0), 4 * x.stride(1)]
    arguments += [lse.data_ptr(), 4 * lse.stride(0), cache.ctypes.data, key_heads, heads // key_heads, dim]
    arguments += [_KINDS[k.dtype], factors.ctypes.data, 0 if slopes is None else slopes.data_ptr()]
    arguments += [parts.data_ptr(), counters.data_ptr(), scratch.data_ptr(), 4 * floats, before is not None]
    run_on_threads(compiled.address_of(compiled.attend_rows), arguments, threads)
    return out, lse


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("attention of decoding tokens", _is_right)


def _is_right(compiled: ModuleType) -> bool:
    """Compare rows of one piece and of several, with a window and without, in each dtype, with the formula."""
    draw = torch.Generator().manual_seed(0)
    heads, dim, size = 2, 2 * compiled.LANES + 4, compiled.PIECE_KEYS + 70
    q, slopes = torch.randn(3, 3 * heads, dim, generator=draw), torch.rand(3 * heads, generator=draw)
    rows = [Row(0, 6), Row(0, size - 1), Row(31, size - 9)]
    table = RowTable.of(rows, compiled.PIECE_KEYS)
    for dtype in _KINDS if compiled.CONVERTS_HALVES else (torch.bfloat16, torch.float32):
        k, v = (torch.randn(3, heads, size, dim, generator=draw).to(dtype) for _ in "kv")
        for softcap, biases in ((None, None), (2.0, slopes)):
            out, lse = attend_rows(table, q, k, v, 0.3, softcap, biases, None, compiled)
            for number, row in enumerate(rows):
                own = slice(row.first, row.last + 1)
                keys, values = (x[number, :, own].float().repeat_interleave(3, 0) for x in (k, v))
                scores = (keys @ q[number, :, :, None])[..., 0] * 0.3
                if biases is not None:
                    scores = torch.tanh(scores / 2.0) * 2.0 + biases[:, None] * torch.arange(1 - scores.shape[1], 1)
                expected = (torch.softmax(scores, -1)[:, None] @ values)[:, 0], torch.logsumexp(scores, -1)
                for one, right in zip((out[number], lse[number]), expected):
                    if not torch.allclose(one, right, rtol=1e-4, atol=1e-5):
                        return False
    return True
