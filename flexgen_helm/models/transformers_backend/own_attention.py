"""Attention that modules compute in their own code, as two products around a softmax, becomes a
call of the engine's.

    module   matmul(q, kᵀ)    / √D  + mask  softmax  dropout    matmul(…, v)
    here     Scores(q, k)     noted         the same Scores     attend(q, k, v)

Whatever else a module does with its scores is refused by name.

Shapes: T tokens, H heads, D elements of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall, Bindings, Mask

_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
_SOFTMAX = {F.softmax, torch.softmax}


class Scores:
    """Stands for scores, the product of q and k times a factor; behind a softmax, for weights.

    q: [1, H, T, D] or [H, T, D]; k: [1, H, D, T] or [H, D, T], transposed as the module has it.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        scale: Any = 1.0,
        mask: Mask | None = None,
        are_weights: bool = False,
    ) -> None:
        self.q, self.k, self.scale, self.mask, self.are_weights = q, k, scale, mask, are_weights
        self.shape, self.dtype = torch.Size((*q.shape[:-1], k.shape[-1])), q.dtype
        self.device = torch.device("cpu")  # of the least number that a module clamps scores to

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedArchitectureError(f"it takes {func.__name__} of scores")

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedArchitectureError(f"it takes {name} of scores")

    def __mul__(self, factor: Any) -> Scores:
        return self._scaled(factor, self.scale * factor)

    def __truediv__(self, divisor: Any) -> Scores:
        return self._scaled(divisor, self.scale / divisor)

    def _scaled(self, factor: Any, scale: Any) -> Scores:
        if self.are_weights or (isinstance(factor, Tensor) and factor.numel() != 1):
            raise UnsupportedArchitectureError("it scales scores by head, or weights")
        return Scores(self.q, self.k, scale, self.mask)

    def __add__(self, mask: Any) -> Scores:
        if self.are_weights or not isinstance(mask, Mask):
            raise UnsupportedArchitectureError("it adds more to scores than a mask")
        return Scores(self.q, self.k, self.scale, mask)

    def softmax(self, dim: int, **named: Any) -> Scores:
        if self.are_weights or dim not in (-1, len(self.shape) - 1):
            raise UnsupportedArchitectureError("it takes another softmax of scores than over keys")
        return Scores(self.q, self.k, self.scale, self.mask, are_weights=True)

    def __matmul__(self, values: Tensor) -> Tensor:
        return torch.matmul(self, values)  # type: ignore[arg-type]  # to `OwnAttention`

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # Casts and reshapes around the softmax change nothing here.
    def to(self, *kinds: Any) -> Scores:
        return self

    def view(self, *shape: Any) -> Scores:
        return self

    float = view


class OwnAttention(TorchFunctionMode):
    """Let `bindings.attend` compute what modules, run meanwhile, have as code of their own."""

    def __init__(self, bindings: Bindings) -> None:
        super().__init__()
        self._bindings = bindings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, Scores):
            if func is F.dropout:
                return args[0]
            if (  # a clamp to the least number, which changes nothing
                func is torch.max
                and args[1].numel() == 1
                and float(args[1]) <= torch.finfo(args[0].dtype).min
            ):
                return args[0]
            if func in _SOFTMAX:
                return args[0].softmax(*args[1:], **kwargs)
            if func in _PRODUCTS and args[0].are_weights:
                return self._attend(args[0], args[1])
        if func in _PRODUCTS and _are_queries_and_keys(*args[:2]):
            return Scores(args[0], args[1])
        if func is torch.baddbmm and _are_queries_and_keys(*args[1:3]):
            # on the meta device shapes pass without values
            if kwargs.get("beta", 1) and not args[0].is_meta and args[0].any():
                raise UnsupportedArchitectureError("it adds more to scores than a mask")
            return Scores(args[1], args[2], kwargs.get("alpha", 1.0))
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, scores: Scores, v: Tensor) -> Tensor:
        attend = self._bindings.attend
        assert attend is not None
        q, k, values = (
            x.flatten(0, -3).transpose(0, 1) for x in (scores.q, scores.k.transpose(-1, -2), v)
        )
        mask = scores.mask or Mask(is_causal=False)
        out = attend(AttentionCall(q, k, values, mask, scores.scale)).transpose(0, 1)
        return out.view(*v.shape[:-3], *out.shape)

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None, **named: Any,
    ) -> Tensor:  # fmt: skip
        """Attend as `F.scaled_dot_product_attention`, whose parameters these are."""
        mask = attn_mask if attn_mask is not None else Mask(is_causal=is_causal)
        scores = Scores(q, k.transpose(-1, -2), q.shape[-1] ** -0.5 if scale is None else scale)
        return self._attend(scores + mask, v)


def _are_queries_and_keys(q: Any, k: Any) -> bool:
    """Whether a product is of the queries and the transposed keys of the same tokens."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() >= 3):
        return False
    return q.shape[-2] == k.shape[-1] and q.shape[-1] == k.shape[-2]
