"""Small tensors of a batch: token ids, positions, indices, sampling parameters. They reach the
device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

Integers = Sequence[int]


def upload(
    device: torch.device, integers: Sequence[Integers], floats: Sequence[Sequence[float]] = ()
) -> list[Tensor]:
    """Return lists of numbers as tensors on the device: first int64, then float64.

    The copy is from pinned memory, so that the host does not wait for it. If the host computes,
    there is none.
    """
    flat = torch.tensor([*chain.from_iterable(integers)], dtype=torch.int64)
    if floats:
        flat = torch.cat(
            (
                flat,
                torch.tensor([*chain.from_iterable(floats)], dtype=torch.float64).view(torch.int64),
            )
        )
    if device.type != "cpu":
        pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        flat = pinned.to(device, non_blocking=True)
    parts = flat.split([len(numbers) for numbers in (*integers, *floats)])
    return [*parts[: len(integers)], *(part.view(torch.float64) for part in parts[len(integers) :])]


class Uploaded:
    """Integers that host and device know; on_device: int64, set by `Uploads.copy`."""

    on_device: Tensor

    def __init__(self, numbers: Integers) -> None:
        self.numbers = numbers

    @cached_property
    def on_host(self) -> Tensor:
        return (
            torch.tensor(self.numbers, dtype=torch.int64)
            if self.on_device.device.type != "cpu"
            else self.on_device
        )

    def on(self, device: torch.device) -> Tensor:
        return self.on_host if device.type == "cpu" else self.on_device


class Uploads:
    """Collects lists of integers, and copies them together."""

    def __init__(self) -> None:
        self._added: list[Uploaded] = []

    def add(self, numbers: Integers) -> Uploaded:
        """Return what has the tensors of a list after `copy`."""
        self._added.append(Uploaded(numbers))
        return self._added[-1]

    def copy(self, device: torch.device) -> None:
        lists = [added.numbers for added in self._added]
        for added, tensor in zip(self._added, upload(device, lists)):
            added.on_device = tensor
