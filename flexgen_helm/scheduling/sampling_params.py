"""How a token is drawn: parameters, and randomness that belongs to the request alone. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How one token is chosen.

    temperature: 0 takes the most probable token.
    top_p: probability mass of the nucleus, in (0, 1].
    key: 64 bits with a sign, from which the noise of each token id follows; ignored at temperature
        0.
    forced: the token to take whatever its probability; None for none.
    prompt, drawn: the tokens before it, which generation settings depend on.
    """

    temperature: float
    top_p: float
    key: int
    forced: int | None = None
    prompt: Sequence[int] = ()
    drawn: Sequence[int] = ()


def draw_key(seed: int, completion: int, step: int) -> int:
    """Return the key of token `step` of completion `completion`: a function of these three alone.

    So the same request draws the same tokens in every batch, schedule, order and resumed run.
    """
    digest = hashlib.sha256(f"{seed}/{completion}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
