"""Sums of records: of blocks, as `Engine.last_run` has them, and of the runs computed in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Any

from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost

# What an engine says of a block (`Engine.last_run`); null in the record of a run of which nothing
# was computed here.
BLOCK_KEYS = (
    "origin", "checkpoint_bytes", "policy", "schedule", "bytes", "time_s", "experts", "peak_bytes",
    "limit_bytes", "peak_workspace_bytes", "halvings", "preemptions", "predicted_latency_s",
    "predicted", "roofline_s", "achieved_placement", "hardware", "proved", "batch_invariant",
    "rounded_weights", "generation_config", "finished_at",
)  # fmt: skip
_MODEL_KEYS = ("precision", "fingerprint", "chat_template", "workers")
_COST_KEYS = ("padded_prompt_tokens", "padded_output_tokens", "flops", "prefill_s", "decode_s")
_COUNTS = ("num_requests", "num_unique")
Record = Mapping[str, Any]


def suite_totals(records: Iterable[Record]) -> dict[str, Any]:
    """Return `totals` and `models` of runs, from the contents of their `flexgen_run.json`."""
    records = [record for record in records if "padded_prompt_tokens" in record]
    by_model: dict[str, list[Record]] = {}
    for record in records:
        by_model.setdefault(record["model"], []).append(record)
    models = {name: _model_usage(group) for name, group in by_model.items()}
    return {"totals": _summed_usage(records), "models": models}


def _model_usage(records: Sequence[Record]) -> dict[str, Any]:
    """Join the runs of a model; a block that several runs have in common counts once."""
    newest = max(records, key=lambda record: record.get("finished_at") or "")
    # In runs with another fingerprint the model's name meant other weights.
    records = [run for run in records if run.get("fingerprint") == newest.get("fingerprint")]
    blocks: dict[str, dict[str, Any]] = {}  # by their JSON, so that equal ones are one
    model_values: dict[str, Any] = {}
    for record in records:
        block = {key: record[key] for key in BLOCK_KEYS if record.get(key) is not None}
        if "bytes" in block:
            blocks[json.dumps(block)] = block
        model_values |= {key: record[key] for key in _MODEL_KEYS if record.get(key) is not None}
    joined: dict[str, Any] = {}
    for block in blocks.values():
        joined = add_blocks(joined, block)
    return {**joined, **model_values, **_summed_usage(records)}


def _summed_usage(records: Sequence[Record]) -> dict[str, Any]:
    costs = [
        Cost(
            **{name: value for name, value in record["workload"].items() if name not in _COUNTS},
            **{name: record[name] for name in _COST_KEYS},
        )
        for record in records
    ]
    usage = throughput(costs, sum(record["latency_s"] for record in records))
    counts = {name: sum(record["workload"][name] for record in records) for name in _COUNTS}
    return {**usage, "workload": {**counts, **usage["workload"]}}


# How numbers (or dictionaries of numbers) of two blocks are joined.
_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("bytes", "time_s", "wall_s", "halvings", "preemptions", "roofline_s"), add),
    **dict.fromkeys(("peak_bytes", "peak_workspace_bytes"), max),
}
_PREDICTIONS = ("predicted_latency_s", "predicted")


def add_blocks(before: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Join what an engine said of two blocks: sums and peaks; policy, placement and hardware are
    the newer block's.

    A prediction is a sum too, and None if one of the blocks has none.
    """
    joined = {**before, **block}
    for name in _JOINS.keys() & before.keys() & block.keys():
        joined[name] = _merge(before[name], block[name], _JOINS[name])
    if "bytes" in before:  # else `before` has no block
        for name in {*_PREDICTIONS} & {*joined}:
            both = before.get(name), block.get(name)
            joined[name] = None if None in both else _merge(*both, add)
    return joined


def _merge(old: Any, new: Any, join: Any) -> Any:
    """Join two numbers, or the numbers of two dictionaries by key."""
    if isinstance(old, Mapping):
        both = {name: _merge(old[name], value, join) for name, value in new.items() if name in old}
        return {**old, **new, **both}
    return join(old, new)
