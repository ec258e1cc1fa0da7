"""Replace an RMS norm of `transformers`, which takes up to eight operations, by one fused operation."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from flexgen_helm.models.decoder import rms_norm

_TRIAL_ROWS = 4


def rms_norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the forward pass by `rms_norm` of a module that computes a root-mean-square norm; None for others.

    Classes have names of their own, and some add one to the weight. So the module is tried, on rows that `eps` matters
    for.
    """
    constants = [value for value in module.__dict__.values() if isinstance(value, float)]
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or module._buffers or module._modules:
        return None
    if len(constants) != 1 or constants[0] <= 0 or len(signature(module.forward).parameters) != 1:
        return None
    eps, random = constants[0], torch.Generator().manual_seed(0)
    trial_weight = torch.randn(len(weight), generator=random)
    x = torch.randn((_TRIAL_ROWS, len(weight)), generator=random) * eps**0.5
    trial: Any = copy(module)
    trial._parameters = {"weight": trial_weight}
    expected = trial(x)
    for plus_one in (False, True):
        if torch.allclose(rms_norm(x, trial_weight, eps, plus_one), expected, rtol=1e-4, atol=1e-6):
            return _Norm(module, eps, plus_one)
    return None


class _Norm:
    def __init__(self, module: nn.Module, eps: float, plus_one: bool) -> None:
        self._parameters, self._eps, self._plus_one, self._own = module._parameters, eps, plus_one, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        weight: Any = self._parameters["weight"]
        if weight.dtype != x.dtype:  # some weights stay in float32
            return self._own(x)
        return rms_norm(x, weight, self._eps, self._plus_one)
