"""What a layer computes on the host between its products: norms, rotations, gates, and the storing of new tokens.

PyTorch takes 2 to 14 operations for each of them. A pass of few rows would spend more time on starting operations than
on computing them. A compiled loop is one call, and reads what many rows have once.

Shapes: T tokens, N elements of a row, D elements of a head.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.kernels.team import empty, run_on_threads
from flexgen_helm.kernels.trial import tried

# Elements that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 15


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor | None:
    """x [..., N] in float32 by its root mean square, times weight [N], plus one if so -> the same shape.

    None where there is no way.
    """
    if not _is_float(x) or (weight is not None and not _suits(weight, x.shape[-1])):
        return None
    compiled = _compiled() if x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1) else None
    return None if compiled is None else _normed(compiled, x, weight, eps, plus_one)


def _normed(compiled: ModuleType, x: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    width = x.shape[-1]
    y = empty(x.shape)
    weight = _ones(width) if weight is None else weight
    row_bytes = 4 * x.stride(0) if x.dim() == 2 else 4 * width
    constants = _constants(eps, float(plus_one)).ctypes.data
    arguments = [x.data_ptr(), row_bytes, y.data_ptr(), weight.data_ptr(), x.numel() // width, width, constants]
    run_on_threads(compiled.address_of(compiled.norm_rows), arguments, x.numel() // _THREAD_ELEMENTS)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Rotate the halves of the first elements of each head against each other: x [T, heads, D], cos and sin [T, 1, R].

    None where there is no way.
    """
    suits = _is_float(x) and x.stride(2) == 1 and cos.shape[-1] <= x.shape[-1]
    suits = suits and all(_suits(factors, len(x) * cos.shape[-1]) for factors in (cos, sin))
    compiled = _compiled() if suits else None
    return None if compiled is None else _rotated(compiled, x, cos, sin)


def _rotated(compiled: ModuleType, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = empty(x.shape)
    addresses = [x.data_ptr(), 4 * x.stride(0), 4 * x.stride(1), y.data_ptr(), cos.data_ptr(), sin.data_ptr()]
    arguments = [*addresses, *x.shape, cos.shape[-1]]
    run_on_threads(compiled.address_of(compiled.rotate_rows), arguments, x.numel() // _THREAD_ELEMENTS)
    return y


def gate(activation: str, x: Tensor, up: Tensor) -> Tensor | None:
    """activation(x) times up, both [T, N] -> x, overwritten; None where there is no way."""
    return _combined(activation, x, up) if activation in ("silu", "gelu_tanh") else None


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both [T, N] -> x, overwritten."""
    return x.add_(y) if _combined("add", x, y) is None else x


def _combined(kind: str, x: Tensor, y: Tensor) -> Tensor | None:
    suits = _is_float(x) and _is_float(y) and x.shape == y.shape and x.is_contiguous() and y.is_contiguous()
    compiled = _compiled() if suits else None
    if compiled is None:
        return None
    return _combine(compiled, kind, x, y)


def _combine(compiled: ModuleType, kind: str, x: Tensor, y: Tensor) -> Tensor:
    """kind: a constant's name of `layer_loop`, in small letters."""
    arguments = [getattr(compiled, kind.upper()), x.data_ptr(), y.data_ptr(), x.numel()]
    run_on_threads(compiled.address_of(compiled.combine_rows), arguments, x.numel() // _THREAD_ELEMENTS)
    return x


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """y [T, N] plus bias [N] -> y, overwritten."""
    suits = _is_float(y) and y.dim() == 2 and y.is_contiguous() and _suits(bias, y.shape[1])
    compiled = _compiled() if suits else None
    return y.add_(bias) if compiled is None else _add_bias(compiled, y, bias)


def _add_bias(compiled: ModuleType, y: Tensor, bias: Tensor) -> Tensor:
    arguments = [y.data_ptr(), bias.data_ptr(), *y.shape]
    run_on_threads(compiled.address_of(compiled.bias_rows), arguments, y.numel() // _THREAD_ELEMENTS)
    return y


def put_rows(target: Tensor, slots: Tensor, units: Tensor, rows: Tensor) -> bool:
    """Copy rows [n, heads, D] to target[slots, units], a view [S, U, heads, D]; false where there is no way.

    slots, units: [n], of 64 bits.
    """
    suits = _is_float(target) and _is_float(rows) and target.dim() == 4 and target.stride(3) == 1 == rows.stride(-1)
    suits = suits and all(own.dtype == torch.int64 and own.is_contiguous() for own in (slots, units))
    compiled = _compiled() if suits and len(slots) else None
    if compiled is not None:
        _put(compiled, target, slots, units, rows)
    return compiled is not None


def _put(compiled: ModuleType, target: Tensor, slots: Tensor, units: Tensor, rows: Tensor) -> None:
    assert len(slots) == len(units) == len(rows) and rows.shape[1:] == target.shape[2:]
    arguments = [rows.data_ptr(), 4 * rows.stride(0), 4 * rows.stride(1), target.data_ptr()]
    arguments += [4 * stride for stride in target.stride()[:3]]
    arguments += [slots.data_ptr(), units.data_ptr(), *rows.shape]
    run_on_threads(compiled.address_of(compiled.put_rows), arguments, rows.numel() // _THREAD_ELEMENTS)


def _suits(operand: Tensor, elements: int) -> bool:
    """Return whether an operand has so many elements, side by side: a loop reads so many without a check."""
    return _is_float(operand) and operand.is_contiguous() and operand.numel() == elements


def _is_float(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


@cache
def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.float32, device="cpu")


@cache
def _constants(*numbers: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(numbers, np.float32)


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("norms, rotations and gates", _is_right)


def _is_right(compiled: ModuleType) -> bool:
    """Compare each with its formula in float64, with a vector's elements and some that are left."""
    draw, width = torch.Generator().manual_seed(0), 5 * compiled.LANES + 6
    x, weight = torch.randn(3, width, generator=draw), torch.randn(width, generator=draw)
    exact = x.double()
    normed = exact / (exact.square().mean(-1, keepdim=True) + 0.1).sqrt() * (weight + 1.0).double()
    pairs = [(_normed(compiled, x, weight, 0.1, True), normed)]

    heads, (cos, sin) = x.view(3, 1, width), torch.randn(2, 3, 1, width - 4, generator=draw)
    half = (width - 4) // 2
    a, b, left = exact.view(3, 1, width).split((half, half, 4), -1)
    turned = torch.cat((a * cos[..., :half] - b * sin[..., :half], b * cos[..., half:] + a * sin[..., half:], left), -1)
    pairs.append((_rotated(compiled, heads, cos, sin), turned))

    inner, up = (12 * torch.randn(2, 2, 2 * compiled.LANES, generator=draw)).unbind()
    formulas = {"silu": F.silu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}
    for name, formula in formulas.items():
        pairs.append((_combine(compiled, name, inner.clone(), up), formula(inner.double()) * up.double()))
    pairs.append((_combine(compiled, "add", inner.clone(), up), inner.double() + up.double()))
    pairs.append((_add_bias(compiled, x.clone(), weight), exact + weight.double()))

    target = torch.zeros(3, 2, 4, width)
    slots, units, rows = torch.tensor([2, 0]), torch.tensor([3, 1]), torch.randn(2, 2, width, generator=draw)
    _put(compiled, target.transpose(1, 2), slots, units, rows)
    expected = torch.zeros_like(target)
    expected.transpose(1, 2)[slots, units] = rows
    return torch.equal(target, expected) and all(
        torch.allclose(own.double(), right, rtol=1e-5, atol=1e-6) for own, right in pairs
    )
