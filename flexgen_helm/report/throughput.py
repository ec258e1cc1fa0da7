"""Throughputs of a run, as the paper defines them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from flexgen_helm.request import Cost


def throughput(costs: Iterable[Cost], latency_s: float) -> dict[str, Any]:
    """Return the throughput entries of `flexgen_run.json` for requests that took `latency_s`
    seconds in all.

    padded throughput     = (padded prompt + padded output tokens) / latency
    actual throughput     = (prompt + output tokens) / latency
    efficiency            = (prompt + output tokens) / (padded prompt + padded output tokens)
    generation throughput = output tokens / (prefill + decode seconds)
    """
    costs = list(costs)
    total = {field.name: sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)}
    requested = total["prompt_tokens"] + total["output_tokens"]
    padded = total["padded_prompt_tokens"] + total["padded_output_tokens"]
    return {
        "workload": {
            key: total[key] for key in ("prompt_tokens", "prompt_tokens_computed", "output_tokens")
        },
        "padded_prompt_tokens": total["padded_prompt_tokens"],
        "padded_output_tokens": total["padded_output_tokens"],
        "latency_s": latency_s,
        "prefill_s": total["prefill_s"],
        "decode_s": total["decode_s"],
        "padded_throughput": _rate(padded, latency_s),
        "actual_throughput": _rate(requested, latency_s),
        "efficiency": requested / padded if padded else 1.0,
        "generation_throughput": _rate(
            total["output_tokens"], total["prefill_s"] + total["decode_s"]
        ),
        "flops": total["flops"],
    }


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
