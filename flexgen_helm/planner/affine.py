"""Affine forms over the nine placement fractions, which every cost is made of. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.planner.policy import Policy
from flexgen_helm.tiers import KINDS, TIERS, Kind, Tier

# [10]: coefficients of the fractions of weights, KV cache and hidden states on gpu, cpu and disk,
# and a constant.
Affine = NDArray[np.float64]
# [10]: the fractions, and 1: `form @ fractions` is the value of a form.
FractionVector = NDArray[np.float64]
WG, WC, WD, CG, CC, CD, HG, HC, HD, ONE = range(10)
WEIGHTS: Mapping[Tier, int] = {"gpu": WG, "cpu": WC, "disk": WD}
CACHE: Mapping[Tier, int] = {"gpu": CG, "cpu": CC, "disk": CD}
HIDDEN: Mapping[Tier, int] = {"gpu": HG, "cpu": HC, "disk": HD}
COLUMNS: Mapping[Kind, Mapping[Tier, int]] = {
    "weights": WEIGHTS,
    "cache": CACHE,
    "activations": HIDDEN,
}


def affine(constant: float = 0.0, terms: Mapping[int, float] | None = None) -> Affine:
    """Make a form from its constant and its coefficients by index."""
    form = np.zeros(10)
    form[ONE] = constant
    for index, coefficient in (terms or {}).items():
        form[index] += coefficient
    return form


def fraction_vector(policy: Policy, has_gpu: bool) -> FractionVector:
    """Return the fractions of a policy, in the order of `COLUMNS`."""
    return np.array(
        [*(part for kind in KINDS for part in policy.tier_fractions(kind, has_gpu).values()), 1.0]
    )


def fractions_by_kind(fractions: FractionVector) -> dict[Kind, dict[Tier, float]]:
    """Return the fractions of weights, cache and hidden states by tier."""
    return {
        kind: {tier: float(fractions[columns[tier]]) for tier in TIERS}
        for kind, columns in COLUMNS.items()
    }
