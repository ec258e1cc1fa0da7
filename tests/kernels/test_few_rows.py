"""Products of a few rows with 16-bit matrices equal those in float64, on any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels import few_rows, team, trial
from flexgen_helm.kernels.few_rows import MOST_ROWS, few_rows_matmul
from flexgen_helm.offload.linear import tiled_linear
from tests.helpers.products import assert_is_product, operands

compiled = pytest.importorskip("flexgen_helm.kernels.compiled")
# A processor without float16 leaves those to PyTorch.
DTYPES = [torch.float16, torch.bfloat16] if compiled.CONVERTS_HALVES else [torch.bfloat16]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, MOST_ROWS),
    vectors=st.integers(1, 40),
    outputs=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_shape(rows: int, vectors: int, outputs: int, dtype: torch.dtype, has_bias: bool, threads: int) -> None:
    x, weight = operands(rows, vectors * compiled.LANES, outputs, dtype)
    bias = torch.randn(outputs) if has_bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_is_product(few_rows_matmul(x, weight, bias), x, weight, bias)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits(dtype: torch.dtype) -> None:
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).view(-1, 1)
    weight = torch.cat((weight, torch.zeros(len(weight), compiled.LANES - 1, dtype=dtype)), 1)
    x = torch.zeros(1, compiled.LANES)
    x[0, 0] = 1.0
    y = few_rows_matmul(x, weight)
    assert y is not None
    exact = weight[:, 0].float()
    numbers = exact.isfinite()
    assert torch.equal(y[0][numbers], exact[numbers])
    assert not y[0][~numbers].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_parts_of_larger_ones(dtype: torch.dtype) -> None:
    x, weight = operands(5, 256, 50, dtype)
    own_x, own_weight = x[1:4, 64:192], weight[3:47, 64:192]
    assert_is_product(few_rows_matmul(own_x, own_weight), own_x, own_weight, None)


def test_threads_of_python_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch's OpenMP has no entry that we know."""
    x, weight = operands(7, 512, 1024, DTYPES[0])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        by_openmp = few_rows_matmul(x, weight)
        monkeypatch.setattr(team, "openmp_library", lambda: None)
        by_python = few_rows_matmul(x, weight)
    finally:
        torch.set_num_threads(before)
    assert by_openmp is not None and by_python is not None
    assert torch.equal(by_openmp, by_python)


def test_every_output_is_computed_once_by_each_number_of_threads() -> None:
    """A thread that computes nothing, or another's part, changes the result."""
    before = torch.get_num_threads()
    try:
        for outputs in (1, 3, 4, 5, 1023, 1024, 1025):
            x, weight = operands(3, 512, outputs, torch.bfloat16)
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(few_rows_matmul(x, weight))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


def test_from_several_threads_at_once() -> None:
    cases = [operands(1 + i % 9, 512, 700 + i, DTYPES[i % len(DTYPES)]) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for (x, weight), y in zip(cases, pool.map(lambda case: few_rows_matmul(*case), cases)):
            assert_is_product(y, x, weight, None)


def test_what_it_does_not_take() -> None:
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
def test_functions_that_fail_their_trial_are_not_used(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def broken(*given: object) -> torch.Tensor:
        if fault == "raises":
            raise AttributeError("no such type in this LLVM")
        return torch.zeros(5, 7)

    messages: list[str] = []
    x, weight = operands(3, 128, 10, DTYPES[0])
    few_rows._compiled.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(few_rows, "_multiply", broken)
            patch.setattr(trial, "report", lambda message: messages.append(message.text))
            assert few_rows_matmul(x, weight) is None
            assert few_rows_matmul(x, weight) is None
    finally:
        few_rows._compiled.cache_clear()
    (message,) = messages  # said once
    assert ("no such type in this LLVM" if fault == "raises" else "wrong numbers") in message
    assert few_rows_matmul(x, weight) is not None


def test_without_numba_products_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands(3, 128, 10, DTYPES[0])
    monkeypatch.setattr(few_rows, "_compiled", lambda: None)
    assert few_rows_matmul(x, weight) is None
    assert_is_product(tiled_linear(x, weight, None), x, weight, None)
