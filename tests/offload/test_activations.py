"""Hidden states that wait between stages: every row comes back, and no tier takes more than it has
room for.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload.activations import ActivationStore
from flexgen_helm.tiers import TIERS
from tests.helpers.offload import tiers_of

WIDTH = 6
ROW_BYTES = 4 * WIDTH


def store_of(folder, fractions, limits):
    tiers = tiers_of(folder, has_gpu=True, limits=limits)
    return ActivationStore(tiers, fractions), tiers


@settings(max_examples=60)
@given(
    shares=st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any),
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=7),
)
def test_shares_that_fill_a_tier_to_the_byte_have_room(tmp_path, shares, batches):
    """As plans do: a share of all rows is not one of each batch in whole rows. The last tier has
    the rest.
    """
    fractions = {tier: share / sum(shares) for tier, share in zip(TIERS, shares)}
    rows = sum(batches)
    last = [tier for tier in TIERS if fractions[tier] > 0][-1]
    limits = {tier: int(fractions[tier] * rows * ROW_BYTES) for tier in TIERS}
    limits[last] += (1 + len(batches)) * 2 * ROW_BYTES
    store, tiers = store_of(tmp_path, fractions, limits)
    try:
        hidden = {number: torch.randn(count, WIDTH) for number, count in enumerate(batches)}
        for number, states in hidden.items():
            store.store(number, states.clone())
        assert sum(store.placed.values()) == rows * ROW_BYTES
        assert all(store.placed[tier] <= limits[tier] for tier in TIERS)
        assert not any(store.placed[tier] for tier in TIERS if not fractions[tier])
        for number, states in hidden.items():
            assert torch.equal(store.load(number), states)
        for tier in TIERS:
            tiers.ledgers[tier].check({})
    finally:
        store.close()
        tiers.close()


def test_rows_that_no_tier_has_room_for_are_refused(tmp_path):
    store, tiers = store_of(
        tmp_path,
        {"gpu": 0.5, "cpu": 0.5, "disk": 0.0},
        {"gpu": 0, "cpu": 9 * ROW_BYTES, "disk": 999},
    )
    try:
        store.store(0, torch.randn(9, WIDTH))
        assert store.placed == {"gpu": 0, "cpu": 9 * ROW_BYTES, "disk": 0}
        with pytest.raises(MemoryLimitError, match="cpu tier is limited"):
            store.store(1, torch.randn(2, WIDTH))
    finally:
        store.close()
        tiers.close()
