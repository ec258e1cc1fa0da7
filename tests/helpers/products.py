"""Operands of products, and what a product in float32 may differ by from one in float64."""

import torch


def operands(rows, width, outputs, dtype):
    draw = torch.Generator().manual_seed(rows * 1_000_003 + width * 1_009 + outputs)
    return torch.randn(rows, width, generator=draw), torch.randn(outputs, width, generator=draw).to(
        dtype
    )


def assert_is_product(y, x, weight, bias):
    assert y is not None and y.is_contiguous()
    exact = x.double() @ weight.double().t()
    exact, added = (exact, 0.0) if bias is None else (exact + bias, bias.abs())
    # Each of `width` sums may be off by half a unit in the last place of its largest term.
    bound = 2**-23 * (x.double().abs() @ weight.double().abs().t() + added + 1).mul(
        x.shape[1] ** 0.5
    )
    assert ((y - exact).abs() <= bound).all()
