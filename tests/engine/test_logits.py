"""The largest token and the normalizer of rows, against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.engine import logits as module
from flexgen_helm.engine.logits import greedy_tokens, log_normalizers


@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 1 << 16), st.integers(1, 40))
def test_the_first_of_equal_tokens_is_drawn(rows, width, seed, distinct):
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, distinct, (rows, width))).float() - 3
    values[0, -1] = -np.inf
    assert greedy_tokens(values).tolist() == values.numpy().argmax(-1).tolist()


def test_a_value_that_is_no_number_is_found_as_before():
    values = torch.randn(3, 500)
    values[1, 7] = np.nan
    values[2] = -np.inf
    assert torch.equal(greedy_tokens(values), values.argmax(-1))


@pytest.mark.parametrize("rows, width", [(1, 1 << 20), (2, 1 << 20), (5, 1 << 18), (48, 49152), (7, 100)])
def test_normalizers_are_those_of_the_rows(rows, width, monkeypatch):
    """And the same bits, whatever rows are beside, and however many threads compute."""
    values = torch.randn(rows, width) * 4
    found = log_normalizers(values)
    expected = np.logaddexp.reduce(values.double().numpy(), axis=-1)[:, None]
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=1e-5)
    if rows > 1:
        assert torch.equal(log_normalizers(values.roll(1, 0)).roll(-1, 0), found)
        before = torch.get_num_threads()
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(log_normalizers(values), found)
        finally:
            torch.set_num_threads(before)
    slices = []
    whole = torch.logsumexp
    monkeypatch.setattr(module.torch, "logsumexp", lambda own, **rest: slices.append(len(own)) or whole(own, **rest))
    log_normalizers(values)
    assert sum(slices) == rows and (rows == 1 or min(slices) > 1)
    assert max(slices) * width <= max(3, 2) * (1 << 20)
