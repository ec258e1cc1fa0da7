"""What the executor tells of its workspace follows from the loaded weights and from the device's kernels."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm.engine.executor import Executor
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import DISK, requests, run


@pytest.mark.parametrize(
    "precision, dtype, policy, capability, converts, fused",
    [
        ("fp16", torch.float16, None, (7, 5), False, True),
        ("fp16", torch.bfloat16, None, (7, 5), True, False),
        ("fp16", torch.bfloat16, DISK, (8, 0), True, True),
        ("fp16", torch.float16, DISK, (8, 0), False, True),
        ("fp16", torch.float32, DISK, (8, 0), True, True),
        ("4bit", torch.float16, None, (8, 0), True, True),
    ],
)
def test_the_workspace_is_that_of_the_weights_and_the_kernels(
    tiny, tmp_path, monkeypatch, precision, dtype, policy, capability, converts, fused
):
    """The tiny model has float16 at rest; a T4 has no fused attention in bfloat16."""
    seen, honest = [], Executor.__init__

    def noted(self, *arguments, **named):
        honest(self, *arguments, **named)
        seen.append((self._workspace._upcast_elements > 0, not self._workspace._direct))

    monkeypatch.setattr(Executor, "__init__", noted)
    settings = {} if policy is None else dict(policy=policy, schedule="zigzag", cpu_attention=False)
    with cuda_in_host_memory():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        # Resident weights in half of the memory are kept in the compute dtype: not here.
        monkeypatch.setattr("flexgen_helm.planner.weight_placement.COPIES_SHARE", 0.0)
        run(tiny("llama").path, requests(2), dtype, precision=precision, offload_dir=tmp_path, **settings)
        monkeypatch.undo()
    assert seen == [(converts, fused)]
