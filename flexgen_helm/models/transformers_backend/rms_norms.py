"""Root-mean-square norms of `transformers` by one operation; their own code takes up to eight."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from flexgen_helm.kernels import layer_rows


def rms_norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a forward pass by `layer_rows.rms_norm` for a module that computes a root-mean-square
    norm; None for other modules.

    Classes have various names, and some add one to the weight. So the module is tried, on rows so
    small that its constant `eps` matters.
    """
    constants = [value for value in module.__dict__.values() if isinstance(value, float)]
    weight = module._parameters.get("weight")
    # Such a module has a weight and a constant, and takes hidden states, and nothing else of each.
    if (
        weight is None
        or weight.dim() != 1
        or len(module._parameters) != 1
        or module._buffers
        or module._modules
        or len(constants) != 1
        or constants[0] <= 0
        or len(signature(module.forward).parameters) != 1
    ):
        return None
    eps, random = constants[0], torch.Generator().manual_seed(0)
    trial_weight = torch.randn(len(weight), generator=random)
    x = torch.randn((4, len(weight)), generator=random) * eps**0.5
    trial: Any = copy(module)
    trial._parameters = {"weight": trial_weight}
    expected = trial(x)
    for plus_one in (False, True):
        found = layer_rows.rms_norm(x, trial_weight, eps, plus_one)
        if torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
            break
    else:
        return None
    parameters: Any = module._parameters  # the weight is another in every pass
    forward = module.forward

    def norm(x: Tensor) -> Tensor:
        weight = parameters["weight"]
        if weight.dtype != x.dtype:  # some weights stay in float32
            return forward(x)
        return layer_rows.rms_norm(x, weight, eps, plus_one)

    return norm
