"""Products by vectors equal those in float64, and a row's bits depend on that row alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels import trial, vector_products
from flexgen_helm.kernels.vector_products import vector_matmul
from flexgen_helm.offload.linear import tiled_linear
from tests.helpers.products import assert_is_product, operands

emit = pytest.importorskip("flexgen_helm.kernels.emit")
# A processor without float16 leaves those to PyTorch.
DTYPES = [torch.bfloat16, torch.float32, *([torch.float16] if emit.CONVERTS_HALVES else [])]


@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    width=st.one_of(st.integers(1, 100), st.integers(1, 700)),
    outputs=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_shape(rows, width, outputs, dtype, has_bias, threads):
    # Rows that are parts of larger ones.
    x, weight = (operand[:, 3:] for operand in operands(rows, width + 3, outputs, dtype))
    bias = torch.randn(outputs) if has_bias else None
    torch.set_num_threads(threads)
    y = vector_matmul(x, weight, bias)
    assert_is_product(y, x, weight, bias)
    # The same bits alone, in other company, with some of the outputs, by one thread, and of a
    # float32 copy.
    torch.set_num_threads(1)
    row, output = rows // 2, outputs // 2
    alone = vector_matmul(x[row : row + 1].clone(), weight, bias)
    part = vector_matmul(x[row:], weight[output:].float(), None if bias is None else bias[output:])
    assert torch.equal(alone[0], y[row]) and torch.equal(part, y[row:, output:])


def test_rows_of_several_passes_have_the_bits_of_one():
    x, weight = operands(150, 9_000, 5, torch.bfloat16)
    y = vector_matmul(x, weight)
    assert_is_product(y, x, weight, None)
    assert all(
        torch.equal(vector_matmul(x[i : i + 3], weight), y[i : i + 3]) for i in (0, 14, 15, 147)
    )


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
def test_every_number_of_16_bits(dtype):
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(-1, 1)
    weight = torch.cat((weight, torch.zeros(len(weight), emit.LANES - 1, dtype=dtype)), 1)
    x = torch.zeros(1, emit.LANES)
    x[0, 0] = 1.0
    y = vector_matmul(x, weight)
    assert y is not None
    exact = weight[:, 0].float()
    numbers = exact.isfinite()
    assert torch.equal(y[0][numbers], exact[numbers])
    assert not y[0][~numbers].isfinite().any()


def test_what_it_does_not_take():
    x, weight = operands(3, 128, 10, DTYPES[0])
    assert vector_matmul(x, weight) is not None
    assert vector_matmul(x, weight.double()) is None
    assert vector_matmul(x.double(), weight) is None
    assert vector_matmul(x.t().contiguous().t(), weight) is None
    assert vector_matmul(x[:0], weight) is None


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_loops_that_fail_their_trial_are_not_used(monkeypatch, fault):
    """Whatever they compute: a numba or a processor that we do not know."""

    def broken(*given):
        if fault == "raises":
            raise AttributeError("no such type in this LLVM")

    messages = []
    x, weight = operands(3, 128, 10, DTYPES[0])
    vector_products.loops.forget()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(vector_products, "run_on_threads", broken)
            patch.setattr(trial, "report", lambda message: messages.append(message.text))
            assert vector_matmul(x, weight) is None
            assert_is_product(tiled_linear(x, weight, None), x, weight, None)
    finally:
        vector_products.loops.forget()
    (message,) = messages  # said once
    assert ("no such type in this LLVM" if fault == "raises" else "wrong numbers") in message
    assert vector_matmul(x, weight) is not None
