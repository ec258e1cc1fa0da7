"""Drawing tokens: a true argmax, or a draw whose randomness belongs to the request alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one token is chosen. uniform in [0, 1): the random number, ignored at temperature 0."""

    temperature: float
    top_p: float
    uniform: float


def uniform_draw(seed: int, completion: int, step: int) -> float:
    """The random number for token `step` of completion `completion`: a function of these three alone.

    A counter-based generator (Philox) needs no state, so the same request draws the same numbers in every batch,
    schedule, order and resumed run.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{completion}".encode()).digest()[:16], "little")
    bits = int(np.random.Philox(key=key, counter=step).random_raw())
    return (bits >> 11) * 2.0**-53


def sample_tokens(logits: Tensor, draws: list[SamplingParams]) -> Tensor:
    """logits [R, V] in float32 -> token ids [R].

    Sampling inverts the cumulative distribution in float64: of the tempered softmax in vocabulary order or, with
    top_p < 1, of its nucleus (the fewest most probable tokens whose mass reaches top_p) in order of probability.
    """
    chosen = logits.argmax(dim=-1)
    for row, draw in enumerate(draws):
        if draw.temperature > 0.0:
            chosen[row] = _sample(logits[row], draw)
    return chosen


def _sample(logits: Tensor, draw: SamplingParams) -> int:
    probabilities = torch.softmax(logits.double() / draw.temperature, dim=-1)
    order = None
    if draw.top_p < 1.0:
        # Stable, so that equally probable tokens keep the vocabulary's order on every device.
        probabilities, order = torch.sort(probabilities, descending=True, stable=True)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < draw.top_p]
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, draw.uniform * cumulative[-1], right=True))
    index = min(index, cumulative.shape[0] - 1)
    return index if order is None else int(order[index])
