"""How tokens are drawn: parameters, and randomness that belongs to the request alone. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Steps whose random numbers are made at once, because making a generator takes 20 microseconds.
_DRAWS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How one token is chosen.

    temperature: 0 takes the most probable token.
    top_p: probability mass of the nucleus, in (0, 1].
    uniform: the random number in [0, 1); ignored at temperature 0.
    forced: the token to take whatever its probability; None for none.
    prompt, drawn: the tokens before it, which generation settings depend on.
    """

    temperature: float
    top_p: float
    uniform: float
    forced: int | None = None
    prompt: Sequence[int] = ()
    drawn: Sequence[int] = ()


def uniform_draw(seed: int, completion: int, step: int) -> float:
    """Return the random number for token `step` of completion `completion`: a function of these three alone.

    A counter-based generator (Philox) needs no state, so the same request draws the same numbers in every batch,
    schedule, order and resumed run.
    """
    first, place = divmod(step, _DRAWS)
    return float(_draws(seed, completion, first * _DRAWS)[place])


@lru_cache(maxsize=4096)
def _draws(seed: int, completion: int, step: int) -> NDArray[np.float64]:
    """Return the random numbers of `_DRAWS` steps from `step` on: the first of the four words of each counter."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{completion}".encode()).digest()[:16], "little")
    words = np.random.Philox(key=key, counter=step).random_raw(4 * _DRAWS)[::4]
    return np.multiply(words >> np.uint64(11), 2.0**-53, dtype=np.float64)
