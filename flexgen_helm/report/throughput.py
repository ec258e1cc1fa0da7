"""Throughput as the paper defines it, and the record of one run of the engine."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from flexgen_helm.request import Cost

# Requests of a batch, where lengths are padded to those of neighbours.
BUCKET = 32


def throughput(costs: Iterable[Cost], latency_s: float) -> dict[str, Any]:
    """Padded throughput = (padded prompt + padded output tokens) / latency, actual = asked tokens / latency,
    efficiency = asked / padded, generation throughput = output tokens / (prefill + decode seconds)."""
    costs = list(costs)
    prompt = sum(cost.prompt_tokens for cost in costs)
    output = sum(cost.output_tokens for cost in costs)
    padded_prompt = sum(cost.padded_prompt_tokens for cost in costs)
    padded_output = sum(cost.padded_output_tokens for cost in costs)
    prefill_s = sum(cost.prefill_s for cost in costs)
    decode_s = sum(cost.decode_s for cost in costs)
    padded = padded_prompt + padded_output
    return {
        "workload": {
            "prompt_tokens": prompt,
            "prompt_tokens_computed": sum(cost.prompt_tokens_computed for cost in costs),
            "output_tokens": output,
        },
        "padded_prompt_tokens": padded_prompt,
        "padded_output_tokens": padded_output,
        "latency_s": latency_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "padded_throughput": _rate(padded, latency_s),
        "actual_throughput": _rate(prompt + output, latency_s),
        "efficiency": (prompt + output) / padded if padded else 1.0,
        "generation_throughput": _rate(output, prefill_s + decode_s),
        "padding": padding(costs),
        "flops": sum(cost.flops for cost in costs),
    }


def padding(costs: Iterable[Cost]) -> dict[str, float]:
    """Efficiency if the same requests were padded: prompts and outputs to the longest of all (as in the paper), or to
    the longest of `BUCKET` neighbours in length."""
    lengths = sorted((cost.prompt_tokens, cost.output_tokens) for cost in costs)
    asked = sum(prompt + output for prompt, output in lengths)

    def padded(some: list[tuple[int, int]]) -> int:
        return len(some) * (max(prompt for prompt, _ in some) + max(output for _, output in some))

    if not asked:
        return {"to_longest": 1.0, "in_buckets": 1.0}
    buckets = [lengths[first : first + BUCKET] for first in range(0, len(lengths), BUCKET)]
    return {"to_longest": asked / padded(lengths), "in_buckets": asked / sum(map(padded, buckets))}


def versions() -> dict[str, str]:
    """Versions of what a result depends on; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in ("flexgen-helm", "crfm-helm", "torch", "transformers", "tokenizers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
