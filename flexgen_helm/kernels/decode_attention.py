"""Attention of decoding tokens on the host, each over its own part of the cache as it rests.

A token takes as long as its keys and values take to come from memory, so they are read once for all query heads that
share them, and 16 bits are half of the bytes of a float32 copy.

Shapes: T tokens, Hq query heads, Hk key heads, S keys, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.team import empty, run_on_threads, team_size
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
    """Rows as the compiled function reads them, and memory that it needs; the same for all layers of one window.

    rows: [B, 4] (`decode_loop.attend_rows`); address: of them.
    pieces: of all rows; keys: that they see; longest: the most keys that a row's cache must have.
    """

    rows: Integers
    address: int
    pieces: int
    keys: int
    longest: int
    _workspaces: dict[tuple[int, ...], Workspace] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row], piece_keys: int | None = None) -> RowTable:
        """piece_keys: None for those of the compiled function."""
        if piece_keys is None:
            compiled = _compiled()
            assert compiled is not None
            piece_keys = compiled.PIECE_KEYS
        numbers, pieces, keys = [], 0, 0
        for row in rows:
            numbers.append((row.first, row.last + 1, pieces, row.follows))
            pieces += row.last // piece_keys - row.first // piece_keys + 1
            keys += row.last + 1 - row.first
        table = np.array(numbers, np.int64)
        return cls(table, table.ctypes.data, pieces, keys, max(end for _, end, *_ in numbers))

    def workspace(self, heads: int, key_heads: int, dim: int, floats: int) -> Workspace:
        """floats: of a thread's scratch memory."""
        threads = team_size(self.keys * key_heads * dim // _THREAD_ELEMENTS)
        needs = threads, self.pieces * heads * (dim + 1), self.pieces * key_heads, threads * floats
        if needs not in self._workspaces:
            _, parts, counters, scratch = needs
            memory = empty([parts]), torch.zeros(counters, dtype=torch.int64, device="cpu"), empty([scratch])
            self._workspaces[needs] = Workspace(threads, memory, tuple(x.data_ptr() for x in memory))
        return self._workspaces[needs]


class Workspace(NamedTuple):
    """Partial results, counters, which are 0 between two calls, and scratch memory of so many threads."""

    threads: int
    memory: tuple[Tensor, Tensor, Tensor]
    addresses: tuple[int, ...]


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
    assert len(table.rows) == len(q) and table.longest <= k.shape[2]
    (rows, heads, dim), key_heads = q.shape, k.shape[1]
    q = q.float()
    if q.stride(2) != 1:
        q = q.contiguous()
    out, lse = before if before is not None else (empty(q.shape), empty((rows, heads)))
    floats = compiled.row_scratch_floats(dim)
    work = table.workspace(heads, key_heads, dim, floats)
    arguments = [table.address, rows]
    for x in (q, out):
        row, head, _ = x.stride()
        arguments += (x.data_ptr(), 4 * row, 4 * head)
    arguments += (lse.data_ptr(), 4 * lse.stride(0), key_heads, heads // key_heads, dim, _KINDS[k.dtype])
    arguments += (scale_and_cap(scale, softcap).ctypes.data, 0 if slopes is None else slopes.data_ptr())
    arguments += (*work.addresses, 4 * floats, before is not None, k.data_ptr(), v.data_ptr())
    size = k.element_size()
    arguments += (size * stride for x in (k, v) for stride in x.stride()[:3])
    run_on_threads(compiled.address_of(compiled.attend_rows), arguments, work.threads)
    return out, lse


@cache
def scale_and_cap(scale: float, softcap: float | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return both where compiled functions read them, for as long as the process runs; no soft cap is 0."""
    return np.array([scale, softcap or 0.0], np.float32)


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
