"""What runs cost: tokens, seconds and throughput of one HELM run, of several, and of a whole suite.

Every result carries its own share of the work (`Cost`). So a run's usage is the same whether it was computed alone,
in a suite-wide block, or in part by an earlier process whose results are in the response cache.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.report.suite import SUITE_FILE
from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost

if TYPE_CHECKING:
    from flexgen_helm.plugin.helm_run import HelmRun

RUN_FILE = "flexgen_run.json"
_COUNTS = ("num_requests", "num_unique")
# Of what an engine says of its blocks: numbers (or dictionaries of numbers) that add up, and peaks.
_SUMS = ("bytes", "time_s", "wall_s", "halvings", "roofline_s")
_PREDICTIONS = ("predicted_latency_s", "predicted")
_PEAKS = ("peak_bytes", "peak_workspace_bytes")


def requests_usage(keys: Sequence[str], costs: Mapping[str, Cost]) -> dict[str, Any]:
    """Return workload, throughput and times of the requests `keys`; one without a cost failed and does not count.

    A repeated request counts with its tokens, and costs nothing: it was not computed again.
    """
    charged: list[Cost] = []
    unique: set[str] = set()
    for key in keys:
        if (cost := costs.get(key)) is None:
            continue
        repeated = Cost(
            prompt_tokens=cost.prompt_tokens,
            output_tokens=cost.output_tokens,
            padded_prompt_tokens=cost.prompt_tokens,
            padded_output_tokens=cost.output_tokens,
        )
        charged.append(repeated if key in unique else cost)
        unique.add(key)
    usage = throughput(charged, sum(cost.prefill_s + cost.decode_s for cost in charged))
    usage["workload"] = {"num_requests": len(charged), "num_unique": len(unique), **usage["workload"]}
    return usage


def runs_usage(runs: Iterable[HelmRun]) -> dict[str, Any]:
    """Return the usage of several runs; a request that occurs in two of them was computed once."""
    keys: list[str] = []
    costs: dict[str, Cost] = {}
    for run in runs:
        prefix = f"{run.model}\0"
        keys += [prefix + key for key in run.keys]
        costs.update({prefix + key: cost for key, cost in run.costs().items()})
    return requests_usage(keys, costs)


def add_usage(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the usage of several parts together; `padding` is what padding within each part would have left."""
    usage = throughput([_as_cost(part) for part in parts], sum(part["latency_s"] for part in parts))
    counts = {name: sum(part["workload"][name] for part in parts) for name in _COUNTS}
    usage["workload"] = {**counts, **usage["workload"]}
    num_tokens = [part["workload"]["prompt_tokens"] + part["workload"]["output_tokens"] for part in parts]
    for way in usage["padding"]:
        padded = sum(tokens / part["padding"][way] for tokens, part in zip(num_tokens, parts))
        usage["padding"][way] = sum(num_tokens) / padded if padded else 1.0
    return usage


def _as_cost(usage: Mapping[str, Any]) -> Cost:
    workload = {name: value for name, value in usage["workload"].items() if name not in _COUNTS}
    names = ("padded_prompt_tokens", "padded_output_tokens", "flops", "prefill_s", "decode_s")
    return Cost(**workload, **{name: usage[name] for name in names})


def suite_usage(
    folder: Path, executed: Sequence[HelmRun], tried: Collection[str], failed: Collection[str]
) -> dict[str, Any]:
    """Return `runs`, `failed`, `totals` and `models` of the suite in `folder` after one more call.

    HELM users run a suite in pieces, and repeat commands whose results are all there, so the usage of this call is
    added to that of earlier calls. A model without a run in this call keeps its usage. Runs that share a request
    count it once if one call had both.

    executed: runs of this call, as far as HELM executed them. tried, failed: names of runs of this call.
    """
    try:
        return _suite_usage(folder, read_json(folder / SUITE_FILE), executed, tried, failed)
    except (AttributeError, KeyError, TypeError):  # the files of earlier calls are not as this version writes them
        return _suite_usage(folder, {}, executed, tried, failed)


def _suite_usage(
    folder: Path,
    before: Mapping[str, Any],
    executed: Sequence[HelmRun],
    tried: Collection[str],
    failed: Collection[str],
) -> dict[str, Any]:
    names = [run.name for run in executed]
    earlier = [read_json(folder / name / RUN_FILE) for name in before.get("runs", ()) if name not in names]
    earlier = [run for run in earlier if "workload" in run]
    models = dict(before.get("models", {}))
    for name in dict.fromkeys(run.model.name for run in executed):
        of_model = [run for run in executed if run.model.name == name]
        earlier_of_model = [run for run in earlier if run.get("model") == name]
        models[name] = _model_usage(models.get(name, {}), earlier_of_model, of_model)
    return {
        "runs": list(dict.fromkeys([*before.get("runs", ()), *names])),
        "failed": sorted(({*before.get("failed", ())} - {*tried}) | {*failed}),
        "totals": add_usage([runs_usage(executed), *earlier]),
        "models": models,
    }


def _model_usage(
    before: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], executed: Sequence[HelmRun]
) -> dict[str, Any]:
    """Add up one model's usage.

    before: its usage so far. earlier: files of its runs that this call did not execute. executed: runs of this call.
    """
    fingerprint = executed[-1].fingerprint
    if before.get("fingerprint") != fingerprint:  # the name meant other weights
        before = {}
    earlier = [run for run in earlier if run.get("fingerprint") == fingerprint]
    block = next((run.block for run in reversed(executed) if run.block), {})
    is_all_computed = not earlier and not any(answer.is_cached for run in executed for answer in run.responses.values())
    if not block:
        block = dict(before)
    elif not is_all_computed:  # else (`--disable-cache`) what the earlier computation took is replaced
        block = _add_blocks(before, block)
    return {**block, "fingerprint": fingerprint, **add_usage([runs_usage(executed), *earlier])}


def _add_blocks(before: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Join what an engine said of two blocks: sums and peaks; policy, placement and hardware are the newer block's.

    A prediction is a sum too, and None if one of the blocks has none.
    """
    joined = {**before, **block}
    for name in set(before) & set(block):
        if name in _SUMS:
            joined[name] = _merge(before[name], block[name], lambda one, other: one + other)
        elif name in _PEAKS:
            joined[name] = _merge(before[name], block[name], max)
    if "bytes" in before:  # else `before` has no block
        for name in set(_PREDICTIONS) & set(joined):
            both = before.get(name), block.get(name)
            joined[name] = None if None in both else _merge(*both, lambda one, other: one + other)
    return joined


def _merge(one: Any, other: Any, join: Any) -> Any:
    """Join two numbers, or the numbers of two dictionaries by key."""
    if isinstance(one, Mapping):
        both = {name: _merge(one[name], value, join) for name, value in other.items() if name in one}
        return {**one, **other, **both}
    return join(one, other)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's content, empty if there is none or it is not what we write."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
