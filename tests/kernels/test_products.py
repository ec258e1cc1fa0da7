"""What multiplies on a host does not depend on a measurement, and rows do not depend on one
another.
"""

import pytest
import torch

from flexgen_helm.kernels import products
from flexgen_helm.kernels.vector_products import multiplies_as_stored


def test_no_measurement_chooses_what_multiplies_on_the_host(monkeypatch):
    """What there is differs in the last bits: processes of a busy machine must not differ in their
    choice.
    """

    def measure(*arguments):
        raise AssertionError("measured")

    monkeypatch.setattr(products, "_seconds", measure)
    cpu = torch.device("cpu")
    library = (
        ("AMX" if products.has_amx() else "vectors")
        if multiplies_as_stored(torch.float32)
        else "PyTorch"
    )
    assert products.product_library(cpu, torch.float32) == library
    x, weight = torch.randn(5, 40), torch.randn(7, 40)
    torch.testing.assert_close(
        products.linear(x, weight, None), x @ weight.t(), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(AssertionError, match="measured"):  # the guard sees a measurement
        products.matmul_flops.__wrapped__(cpu, torch.float32)
