"""What a layer takes besides its products is measured by a layer: what is slow there is found, and products are not."""

from __future__ import annotations

import math
import time
from functools import partial

import pytest
import torch

from flexgen_helm.engine import profiler
from flexgen_helm.models import decoder
from flexgen_helm.offload import linear

best = partial(profiler._best, device=torch.device("cpu"))


def slowed(function, seconds):
    def slow(*given, **named):
        time.sleep(seconds)
        return function(*given, **named)

    return slow


def measured() -> tuple[float, float]:
    return profiler._host_layer(lambda calls, repeats=3: best(calls, repeats))


def test_norms_count_and_products_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s, bytes_s = measured()
    assert 0 < step_s < 0.1 and math.isfinite(bytes_s)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "rms_norm", slowed(decoder.rms_norm, 0.02))
        assert measured()[0] > 0.04, "a layer has two norms"
    with monkeypatch.context() as patch:
        patch.setattr(linear, "linear_as_stored", slowed(linear.linear_as_stored, 0.01))
        assert measured()[0] < 0.03, "seven products take 0.07 s more"


def test_what_a_long_batch_moves_is_slower_where_rotations_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [measured()[1]]
    patched = decoder.rotate

    def slow(x: torch.Tensor, rotary: decoder.Rotary) -> torch.Tensor:
        time.sleep(0.03 if len(x) > 1 else 0.0)
        return patched(x, rotary)

    monkeypatch.setattr(decoder, "rotate", slow)
    rates.append(measured()[1])
    assert rates[1] < rates[0] / 2
