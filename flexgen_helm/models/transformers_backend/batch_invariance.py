"""Functions of modules whose results on the host would follow the batch.

PyTorch computes the last elements of a vectorized loop by another formula, and how a library sums a product may follow
the number of rows. So a token's bits would depend on the other tokens of its batch.
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
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled.clamp_max(threshold))) / beta)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return F.gelu(x)
    return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))  # sqrt(8 / pi)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() != 2 or not weight.dtype == x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    return linear(x.reshape(-1, x.shape[-1]), weight, bias, batch_invariant=True).view(*x.shape[:-1], -1)


_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.sigmoid: _sigmoid,
    Tensor.sigmoid: _sigmoid,
    F.silu: _silu,
    F.softplus: _softplus,
    F.gelu: _gelu,
    F.linear: _linear,
}


class BatchInvariant(TorchFunctionMode):
    """Compute these functions of tensors on the host in one way for each row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
