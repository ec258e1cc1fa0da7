"""Small tensors of a batch: token ids, positions, indices, sampling parameters. They reach the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import chain

import torch
from torch import Tensor

Numbers = SequenceOf[SequenceOf[int]]


def host_and_device(
    device: torch.device, integers: Numbers, floats: SequenceOf[SequenceOf[float]] = ()
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return lists of numbers as tensors on the host and on the device: first int64, then float64.

    The copy is from pinned memory, so that the host does not wait for it. If the host computes, there is none.
    """
    flat = torch.tensor([*chain.from_iterable(integers)], dtype=torch.int64)
    if floats:
        flat = torch.cat((flat, torch.tensor([*chain.from_iterable(floats)], dtype=torch.float64).view(torch.int64)))
    copied = flat
    if device.type != "cpu":
        flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        copied = flat.to(device, non_blocking=True)
    sizes = [len(numbers) for numbers in (*integers, *floats)]
    host, on_device = (
        tuple(
            part if number < len(integers) else part.view(torch.float64)
            for number, part in enumerate(tensor.split(sizes))
        )
        for tensor in (flat, copied)
    )
    return host, on_device
