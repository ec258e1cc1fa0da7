"""Products with published blocks have the bits of products with the decoded matrix, for any number
of rows.
"""

import ctypes
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels.vector_products import vector_matmul
from flexgen_helm.quant import block_products
from flexgen_helm.quant.block_formats import BLOCK_FORMATS
from flexgen_helm.quant.block_products import block_matmul, decode_into
from tests.helpers.blocks import FORMATS, NAMES, SCALED, drawn_blocks, published_values
from tests.helpers.shares import share_of

pytest.importorskip("flexgen_helm.kernels.emit")
Q4_0, Q6_K = BLOCK_FORMATS["Q4_0"], BLOCK_FORMATS["Q6_K"]


def rows_of_x(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=share_of(80, 2))
@given(
    fmt=st.sampled_from([*FORMATS, *SCALED.values()]),
    count=st.integers(1, 70) | st.just(300),
    values=st.integers(1, 1100),
    outputs=st.integers(1, 70),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_any_shape(fmt, count, values, outputs, has_bias, threads, seed):
    width = -(-values // fmt.block_values) * fmt.block_values
    # Rows that are parts of larger ones, at odd addresses.
    memory = torch.zeros(outputs, fmt.stripe_bytes(width) + 5, dtype=torch.uint8)
    packed, x = memory[:, 3:-2], rows_of_x(count, width + 3, seed)[:, 1:-2]
    packed.copy_(drawn_blocks(fmt, outputs, width, seed))
    weight, bias = (
        published_values(packed.contiguous(), fmt),
        rows_of_x(1, outputs)[0] if has_bias else None,
    )
    torch.set_num_threads(threads)
    y = block_matmul(x, packed, fmt, bias)
    assert torch.equal(y, vector_matmul(x, weight, bias))
    # The same bits alone, in other company, with some of the outputs, by one thread.
    torch.set_num_threads(1)
    row, output = count // 2, outputs // 2
    alone = block_matmul(x[row : row + 1].clone(), packed, fmt, bias)
    part = block_matmul(x[row:], packed[output:], fmt, None if bias is None else bias[output:])
    assert torch.equal(alone[0], y[row]) and torch.equal(part, y[row:, output:])


@pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
def test_nothing_is_read_beyond_the_rows(fmt):
    """Between two pages that nobody may read, as at the end of a mapped file."""
    size, width = mmap.PAGESIZE, 512
    packed = drawn_blocks(fmt, 4, width)
    pages = -(-packed.numel() // size)
    memory = mmap.mmap(-1, (pages + 2) * size)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    for page in (0, pages + 1):
        assert (
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(view.data_ptr() + page * size), size, 0) == 0
        )
    for first in (size, (pages + 1) * size - packed.numel()):
        at_edge = view[first : first + packed.numel()].view(packed.shape)
        at_edge.copy_(packed)
        for count in (1, 4, 20):
            x = rows_of_x(count, width)
            assert torch.equal(block_matmul(x, at_edge, fmt), block_matmul(x, packed, fmt))
        assert torch.equal(
            decode_into(at_edge, fmt, torch.empty(4, width)), published_values(packed, fmt)
        )


def test_what_it_does_not_take():
    packed, x = drawn_blocks(Q4_0, 10, 128), rows_of_x(3, 128)
    assert block_matmul(x, packed, Q4_0) is not None
    assert block_matmul(x.double(), packed, Q4_0) is None
    assert block_matmul(x.t().contiguous().t(), packed, Q4_0) is None
    assert block_matmul(x[:0], packed, Q4_0) is None
    assert block_matmul(x, packed[:, :-1], Q4_0) is None
    assert block_matmul(x[:, :-1], packed, Q4_0) is None
    assert block_matmul(x, packed, Q6_K) is None
    assert block_matmul(x, packed.t().contiguous().t(), Q4_0) is None


def test_the_matrix_unit_takes_decoded_tiles(monkeypatch):
    """Of many rows, and of any number where the order of sums may not depend on it."""
    packed, x = drawn_blocks(Q4_0, 40, 128), rows_of_x(40, 128)
    assert block_matmul(x, packed, Q4_0, None, batch_invariant=True) is not None
    monkeypatch.setattr(block_products, "has_amx", lambda: True)
    assert block_matmul(x[:3], packed, Q4_0) is not None
    assert block_matmul(x[:3], packed, Q4_0, None, batch_invariant=True) is None
    assert block_matmul(x, packed, Q4_0) is None
