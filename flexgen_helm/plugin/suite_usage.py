"""The account of a suite over all calls that worked on it: what earlier ones computed stays, and is added up.

HELM users run a suite in pieces, and repeat a command whose answers are all there. So a call's account is put
beside that of the calls before:

- the work of runs (tokens, seconds, floating point operations) is summed over all runs, each as it stands now;
- what engines report of their blocks (bytes, times, predictions) is summed over the blocks that were computed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen_helm.plugin.run_record import RUN_FILE, RunRecord, merged
from flexgen_helm.report.suite import SUITE_FILE

_SUMS = ("padded_prompt_tokens", "padded_output_tokens", "latency_s", "prefill_s", "decode_s", "flops")
_BLOCK_SUMS = ("bytes", "time_s", "wall_s", "halvings", "roofline_s")
_BLOCK_PEAKS = ("peak_bytes", "peak_workspace_bytes")
_PREDICTIONS = ("predicted_latency_s", "predicted")


def suite_usage(
    folder: Path, records: Sequence[RunRecord], tried: Collection[str], failed: Collection[str]
) -> dict[str, Any]:
    """`runs`, `failed`, `totals` and `models` of the suite in `folder` after a call that tried to run `tried`, whose
    runs were executed as far as there are `records` and failed as far as they are in `failed`.

    A model that has no run in this call keeps its account. Runs that share a question are one computation within a
    call; over several calls each has its full cost.
    """
    try:
        return _joined(folder, _read(folder / SUITE_FILE), records, tried, failed)
    except (AttributeError, KeyError, TypeError):  # the files of earlier calls are not as this version writes them
        return _joined(folder, {}, records, tried, failed)


def _joined(
    folder: Path,
    before: Mapping[str, Any],
    records: Sequence[RunRecord],
    tried: Collection[str],
    failed: Collection[str],
) -> dict[str, Any]:
    now = [record.name for record in records]
    earlier = [_read(folder / name / RUN_FILE) for name in before.get("runs", ()) if name not in now]
    earlier = [run for run in earlier if "workload" in run]
    models = dict(before.get("models", {}))
    by_model: dict[str, list[RunRecord]] = {}
    for record in records:
        by_model.setdefault(record.model.name, []).append(record)
    for name, its in by_model.items():
        models[name] = _model_account(models.get(name, {}), [run for run in earlier if run.get("model") == name], its)
    return {
        "runs": list(dict.fromkeys([*before.get("runs", ()), *now])),
        "failed": sorted(({*before.get("failed", ())} - {*tried}) | {*failed}),
        "totals": added([merged(records), *earlier]),
        "models": models,
    }


def _model_account(
    before: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], records: Sequence[RunRecord]
) -> dict[str, Any]:
    """Of one model: `before` is its account so far, `earlier` its runs that are none of this call's `records`."""
    fingerprint = records[-1].fingerprint
    if before.get("fingerprint") != fingerprint:  # the name meant other weights
        before = {}
    earlier = [run for run in earlier if run.get("fingerprint") == fingerprint]
    block = next((record.engine for record in reversed(records) if record.engine), {})
    # Where all of it was computed once more (`--disable-cache`), what it took before says nothing more.
    anew = not earlier and not any(answer.reused for record in records for answer in record.answers.values())
    if not block:
        block = dict(before)
    elif not anew:
        block = _both_blocks(before, block)
    return {**block, "fingerprint": fingerprint, **added([merged(records), *earlier])}


def added(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The account (see `run_record.account`) of several parts: sums, and rates of the sums.

    `padding` is what padding within each part would have left.
    """
    sums: dict[str, float] = {name: sum(account[name] for account in accounts) for name in _SUMS}
    workload: dict[str, float] = {}
    for account in accounts:
        workload = _sum(workload, account["workload"])
    prompt, output = workload["prompt_tokens"], workload["output_tokens"]
    padded = sums["padded_prompt_tokens"] + sums["padded_output_tokens"]
    return {
        "workload": workload,
        **sums,
        "padded_throughput": _ratio(padded, sums["latency_s"], 0.0),
        "actual_throughput": _ratio(prompt + output, sums["latency_s"], 0.0),
        "efficiency": _ratio(prompt + output, padded, 1.0),
        "generation_throughput": _ratio(output, sums["prefill_s"] + sums["decode_s"], 0.0),
        "padding": {
            way: _ratio(prompt + output, sum(_tokens(part) / part["padding"][way] for part in accounts), 1.0)
            for way in accounts[0]["padding"]
        },
    }


def _tokens(account: Mapping[str, Any]) -> float:
    return float(account["workload"]["prompt_tokens"] + account["workload"]["output_tokens"])


def _ratio(amount: float, of: float, without: float) -> float:
    return amount / of if of > 0 else without


def _both_blocks(before: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Two accounts of an engine as one: sums, the greater of two peaks; policy, schedule, placement and hardware are
    those of the newer. A prediction is a sum too, and none where one of the blocks has none."""
    found = {**before, **block}
    for name in set(before) & set(block):
        if name in _BLOCK_SUMS:
            found[name] = _sum(before[name], block[name])
        elif name in _BLOCK_PEAKS:
            found[name] = _greater(before[name], block[name])
    if "bytes" in before:  # else nothing of it was computed here before
        for name in _PREDICTIONS:
            one, other = before.get(name), block.get(name)
            if name in found:
                found[name] = None if one is None or other is None else _sum(one, other)
    return found


def _sum(one: Any, other: Any) -> Any:
    """Of numbers, or of the numbers in two dictionaries; what only one of them has is as it is."""
    if isinstance(one, Mapping):
        return {**one, **{name: _sum(one[name], value) if name in one else value for name, value in other.items()}}
    return one + other


def _greater(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {**one, **{name: max(one.get(name, value), value) for name, value in other.items()}}
    return max(one, other)


def _read(path: Path) -> dict[str, Any]:
    """A JSON file's content; empty where there is none, or it is not what we write."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
