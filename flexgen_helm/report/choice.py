"""What precisions cost, and which is the cheapest that is equivalent to the baseline on every run entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import ModelComparison


@dataclass(frozen=True)
class Cost:
    """The cost of a precision.

    seconds_per_token: over its runs; infinite if it is not known.
    weight_bytes, cache_bytes: of a weight of the layers, and of an element of the KV cache, with scales.
    cheapest: in what no equivalent precision costs less: 'time', 'memory'.
    """

    seconds_per_token: float
    weight_bytes: float
    cache_bytes: float
    cheapest: Sequence[str] = ()


def costs(model: ModelComparison) -> dict[str, Cost]:
    """Return what each precision of a model costs, in the order of `PRECISIONS`; {} where models are compared."""
    if model.kind == "model" or model.baseline not in PRECISIONS:
        return {}
    # A cache that is not quantized has the compute type.
    plain = 4 if any((run.run.get("hardware") or {}).get("compute_dtype") == "float32" for run in model.runs) else 2
    found = {}
    for speed in model.speeds:
        name, rate = speed["precision"], speed["tokens_per_s"]
        if precision := PRECISIONS.get(name):
            weights, cache = precision.weights, precision.cache
            found[name] = Cost(
                1 / rate if rate else math.inf,
                2 if weights is None else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
                plain if cache is None else cache.bytes_per_value(plain),
            )
    equal = [name for name in found if name == model.baseline or model.is_everywhere(name, "equivalent")]
    best = {"memory": min(equal, key=lambda name: (found[name].weight_bytes, found[name].cache_bytes))}
    if found[model.baseline].seconds_per_token < math.inf:
        best["time"] = min(equal, key=lambda name: found[name].seconds_per_token)
    return {
        name: replace(cost, cheapest=tuple(what for what, taken in best.items() if taken == name))
        for name, cost in found.items()
    }
