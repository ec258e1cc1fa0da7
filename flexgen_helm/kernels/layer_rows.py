"""What a layer computes between its products: norms, rotations, gates, and the storing of new
tokens.

PyTorch takes 2 to 14 operations for each of them, and a pass of few rows would spend more time on
starting operations than on computing. A compiled loop (`layer_loop`) is one call; it takes float32
on the host. Functions use the loop where it takes their tensors, and PyTorch elsewhere.

Shapes: T tokens, N elements of a row, D elements of a head.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.kernels.team import constants, empty, run_on_threads
from flexgen_helm.kernels.trial import Loops

# Least work of a thread, for which it is worth waking.
_THREAD_ELEMENTS = 1 << 15

# Arguments of the loops of `layer_loop`: addresses, strides in bytes, and sizes.
NormArgs = namedtuple("NormArgs", "x x_stride y weight rows width constants")
RotateArgs = namedtuple(
    "RotateArgs", "x x_token_stride x_head_stride y cos sin tokens heads width rotated"
)
GateArgs = namedtuple("GateArgs", "activation x up elements")
PutArgs = namedtuple(
    "PutArgs",
    "rows row_stride head_stride target slot_stride unit_stride target_head_stride slots units "
    "count heads width",
)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """Divide each row by its root mean square, times `weight` (Zhang and Sennrich, 2019); return
    the same shape.

    x: [..., N]; float32 within, whatever its precision.
    weight: [N], of the same dtype; None: all ones.
    plus_one: multiply with weight + 1, added in float32: in 16 bits the sum would lose digits of
        the weight.
    """
    width = x.shape[-1]
    is_supported = _is_host_float(x) and (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1))
    if (
        not is_supported
        or (weight is not None and not _is_float_array(weight, width))
        or (module := loops()) is None
    ):
        if plus_one and weight is not None:
            return F.rms_norm(x.float(), (width,), weight.float() + 1.0, eps).to(x.dtype)
        return F.rms_norm(x, (width,), weight, eps)
    y = empty(x.shape)
    weight = _ones(width) if weight is None else weight
    args = NormArgs(
        x=x.data_ptr(),
        x_stride=4 * x.stride(0) if x.dim() == 2 else 4 * width,
        y=y.data_ptr(),
        weight=weight.data_ptr(),
        rows=x.numel() // width,
        width=width,
        constants=constants(eps, float(plus_one)).ctypes.data,
    )
    run_on_threads(module.norm_rows, args, x.numel() // _THREAD_ELEMENTS)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the first R elements of each head against each other.

    x: [T, heads, D]; cos, sin: [T, 1, R].
    """
    size = cos.shape[-1]
    is_supported = (
        _is_host_float(x)
        and x.stride(2) == 1
        and _is_float_array(cos, len(x) * size)
        and _is_float_array(sin, len(x) * size)
    )
    if not is_supported or size > x.shape[-1] or (module := loops()) is None:
        if size < x.shape[-1]:
            return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
        first, second = slice(0, size // 2), slice(size // 2, size)
        y = x * cos
        y[..., first].addcmul_(x[..., second], sin[..., first], value=-1)
        y[..., second].addcmul_(x[..., first], sin[..., second])
        return y
    y = empty(x.shape)
    tokens, heads, width = x.shape
    args = RotateArgs(
        x=x.data_ptr(),
        x_token_stride=4 * x.stride(0),
        x_head_stride=4 * x.stride(1),
        y=y.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        tokens=tokens,
        heads=heads,
        width=width,
        rotated=size,
    )
    run_on_threads(module.rotate_rows, args, x.numel() // _THREAD_ELEMENTS)
    return y


def gate(activation: str, x: Tensor, up: Tensor | None = None) -> Tensor | None:
    """Compute activation(x), times `up` if given, both [T, N], in place; return x.

    None where no loop computes it, and x is unchanged: for other activations than silu and
    gelu_tanh, and tensors that the loop does not take.
    """
    is_supported = all(
        _is_host_float(z) and z.shape == x.shape and z.is_contiguous()
        for z in (x, up)
        if z is not None
    )
    if not is_supported or (module := loops()) is None or activation not in module.ACTIVATIONS:
        return None
    args = GateArgs(
        activation=module.ACTIVATIONS.index(activation),
        x=x.data_ptr(),
        up=0 if up is None else up.data_ptr(),
        elements=x.numel(),
    )
    run_on_threads(module.gate_rows, args, x.numel() // _THREAD_ELEMENTS)
    return x


def put_rows(target: Tensor, slots: Tensor, units: Tensor, rows: Tensor) -> Tensor:
    """Copy rows [n, heads, D] to target[slots, units]; return the target.

    target: a view [S, U, heads, D] of a cache: S slots of U units each (`kv_cache.storage`).
    slots, units: [n], int64.
    """
    is_supported = (
        _is_host_float(target)
        and _is_host_float(rows)
        and target.dim() == 4
        and target.stride(3) == 1 == rows.stride(-1)
    )
    is_supported = is_supported and all(
        index.dtype == torch.int64 and index.is_contiguous() for index in (slots, units)
    )
    if not is_supported or not len(slots) or (module := loops()) is None:
        target[slots, units] = rows
        return target
    assert len(slots) == len(units) == len(rows) and rows.shape[1:] == target.shape[2:]
    count, heads, width = rows.shape
    args = PutArgs(
        rows=rows.data_ptr(),
        row_stride=4 * rows.stride(0),
        head_stride=4 * rows.stride(1),
        target=target.data_ptr(),
        slot_stride=4 * target.stride(0),
        unit_stride=4 * target.stride(1),
        target_head_stride=4 * target.stride(2),
        slots=slots.data_ptr(),
        units=units.data_ptr(),
        count=count,
        heads=heads,
        width=width,
    )
    run_on_threads(module.put_rows, args, rows.numel() // _THREAD_ELEMENTS)
    return target


def _is_float_array(operand: Tensor, elements: int) -> bool:
    """Return whether a loop can read the operand as an array of so many elements."""
    return _is_host_float(operand) and operand.is_contiguous() and operand.numel() == elements


def _is_host_float(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


@cache
def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.float32, device="cpu")


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Each of the loops, with a width that is not whole vectors; `Loops` compares it with PyTorch
    before it is used.
    """
    draw, width = torch.Generator().manual_seed(0), 86

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    x, weight, up = normal(3, width), normal(width), normal(3, width)
    yield partial(rms_norm, x, weight, 0.1, True)
    yield partial(rotate, x.view(3, 1, width), *normal(2, 3, 1, width - 4))
    yield lambda: _gated("silu", 12 * x, up)
    yield lambda: _gated("gelu_tanh", 12 * x, up)
    yield lambda: _gated("gelu_tanh", 12 * x, None)
    slots, units = torch.tensor([[2, 0], [3, 1]], device="cpu")
    rows, target = normal(2, 2, width), normal(3, 2, 4, width)
    yield lambda: put_rows(target.clone().transpose(1, 2), slots, units, rows)


def _gated(activation: str, x: Tensor, up: Tensor | None) -> Tensor:
    """Return what `gate` does, which leaves it to PyTorch where no loop is there."""
    formula = F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")
    y = gate(activation, x, up)
    return y if y is not None else formula if up is None else formula * up


loops = Loops("norms, rotations and gates", "flexgen_helm.kernels.layer_loop", _examples)
