"""How tokens are drawn: parameters, and randomness that belongs to the request alone. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How one token is chosen.

    temperature: 0 takes the most probable token.
    top_p: probability mass of the nucleus, in (0, 1].
    uniform: the random number in [0, 1); ignored at temperature 0.
    forced: the token to take whatever its probability; None for none.
    """

    temperature: float
    top_p: float
    uniform: float
    forced: int | None = None


def uniform_draw(seed: int, completion: int, step: int) -> float:
    """Return the random number for token `step` of completion `completion`: a function of these three alone.

    A counter-based generator (Philox) needs no state, so the same request draws the same numbers in every batch,
    schedule, order and resumed run.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{completion}".encode()).digest()[:16], "little")
    bits = int(np.random.Philox(key=key, counter=step).random_raw())
    return (bits >> 11) * 2.0**-53
