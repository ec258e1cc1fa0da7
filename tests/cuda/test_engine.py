"""The engine's CUDA path on the device in host memory: no race, no mix of devices, and the values of `transformers`."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm import Policy
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import assert_close, requests, run
from tests.helpers.tiny_models import VARIANTS

THIRDS = Policy(3, 2, *(0.3,) * 6)


@pytest.mark.parametrize("variant", ["llama", "opt", "bloom", "gemma2", "mixtral"])
def test_three_tiers(tiny, tmp_path, variant):
    model = tiny(variant)
    with cuda_in_host_memory() as device:
        results, _ = run(
            model.path, requests(), torch.float16, policy=THIRDS, schedule="zigzag", offload_dir=tmp_path,
            cpu_attention=False,
        )  # fmt: skip
        print(device.syncs.most_common(12), device.pageable_copies.most_common(12), sum(device.kernels.values()))
    device.check()
    assert_close(model, results, torch.float16, variant)
