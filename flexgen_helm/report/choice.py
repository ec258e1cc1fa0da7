"""What precisions cost, which is the cheapest that is equivalent to the baseline on every run
entry, and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexgen_helm.quant.block_formats import BLOCK_FORMATS, SCALE_BYTES
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.verdicts import advice


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
    machines = [run.record.get("hardware") or {} for run in model.runs]
    # A cache that is not quantized has the compute type.
    plain = 4 if any(machine.get("compute_dtype") == "float32" for machine in machines) else 2
    published = (
        2 if model.base.is_full_precision is not False else _published_bytes(model.base.stored)
    )
    by_precision = {}
    for speed in model.speeds:
        name, rate = speed.label, speed.tokens_per_s
        if precision := PRECISIONS.get(name):
            weights, cache = precision.weights, precision.cache
            by_precision[name] = PrecisionCost(
                1 / rate if rate else math.inf,
                published
                if weights is None
                else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
                plain if cache is None else cache.bytes_per_value(plain),
            )
    equal = [
        name
        for name in by_precision
        if name == model.baseline or model.is_everywhere(name, "equivalent")
    ]
    sizes = {name: by_precision[name].weight_bytes for name in equal}
    best = {}
    if None not in sizes.values():
        best["memory"] = min(equal, key=lambda name: (sizes[name], by_precision[name].cache_bytes))
    if by_precision[model.baseline].seconds_per_token < math.inf:
        best["time"] = min(equal, key=lambda name: by_precision[name].seconds_per_token)
    return {
        name: replace(cost, cheapest=tuple(what for what, taken in best.items() if taken == name))
        for name, cost in by_precision.items()
    }


def _published_bytes(stored: Mapping[str, int]) -> float | None:
    """Return the bytes of a weight of a model's files; stored: type -> bytes."""
    blocks = {name: fmt.block_bytes / fmt.block_values for name, fmt in BLOCK_FORMATS.items()}
    sizes = {**SCALE_BYTES, **blocks}
    if not stored or not stored.keys() <= sizes.keys():
        return None
    return sum(stored.values()) / sum(num_bytes / sizes[name] for name, num_bytes in stored.items())


def next_steps_of(model: ModelComparison) -> list[str]:
    """Return what to do with the verdicts: take a precision, ask more questions, or add a
    baseline.
    """
    if model.remedy:
        return [model.remedy]
    steps = [
        f"take {name}, the cheapest equivalent one by {' and '.join(cost.cheapest)}"
        for name, cost in costs(model).items()
        if cost.cheapest and name != model.baseline
    ]
    open_ones = [name for name, verdict in model.verdicts.items() if not verdict.worse]
    steps += advice([comparison for name in open_ones for comparison in model.judged(name)])
    if not steps and model.verdicts:
        better = [name for name in open_ones if model.is_everywhere(name, "equivalent", "better")]
        if better:
            return [f"take {better[0]}, which is nowhere worse"]
        margin = ", or take a larger --margin" if open_ones else ""
        return [f"stay with {model.baseline}{margin}"]
    return steps
