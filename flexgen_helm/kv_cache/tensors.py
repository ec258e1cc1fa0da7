"""Memory of caches."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros: masked positions are multiplied by 0 and must be finite.

    On the CPU they come from numpy, which leaves zeroing to the system: pages cost nothing until they are written,
    so a sequence that ends early never costs its whole slot. `torch.zeros` writes them all at once.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, device=device, dtype=dtype)
