"""The bound on the memory of CUDA graphs, against what their captures allocate for layers of real shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.engine.cuda_graphs import LayerGraphs
from flexgen_helm.models.config import layer_stage
from flexgen_helm.models.decoder import Decoder, StageWeights
from flexgen_helm.offload.staging import Ledger
from flexgen_helm.planner.placement import GRAPH_OVERHEAD_BYTES, GRAPH_ROWS
from flexgen_helm.planner.workspace import Workspace


class Resident(StageWeights):
    """Weights of a layer on the device."""

    repeatable = True

    def __init__(self, config) -> None:
        shapes, stage = dict(config.stage_tensors(layer_stage(0))), f"{layer_stage(0)}."
        self._tensors = {name.removeprefix(stage): torch.zeros(shape, device="cuda") for name, shape in shapes.items()}

    def linear(self, name, x):
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def vector(self, name):
        return self._tensors.get(name)


@pytest.mark.parametrize("name", ["opt-125m", "smollm2-135m"])
@pytest.mark.parametrize("order", [1, -1])
def test_captures_of_all_sizes_stay_within_the_bound(cuda_device, name, order):
    """In the order of their growth, which shares least, and from the largest on."""
    config = replace(CATALOG[name].config, num_layers=1)
    device, rows = torch.device("cuda"), GRAPH_ROWS[-1]
    decoder, ledger = Decoder(config, device, torch.float32), Ledger("gpu", 1 << 30)
    graphs, weights = LayerGraphs(decoder, device, ledger, rows), Resident(config)
    before = torch.cuda.memory_reserved()
    with torch.no_grad():
        for count in GRAPH_ROWS[::order]:
            hidden = torch.zeros(count, config.hidden_size, device="cuda")
            rotary = decoder.rotary(torch.arange(count, device="cuda"))
            graphs.layer(weights, 0, hidden, rotary, lambda q, k, v: q)
    taken = sum(size for pool, size in cuda_device.memory[0].reserved_by.items() if pool < 0)
    bound = Workspace(config, 4, "gpu").graphs(rows)
    assert 0 < taken <= bound.pool_bytes and torch.cuda.memory_reserved() - before >= taken
    assert order < 0 or taken > (bound.pool_bytes - GRAPH_OVERHEAD_BYTES) / 5, "it would be no bound but a guess"
    assert graphs._pool_bytes == bound.pool_bytes - taken
    graphs.close()
    ledger.check({})
