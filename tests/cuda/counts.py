"""How often a run on the CUDA device in host memory launches and waits."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from flexgen_helm.engine.executor import Executor
from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from tests.helpers.layers import replace_layers

# Copying threads wait for their copies and for the readers of a slot, here and nowhere else.
COPIES = (
    "offload/copy_engine.py",
    "offload/transfer_manager.py",
    "offload/prefetcher.py",
    "offload/experts.py",
)


@dataclass
class Counts:
    """Of one run.

    layers: launches of each decode layer.
    beside: launches of each pass besides those.
    waits, pageable: synchronizations and pageable copies, by source line; without those of
        `COPIES`.
    """

    layers: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    batches: int = 0
    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)


@contextmanager
def counted(device):
    """Count what runs inside the passes."""
    counts, honest_run = Counts(), Executor.run
    for kept in (word_scales(torch.device("cuda:0")), word_zero_points(4, torch.device("cuda:0"))):
        assert kept.is_cuda  # tables that a process copies once

    def step(compute, _, batches):
        before = sum(device.kernels.values())
        hidden = compute()
        if not any(batch.attend.backend.metadata.prompts for batch in batches):
            counts.layers.append(sum(device.kernels.values()) - before)
        return hidden

    def run_pass(self, current):
        syncs, copies = device.syncs.copy(), device.pageable_copies.copy()
        kernels, layers = sum(device.kernels.values()), sum(counts.layers)
        honest_run(self, current)
        counts.beside.append(sum(device.kernels.values()) - kernels - (sum(counts.layers) - layers))
        counts.batches += len(current.batches)
        for before, after, lines in (
            (syncs, device.syncs, counts.waits),
            (copies, device.pageable_copies, counts.pageable),
        ):
            is_wait = lines is counts.waits
            lines += [
                p for p in (after - before).elements() if not (is_wait and p.startswith(COPIES))
            ]

    with pytest.MonkeyPatch.context() as patch:
        replace_layers(patch, step)
        patch.setattr(Executor, "run", run_pass)
        yield counts


def check(counts):
    assert len(counts.waits) == counts.batches and len(set(counts.waits)) == 1, counts.waits
    assert counts.waits[0].startswith("engine/executor.py")
    assert not counts.pageable
