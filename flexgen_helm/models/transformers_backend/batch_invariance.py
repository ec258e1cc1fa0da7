"""Functions that modules call, computed so that a token's bits do not depend on its batch.

On the host, PyTorch computes the last elements of a vectorized loop by another formula, and how a
library sums a product may follow the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexgen_helm.kernels.products import linear


def _sigmoid(x: Tensor) -> Tensor:
    return (torch.exp(-x) + 1).reciprocal()


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return x * _sigmoid(x)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x * beta
    return torch.where(
        scaled > threshold, x, torch.log1p(torch.exp(scaled.clamp_max(threshold))) / beta
    )


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return F.gelu(x)
    return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))  # sqrt(8 / pi)


def _mish(x: Tensor, inplace: bool = False) -> Tensor:
    return x * torch.tanh(_softplus(x))


def _elu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp_max(0)))


def _pow(x: Any, exponent: Any) -> Tensor:
    is_number = (
        isinstance(x, Tensor) and x.dtype == torch.float32 and isinstance(exponent, (int, float))
    )
    if not is_number or exponent in (-2, -1, -0.5, 0, 0.5, 1, 2, 3):  # products and roots
        return torch.pow(x, exponent)
    if float(exponent).is_integer():  # of negative numbers, too
        return torch.pow(x.double(), exponent).float()
    return torch.exp(torch.log(x.double()) * exponent).float()


# PyTorch sums a longer row that is alone by several threads.
_SUMMED_AT_ONCE = 1 << 15


def _is_long(x: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether the rows of x are summed, and are longer than `_SUMMED_AT_ONCE`."""
    dim = (args or (kwargs.get("dim"),))[0]
    return x.dim() > 0 and x.shape[-1] > _SUMMED_AT_ONCE and dim in (-1, [-1], (-1,))


def _sum(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _is_long(x, args, kwargs):
        return torch.sum(x, *args, **kwargs)
    first, rest = x.tensor_split([_SUMMED_AT_ONCE], -1)
    return torch.sum(first, *args, **kwargs) + _sum(rest, *args, **kwargs)


def _mean(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _is_long(x, args, kwargs):
        return torch.mean(x, *args, **kwargs)
    return _sum(x, *args, **kwargs) / x.shape[-1]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() != 2 or not weight.dtype == x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    return linear(x.reshape(-1, x.shape[-1]), weight, bias, batch_invariant=True).view(
        *x.shape[:-1], -1
    )


_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.sigmoid: _sigmoid,
    Tensor.sigmoid: _sigmoid,
    F.silu: _silu,
    F.softplus: _softplus,
    F.gelu: _gelu,
    F.mish: _mish,
    F.elu: _elu,
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    F.linear: _linear,
}


class BatchInvariant(TorchFunctionMode):
    """Compute these functions of tensors on the host in one way for each row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
