"""Prefixes of tiny models, whose tokens cost less than one more segment does."""

from __future__ import annotations

import pytest

from flexgen_helm.scheduling import prefix_tree


def share_at_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """However tiny the models are, that one token is saved is worth it."""
    monkeypatch.setattr(prefix_tree, "_SEGMENT_S", 0.0)
    monkeypatch.setattr(prefix_tree, "_SEGMENT_FLOPS", 0.0)
