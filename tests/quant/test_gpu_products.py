"""On a CUDA device: products with packed matrices, and that Triton made them. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm.hardware.process_state import switched_off
from flexgen_helm.quant import kernels
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (make gpu-check)"),
]
# Error relative to the sum of absolute values: of weights and results in 16 bits, and of sums in float32.
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("group, scales, fit", [(32, "word", "error"), (64, "pair", "range"), (24, "word", "range")])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_equal_those_in_double_precision(group, scales, fit, dtype):
    fmt = GroupFormat(4, group, "out", scales, fit)
    for rows, width in ((1, 1), (67, 600), (512, 2048), (1000, 4096)):
        packed = quantize(torch.randn(rows, width) * 0.3, fmt)
        weights = dequantize(packed, fmt, rows, width).double()
        for tokens in (1, 2, 3, 8, 16, 17, 64, 150):
            x, bias = torch.randn(tokens, width).to(dtype), torch.randn(rows).to(dtype)
            y = kernels.quantized_matmul(x.cuda(), packed.cuda(), fmt, rows, bias.cuda())
            if y is None:  # dequantizing is faster
                assert tokens > 16
                continue
            exact = x.double() @ weights.t() + bias.double()
            bound = TOLERANCE[dtype] * (x.double().abs() @ (weights.abs() + 1).t() + 1)
            assert y.dtype == dtype and ((y.cpu().double() - exact).abs() <= bound).all(), (rows, width, tokens)
    assert not switched_off
