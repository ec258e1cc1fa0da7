"""What precisions cost, and which is the cheapest that is equivalent to the baseline on every run entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.scores import RunScores, grouped, precision_rank


@dataclass(frozen=True)
class Cost:
    """The cost of a precision.

    seconds_per_token: over its runs; None if it is not known.
    weight_bytes, cache_bytes: of a weight of the layers, and of an element of the KV cache, with scales.
    cheapest: in what no equivalent precision costs less: 'time', 'memory'.
    """

    seconds_per_token: float | None
    weight_bytes: float
    cache_bytes: float
    cheapest: Sequence[str] = ()


def costs(model: ModelComparison) -> dict[str, Cost]:
    """Return what each precision of a model costs, in the order of `PRECISIONS`; {} where models are compared.

    The cheapest ones have all run entries of the baseline's comparison, and are equivalent on each.
    """
    entries = {one.run for one in model.comparisons}
    runs = [run for run in model.runs if run.entry in entries and run.precision in PRECISIONS]
    by_precision = grouped(sorted(runs, key=lambda run: precision_rank(run.precision)), lambda run: run.precision)
    if model.kind == "model" or model.baseline not in by_precision:
        return {}
    found = {precision: _cost(group) for precision, group in by_precision.items()}
    equal = [
        precision
        for precision, group in by_precision.items()
        if precision == model.baseline or (len(group) == len(entries) and model.is_equivalent(precision))
    ]
    best = {"memory": min(equal, key=lambda name: (found[name].weight_bytes, found[name].cache_bytes))}
    if found[model.baseline].seconds_per_token is not None:
        best["time"] = min(equal, key=lambda name: found[name].seconds_per_token or math.inf)
    return {
        name: replace(cost, cheapest=tuple(what for what, taken in best.items() if taken == name))
        for name, cost in found.items()
    }


def _cost(runs: Sequence[RunScores]) -> Cost:
    precision = PRECISIONS[runs[0].precision]
    tokens, seconds = sum(run.num_tokens for run in runs), sum(run.latency_s for run in runs)
    is_known = tokens > 0 and all(run.latency_s > 0 for run in runs)
    weights, cache = precision.weights, precision.cache
    # A cache that is not quantized has the compute type.
    plain = 4 if any(run.run.get("hardware", {}).get("compute_dtype") == "float32" for run in runs) else 2
    return Cost(
        seconds / tokens if is_known else None,
        2 if weights is None else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
        plain if cache is None else cache.bytes_per_value(plain),
    )
