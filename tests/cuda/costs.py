"""What a run on the CUDA device in host memory costs the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flexgen_helm.engine.executor import Executor
from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from tests.cuda.device import Device
from tests.helpers.layers import replace_layers

# Copying threads wait for their copies and for the readers of a slot, here and nowhere else.
COPIES = ("offload/transfer_manager.py", "offload/prefetcher.py", "offload/experts.py")


@dataclass
class Costs:
    """Of one run.

    layers: launches of each decode layer.
    beside: launches of each pass besides those.
    waits, pageable: synchronizations and pageable copies, by source line; without those of `COPIES`.
    """

    layers: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    batches: int = 0
    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)


@contextmanager
def counted(device: Device) -> Iterator[Costs]:
    """Count what runs inside the passes."""
    costs, honest_run = Costs(), Executor.run
    for kept in (word_scales(torch.device("cuda:0")), word_zero_points(4, torch.device("cuda:0"))):
        assert kept.is_cuda  # tables that a process copies once

    def step(compute: Any, _: int, batches: Any) -> Any:
        before = sum(device.kernels.values())
        hidden = compute()
        if not any(batch.attend.metadata.prompts for batch in batches):
            costs.layers.append(sum(device.kernels.values()) - before)
        return hidden

    def run_pass(self: Executor, batches: Any, *arguments: Any, **named: Any) -> None:
        syncs, copies = device.syncs.copy(), device.pageable_copies.copy()
        kernels, layers = sum(device.kernels.values()), sum(costs.layers)
        honest_run(self, batches, *arguments, **named)
        costs.beside.append(sum(device.kernels.values()) - kernels - (sum(costs.layers) - layers))
        costs.batches += len(batches)
        for before, after, lines in (
            (syncs, device.syncs, costs.waits),
            (copies, device.pageable_copies, costs.pageable),
        ):
            is_wait = lines is costs.waits
            lines += [p for p in (after - before).elements() if not (is_wait and p.startswith(COPIES))]

    with pytest.MonkeyPatch.context() as patch:
        replace_layers(patch, step)
        patch.setattr(Executor, "run", run_pass)
        yield costs


def check(costs: Costs) -> None:
    assert len(costs.waits) == costs.batches and len(set(costs.waits)) == 1, costs.waits
    assert costs.waits[0].startswith("engine/executor.py")
    assert not costs.pageable
