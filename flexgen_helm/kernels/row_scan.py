"""The most probable token of rows of logits and what normalizes them, on the host, by a compiled loop."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from flexgen_helm.kernels.team import run_on_threads
from flexgen_helm.kernels.trial import tried

# Elements that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 15


def largest_tokens(logits: Tensor) -> Tensor | None:
    """Return the first largest token of each row, [R, V] -> [R]; None where there is no way, or no number."""
    compiled = _compiled() if _suits(logits) else None
    if compiled is None:
        return None
    places, _, _ = _scan(compiled, logits, with_sums=False)
    return None if bool((places < 0).any()) else places


def log_sums(logits: Tensor) -> Tensor | None:
    """Return log sum exp of each row, [R, V] -> [R, 1]; None where there is no way, or no number."""
    compiled = _compiled() if _suits(logits) else None
    if compiled is None:
        return None
    places, largest, sums = _scan(compiled, logits, with_sums=True)
    return None if bool((places < 0).any()) else (largest + sums.log())[:, None]


def _scan(compiled: ModuleType, logits: Tensor, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = logits.shape
    threads = max(1, min(torch.get_num_threads(), rows, logits.numel() // _THREAD_ELEMENTS))
    places = torch.empty(rows, dtype=torch.int64)
    largest, sums = torch.empty(rows), torch.empty(rows)
    memory = torch.empty(256 * threads, dtype=torch.uint8)
    out = [tensor.data_ptr() for tensor in (places, largest, sums, memory)]
    arguments = [logits.data_ptr(), 4 * logits.stride(0), rows, width, with_sums, *out]
    run_on_threads(compiled.address_of(compiled.scan_rows), arguments, threads)
    return places, largest, sums


def _suits(logits: Tensor) -> bool:
    on_host = logits.device.type == "cpu" and logits.dtype == torch.float32
    return on_host and logits.dim() == 2 and logits.numel() > 0 and logits.stride(1) == 1


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("the largest logits", _is_right)


def _is_right(compiled: ModuleType) -> bool:
    rows = torch.arange(3 * 150).mul(2654435761).remainder(997).float().div(100).view(3, 150)
    places, largest, sums = _scan(compiled, rows, with_sums=True)
    expected = rows.double().logsumexp(-1)
    found = largest.double() + sums.double().log()
    return torch.equal(places, rows.argmax(-1)) and bool((found - expected).abs().max() < 1e-5)
