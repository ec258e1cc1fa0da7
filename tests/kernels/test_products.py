"""Which library multiplies on a host, and the layout that it reads fastest."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm.kernels import products


@pytest.mark.parametrize("name", ["_onednn", "_blas"])
def test_column_major_gives_the_layout_that_the_chosen_product_reads_fastest(name, monkeypatch):
    product = products._onednn() if name == "_onednn" else products._blas
    if product is None:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(products, "_linear_of", lambda device, dtype: product)
    weight, bias = torch.randn(7, 5), torch.randn(7)
    arranged = products.column_major(weight)
    assert torch.equal(arranged, weight) and arranged.is_contiguous() == (name == "_blas")
    for rows in (1, 3, 70):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(products.linear(x, arranged, bias), x @ weight.t() + bias, rtol=1e-5, atol=1e-5)


def test_no_measurement_chooses_what_multiplies_on_the_host(monkeypatch):
    """What there is differs in the last bits: processes of a busy machine must not differ in their choice."""

    def measure(*arguments):
        raise AssertionError("measured")

    monkeypatch.setattr(products, "_seconds", measure)
    cpu = torch.device("cpu")
    assert products._linear_of.__wrapped__(cpu, torch.float32) in (products._onednn(), products._blas)
    library = "BLAS" if products._onednn() is None else "oneDNN"
    assert products.product_library(cpu, torch.float32) == ("AMX" if products.has_amx() else library)
    with pytest.raises(AssertionError, match="measured"):  # the guard sees a measurement
        products.matmul_flops.__wrapped__(cpu, torch.float32)
