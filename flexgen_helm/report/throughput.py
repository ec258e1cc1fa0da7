"""Throughput of a run, as the paper defines them, the versions that it depends on, and sums of blocks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from importlib import metadata
from operator import add
from typing import Any

from flexgen_helm.request import Cost


def throughput(costs: Iterable[Cost], latency_s: float) -> dict[str, Any]:
    """Return the throughput entries of `flexgen_run.json` for requests that took `latency_s` seconds in all.

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
        "workload": {key: total[key] for key in ("prompt_tokens", "prompt_tokens_computed", "output_tokens")},
        "padded_prompt_tokens": total["padded_prompt_tokens"],
        "padded_output_tokens": total["padded_output_tokens"],
        "latency_s": latency_s,
        "prefill_s": total["prefill_s"],
        "decode_s": total["decode_s"],
        "padded_throughput": _rate(padded, latency_s),
        "actual_throughput": _rate(requested, latency_s),
        "efficiency": requested / padded if padded else 1.0,
        "generation_throughput": _rate(total["output_tokens"], total["prefill_s"] + total["decode_s"]),
        "flops": total["flops"],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result depends on."""
    installed = {"python": platform.python_version()}
    for package in ("flexgen-helm", "crfm-helm", "torch", "transformers", "tokenizers", "numpy"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


# How numbers (or dictionaries of numbers) of two blocks are joined.
_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("bytes", "time_s", "wall_s", "halvings", "preemptions", "roofline_s"), add),
    **dict.fromkeys(("peak_bytes", "peak_workspace_bytes"), max),
}
_PREDICTIONS = ("predicted_latency_s", "predicted")


def add_blocks(before: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Join what an engine said of two blocks: sums and peaks; policy, placement and hardware are the newer block's.

    A prediction is a sum too, and None if one of the blocks has none.
    """
    joined = {**before, **block}
    for name in _JOINS.keys() & before.keys() & block.keys():
        joined[name] = _merge(before[name], block[name], _JOINS[name])
    if "bytes" in before:  # else `before` has no block
        for name in set(_PREDICTIONS) & set(joined):
            both = before.get(name), block.get(name)
            joined[name] = None if None in both else _merge(*both, add)
    return joined


def _merge(old: Any, new: Any, join: Any) -> Any:
    """Join two numbers, or the numbers of two dictionaries by key."""
    if isinstance(old, Mapping):
        both = {name: _merge(old[name], value, join) for name, value in new.items() if name in old}
        return {**old, **new, **both}
    return join(old, new)
