"""Products of a few rows with 16-bit matrices equal those in float64, on any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels import few_rows, trial
from flexgen_helm.kernels.few_rows import MOST_ROWS, few_rows_matmul
from flexgen_helm.offload.linear import tiled_linear
from tests.helpers.products import assert_is_product, operands

emit = pytest.importorskip("flexgen_helm.kernels.emit")
# A processor without float16 leaves those to PyTorch.
DTYPES = [torch.float16, torch.bfloat16] if emit.CONVERTS_HALVES else [torch.bfloat16]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, MOST_ROWS),
    vectors=st.integers(1, 40),
    outputs=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_shape(rows, vectors, outputs, dtype, has_bias, threads):
    # Rows that are parts of larger ones.
    x, weight = (operand[:, emit.LANES :] for operand in operands(rows, (vectors + 1) * emit.LANES, outputs, dtype))
    bias = torch.randn(outputs) if has_bias else None
    torch.set_num_threads(threads)
    assert_is_product(few_rows_matmul(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits(dtype):
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(-1, 1)
    weight = torch.cat((weight, torch.zeros(len(weight), emit.LANES - 1, dtype=dtype)), 1)
    x = torch.zeros(1, emit.LANES)
    x[0, 0] = 1.0
    y = few_rows_matmul(x, weight)
    assert y is not None
    exact = weight[:, 0].float()
    numbers = exact.isfinite()
    assert torch.equal(y[0][numbers], exact[numbers])
    assert not y[0][~numbers].isfinite().any()


def test_every_output_is_computed_once_by_each_number_of_threads():
    """A thread that computes nothing, or another's part, changes the result."""
    for outputs in (1, 3, 4, 5, 1023, 1024, 1025):
        x, weight = operands(3, 512, outputs, torch.bfloat16)
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(few_rows_matmul(x, weight))
        assert all(torch.equal(results[0], found) for found in results[1:])


def test_what_it_does_not_take():
    x, weight = operands(3, 128, 10, DTYPES[0])
    assert few_rows_matmul(x, weight) is not None
    assert few_rows_matmul(x, weight.float()) is None
    assert few_rows_matmul(x.double(), weight) is None
    assert few_rows_matmul(x[:, :127], weight[:, :127]) is None
    assert few_rows_matmul(x.t().contiguous().t(), weight) is None
    assert few_rows_matmul(x[:0], weight) is None
    assert few_rows_matmul(x.repeat(MOST_ROWS, 1), weight) is None
    assert few_rows_matmul(x, weight, most_rows=2) is None


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_loops_that_fail_their_trial_are_not_used(monkeypatch, fault):
    """Whatever they compute: a numba or a processor that we do not know."""

    def broken(*given: object) -> None:
        if fault == "raises":
            raise AttributeError("no such type in this LLVM")

    messages: list[str] = []
    x, weight = operands(3, 128, 10, DTYPES[0])
    few_rows.loops.forget()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(few_rows, "run_on_threads", broken)
            patch.setattr(trial, "report", lambda message: messages.append(message.text))
            assert few_rows_matmul(x, weight) is None
            assert_is_product(tiled_linear(x, weight, None), x, weight, None)
    finally:
        few_rows.loops.forget()
    (message,) = messages  # said once
    assert ("no such type in this LLVM" if fault == "raises" else "wrong numbers") in message
    assert few_rows_matmul(x, weight) is not None
