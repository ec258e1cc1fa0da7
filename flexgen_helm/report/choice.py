"""What precisions cost, and which is the cheapest that is equivalent to the baseline on every run
entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexgen_helm.quant.formats import BLOCK_FORMATS, SCALE_BYTES
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import ModelComparison


@dataclass(frozen=True)
class PrecisionCost:
    """The cost of a precision.

    seconds_per_token: over its runs; infinite if it is not known.
    weight_bytes, cache_bytes: of a weight, as it rests, and of an element of the KV cache, with
        scales. None for weights that rest as published, in types whose sizes records do not say.
    cheapest: in what no equivalent precision costs less: 'time', 'memory'.
    """

    seconds_per_token: float
    weight_bytes: float | None
    cache_bytes: float
    cheapest: Sequence[str] = ()


def costs(model: ModelComparison) -> dict[str, PrecisionCost]:
    """Return what each precision of a model costs, in the order of `PRECISIONS`; {} where models
    are compared.
    """
    if model.kind == "model" or model.baseline not in PRECISIONS:
        return {}
    # A cache that is not quantized has the compute type.
    plain = (
        4
        if any(
            (run.run.get("hardware") or {}).get("compute_dtype") == "float32" for run in model.runs
        )
        else 2
    )
    published = (
        2 if model.base.is_full_precision is not False else _published_bytes(model.base.stored)
    )
    found = {}
    for speed in model.speeds:
        name, rate = speed["precision"], speed["tokens_per_s"]
        if precision := PRECISIONS.get(name):
            weights, cache = precision.weights, precision.cache
            found[name] = PrecisionCost(
                1 / rate if rate else math.inf,
                published
                if weights is None
                else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
                plain if cache is None else cache.bytes_per_value(plain),
            )
    equal = [
        name for name in found if name == model.baseline or model.is_everywhere(name, "equivalent")
    ]
    sizes = {name: found[name].weight_bytes for name in equal}
    best = {}
    if None not in sizes.values():
        best["memory"] = min(equal, key=lambda name: (sizes[name], found[name].cache_bytes))
    if found[model.baseline].seconds_per_token < math.inf:
        best["time"] = min(equal, key=lambda name: found[name].seconds_per_token)
    return {
        name: replace(cost, cheapest=tuple(what for what, taken in best.items() if taken == name))
        for name, cost in found.items()
    }


def _published_bytes(stored: Mapping[str, int]) -> float | None:
    """Return the bytes of a weight of a model's files; stored: type -> bytes."""
    blocks = {name: fmt.block_bytes / fmt.block_values for name, fmt in BLOCK_FORMATS.items()}
    sizes = {**SCALE_BYTES, **blocks}
    if not stored or not stored.keys() <= sizes.keys():
        return None
    return sum(stored.values()) / sum(num_bytes / sizes[name] for name, num_bytes in stored.items())
