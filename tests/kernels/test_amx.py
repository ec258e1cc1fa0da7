"""Products by the matrix unit equal those in float64 as well as float32 can, on any number of
threads.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels import amx, products
from flexgen_helm.kernels.amx import amx_matmul, amx_matmuls
from flexgen_helm.models.transformers_backend.batch_invariance import BatchInvariant
from flexgen_helm.offload.linear import tiled_linear
from tests.helpers.products import assert_is_product, operands
from tests.helpers.shares import share_of
from tests.helpers.software_tiles import software_tiles

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True, scope="module")
def unit():
    """The processor's matrix unit, else one in software."""
    with nullcontext() if amx.has_amx() else software_tiles():
        assert amx.has_amx()
        yield


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch):
    monkeypatch.setattr(amx, "_MIN_ROWS", dict.fromkeys(DTYPES, (1, 1)))


@settings(max_examples=share_of(25, 2))
@given(
    rows=st.one_of(st.integers(1, 70), st.integers(100, 300)),
    steps=st.integers(1, 120),
    outputs=st.integers(32, 200),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    threads=st.integers(1, 6),
)
def test_any_shape(rows, steps, outputs, dtype, has_bias, threads):
    """Of parts of larger operands: nothing beyond them is read into a result."""
    x, weight = operands(rows + 4, 32 * steps + 64, outputs + 4, dtype)
    inside = slice(2, -2), slice(32, -32)
    for operand in (x, weight):
        kept = operand[inside].clone()
        operand.fill_(torch.nan)[inside] = kept
    x, weight = x[inside], weight[inside]
    bias = torch.randn(outputs) if has_bias else None
    torch.set_num_threads(threads)
    assert_is_product(amx_matmul(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_one_sign_are_as_exact_as_the_librarys(dtype):
    """All terms round in the same direction of a growing sum: one long chain would lose a digit."""
    draw = torch.Generator().manual_seed(1)
    x, weight = (
        torch.rand(33, 28672, generator=draw),
        torch.rand(96, 28672, generator=draw).to(dtype),
    )
    exact = x.double() @ weight.double().t()
    ours, librarys = (
        ((y - exact) / exact).abs() for y in (amx_matmul(x, weight), x @ weight.float().t())
    )
    assert ours.max() <= 3 * librarys.max() and ours.mean() <= 3 * librarys.mean()


@settings(max_examples=20)
@given(
    rows=st.integers(1, 200),
    steps=st.one_of(st.integers(1, 20), st.integers(48, 110)),
    outputs=st.lists(st.integers(32, 300), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 6),
)
def test_several_matrices_at_once(rows, steps, outputs, dtype, threads):
    """The bits are those of each by itself, also where matrices are parts of larger ones."""
    x, weight = operands(rows, 32 * steps, sum(outputs), dtype)
    weights = list(weight.split(outputs))
    weights[0] = torch.cat((weights[0], weights[0]), 1)[:, : 32 * steps]
    torch.set_num_threads(threads)
    found = amx_matmuls(x, weights)
    assert found is not None
    for y, matrix in zip(found, weights, strict=True):
        assert_is_product(y, x, matrix, None)
        assert torch.equal(y, amx_matmul(x, matrix))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits(dtype):
    kind = torch.float16 if dtype == torch.float32 else dtype
    weight = (
        torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(kind).to(dtype).view(-1, 1)
    )
    weight = torch.cat((weight, torch.zeros(len(weight), 31, dtype=dtype)), 1)
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    y = amx_matmul(x, weight)
    assert y is not None
    exact = weight[:, 0].float()
    numbers = exact.isfinite() & ((exact == 0) | (exact.abs() >= torch.finfo(torch.float32).tiny))
    assert torch.equal(y[0][numbers], exact[numbers])
    assert not y[0][~exact.isfinite()].isfinite().any()
    # the unit takes the least numbers for zero
    assert (y[0] - exact)[exact.isfinite()].abs().max() < 2**-125


@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_every_bit_of_x_counts(exponent):
    """The three parts add up to x exactly, for random bits and those around the borders of the
    parts.
    """
    draw = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 1 << 24, (500,), generator=draw)
    borders = torch.tensor([(1 << bit) + step for bit in (7, 8, 15, 16, 23) for step in (-1, 0, 1)])
    numbers = torch.cat((bits, borders)).float() * 2.0**exponent
    numbers = torch.cat((numbers, -numbers))
    x = torch.zeros(len(numbers), 32)
    x[:, 5] = numbers
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    weight[3, 5] = 1.0
    y = amx_matmul(x, weight)
    assert y is not None and torch.equal(y[:, 3], numbers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_depend_neither_on_threads_nor_on_other_rows(dtype):
    x, weight = operands(390, 3200, 130, dtype)
    results = []
    for threads in (1, 2, 3, 4, 6):
        torch.set_num_threads(threads)
        results.append(amx_matmul(x, weight))
    assert all(torch.equal(results[0], found) for found in results[1:])
    for rows in (slice(0, 1), slice(17, 90), slice(200, 390)):
        assert torch.equal(amx_matmul(x[rows], weight), results[0][rows])


def test_few_rows_and_parts_of_a_matrix_have_the_same_bits(monkeypatch):
    """As `--batch-invariant` multiplies them: one row, and the last outputs of a streamed
    matrix.
    """
    monkeypatch.undo()
    x, weight = operands(40, 64, 70, torch.bfloat16)
    whole = tiled_linear(x, weight, None, batch_invariant=True)
    assert torch.equal(tiled_linear(x[7:8], weight, None, batch_invariant=True), whole[7:8])
    assert torch.equal(tiled_linear(x, weight[64:], None, batch_invariant=True), whole[:, 64:])
    assert not torch.equal(tiled_linear(x[7:8], weight, None), whole[7:8])  # by vectors
    with BatchInvariant():  # a router of transformers multiplies by itself
        assert torch.equal(F.linear(x[7:8], weight.float()), F.linear(x, weight.float())[7:8])


def test_from_several_threads_at_once():
    cases = [operands(1 + 29 * i % 300, 512, 700 + i, DTYPES[i % len(DTYPES)]) for i in range(30)]
    with ThreadPoolExecutor(4) as pool:
        for (x, weight), y in zip(cases, pool.map(lambda case: amx_matmul(*case), cases)):
            assert_is_product(y, x, weight, None)


def test_what_it_does_not_take(monkeypatch):
    x, weight = operands(40, 128, 50, torch.float16)
    assert amx_matmul(x, weight) is not None
    assert amx_matmul(x.double(), weight) is None
    assert amx_matmul(x.half(), weight) is None
    assert amx_matmul(x, weight.double()) is None
    assert amx_matmul(x[:, :100], weight[:, :100]) is None
    assert amx_matmul(x.t().contiguous().t(), weight) is None
    assert amx_matmul(x, weight.t().contiguous().t()) is None
    assert amx_matmul(x, weight[:31]) is None
    assert amx_matmul(x[:0], weight) is None
    assert amx_matmuls(x, [weight, weight.bfloat16()]) is None
    assert amx_matmuls(x, [weight, weight[:, :64]]) is None
    monkeypatch.undo()
    assert amx_matmul(x[:2], weight) is None, "vectors are faster for so few"


def test_a_process_that_may_not_use_the_unit_multiplies_without_it(monkeypatch):
    x, weight = operands(40, 128, 50, torch.bfloat16)
    monkeypatch.setattr(amx, "_has_unit", lambda: False)
    assert amx_matmul(x, weight) is None
    assert products.product_library(torch.device("cpu"), torch.float32) != "AMX"
    assert_is_product(tiled_linear(x, weight, None), x, weight, None)


@pytest.mark.parametrize(("width", "threads"), [(64, 1), (4096, 4), (14336, 4), (14336, 64)])
def test_its_memory_stays_within_what_is_said(monkeypatch, width, threads):
    asked = []
    memory = amx._scratch_memory
    monkeypatch.setattr(
        amx, "_scratch_memory", lambda num_bytes: asked.append(num_bytes) or memory(num_bytes)
    )
    x, weight = operands(700, width, 33, torch.float32)
    torch.set_num_threads(threads)
    assert amx_matmul(x, weight) is not None
    assert max(asked) <= amx.product_bytes(width)
    if threads < 64:
        assert amx.product_bytes(width) < 24 << 20
