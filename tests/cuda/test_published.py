"""Rows of blocks on a CUDA device in host memory: by the kernel, which is compared with plain PyTorch before."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from flexgen_helm.engine.proof import compare_kernels
from flexgen_helm.hardware.process_state import TRITON, switched_off
from flexgen_helm.quant import kernels
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import BLOCK_FORMATS
from flexgen_helm.quant.precisions import PRECISIONS, PublishedFormats
from tests.helpers import triton_stand_in
from tests.helpers.blocks import drawn_blocks

pytest.importorskip("triton")

Q4_K, F16 = BLOCK_FORMATS["Q4_K"], torch.float16


@pytest.fixture(autouse=True)
def nothing_is_switched_off():
    switched_off.clear()
    yield
    switched_off.clear()


def test_the_kernel_dequantizes_at_any_address(cuda_device, monkeypatch):
    memory = drawn_blocks(Q4_K, 61, 1024)
    packed = memory.flatten()[7:-569].view(60, -1)  # begins within a block
    expected, on_device = decode(packed, Q4_K).half(), memory.to("cuda").flatten()[7:-569].view(60, -1)
    monkeypatch.setattr(kernels, "decode_into", None)
    out = kernels.dequantize_into(on_device, Q4_K, torch.empty((60, 1024), dtype=F16, device="cuda"))
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_model_s_types_are_compared_before_their_use(cuda_device, monkeypatch, is_wrong):
    honest = triton_stand_in.run

    def run(launch, packed, out, *rest):
        honest(launch, packed, out, *rest)
        out[-1].mul_(1 + is_wrong)

    monkeypatch.setattr(triton_stand_in, "run", run)
    published = PublishedFormats(MappingProxyType({"model.layers.0.mlp.up_proj.weight": Q4_K}))
    compare_kernels(torch.device("cuda", 0), F16, replace(PRECISIONS["fp16"], published=published), 64)
    assert (TRITON in switched_off) is is_wrong
