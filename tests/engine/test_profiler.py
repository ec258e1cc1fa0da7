"""What a layer takes besides its products is measured by a layer: what is slow there is found, and
products are not.
"""

import math
import time

import torch

from flexgen_helm.engine import profiler
from flexgen_helm.kernels import layer_rows
from flexgen_helm.offload import linear

HOST = torch.device("cpu")


def slowed(function, seconds):
    def slow(*given, **named):
        time.sleep(seconds)
        return function(*given, **named)

    return slow


def test_norms_and_rotations_count_and_products_do_not(monkeypatch):
    monkeypatch.setattr(profiler, "_UNCACHED_BYTES", 1 << 25)  # of four layers
    step_s, bytes_s = profiler._layer_rates(HOST, torch.float32)
    assert 0 < step_s < 0.1 and math.isfinite(bytes_s)
    with monkeypatch.context() as patch:
        patch.setattr(layer_rows, "rms_norm", slowed(layer_rows.rms_norm, 0.02))
        assert profiler._layer_rates(HOST, torch.float32)[0] > 0.04, "a layer has two norms"
    with monkeypatch.context() as patch:
        patch.setattr(linear, "linear_as_stored", slowed(linear.linear_as_stored, 0.01))
        assert profiler._layer_rates(HOST, torch.float32)[0] < 0.03, (
            "seven products take 0.07 s more"
        )
    rotate = layer_rows.rotate

    def slow(x, cos, sin):
        time.sleep(0.03 if len(x) > 1 else 0.0)
        return rotate(x, cos, sin)

    monkeypatch.setattr(layer_rows, "rotate", slow)
    assert profiler._layer_rates(HOST, torch.float32)[1] < bytes_s / 2, (
        "what a long batch moves is slower where rotations are"
    )
