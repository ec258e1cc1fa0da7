"""The largest token and the normalizer of rows, against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.engine.sampler import greedy_tokens, log_normalizers


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 1 << 16), st.integers(1, 40))
def test_the_first_of_equal_tokens_is_drawn(rows, width, seed, distinct):
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, distinct, (rows, width))).float() - 3
    values[0, -1] = -np.inf
    assert greedy_tokens(values).tolist() == values.numpy().argmax(-1).tolist()


def test_what_is_no_number_or_infinite_is_found_as_by_pytorch():
    values = torch.randn(6, 500)
    values[1, 7] = np.nan
    values[2] = -np.inf
    values[3, 9] = np.inf
    values[4, 499] = np.nan
    values[5, 3] = -np.inf
    assert torch.equal(greedy_tokens(values), values.argmax(-1))
    expected = torch.logsumexp(values, -1, keepdim=True)
    torch.testing.assert_close(log_normalizers(values), expected, equal_nan=True)
    finite = values[[0, 2, 3, 5]]
    assert torch.equal(greedy_tokens(finite), finite.argmax(-1))
    torch.testing.assert_close(log_normalizers(finite), expected[[0, 2, 3, 5]])


@pytest.mark.parametrize("rows, width", [(1, 1 << 20), (2, 1 << 20), (5, 1 << 18), (48, 49152), (7, 100), (3, 1)])
def test_normalizers_are_those_of_the_rows(rows, width):
    """And the same bits, whatever rows are beside, and however many threads compute."""
    values = torch.randn(rows, width) * 4
    found = log_normalizers(values)
    expected = np.logaddexp.reduce(values.double().numpy(), axis=-1)[:, None]
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=1e-5)
    assert torch.equal(log_normalizers(values[:, :]), found) and found.shape == (rows, 1)
    if rows > 1:
        assert torch.equal(log_normalizers(values.roll(1, 0)).roll(-1, 0), found)
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert torch.equal(log_normalizers(values), found)
        finally:
            torch.set_num_threads(before)


def test_rows_of_a_wider_matrix():
    wide = torch.randn(20, 700)
    wide[:, 600:] = wide[:, :50] = 1e6
    own = wide[3:17, 50:600]
    assert torch.equal(greedy_tokens(own), own.argmax(-1))
    torch.testing.assert_close(log_normalizers(own), torch.logsumexp(own, -1, keepdim=True), rtol=0, atol=2e-6)
