"""Rows of a table of throughputs (`plan --from-csv`): each one evaluated by the cost model. No torch.

The columns are those of the paper's tables: system, model, prompt_len, gen_len, schedule, the block, percentages,
switches, and what the disk of that measurement did.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import capacity, predict
from flexgen_helm.planner.problem import OUR_ENGINE, EngineTraits, PlanningProblem
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16, PAPER_GROUPS, PRECISIONS

# FlexGen packs every matrix, tables included, and the cache along the elements of a head.
COMPRESSED = replace(PRECISIONS["paper-4bit"], tables=PAPER_GROUPS)
# How the measured systems handle host memory and files, as their sources show: FlexGen does not page-lock its
# cache, attends on the host to a cache on the disk too, and maps files;
# Accelerate's weights are pageable as well; DeepSpeed page-locks them.
_FLEXGEN = EngineTraits(
    pinned_weights=True,
    pinned_cache=False,
    disk_cache_on_host=True,
    converts_per_batch=False,
    max_batch_tokens=1 << 40,
    decode_sequences=0,
    page_cache=True,
    staging="layers",
)
RUNTIMES: Mapping[str, EngineTraits] = {
    "flexgen": _FLEXGEN,
    "deepspeed": _FLEXGEN,
    "accelerate": replace(_FLEXGEN, pinned_weights=False),
    "ours": OUR_ENGINE,
}
# Below this a figure with two decimals says little.
LEAST_TOKENS_PER_S = 0.05
_REQUIRED = ("model", "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "wg", "wc", "cg", "cc", "hg", "hc")


@dataclass(frozen=True)
class Row:
    """One line: what was measured (None where the table says that memory ran out, or nothing)."""

    situation: PlanningProblem
    policy: Policy
    schedule: Schedule
    measured: float | None


def evaluate_csv(path: Path, hardware: HardwareProfile) -> dict[str, Any]:
    """{rows: the input's columns with predicted_tokens_per_s and feasible, summary: {median_error, max_error, n, …}}.

    The summary is over rows with a measured figure of at least `LEAST_TOKENS_PER_S`; `by_system` has the same for
    each system. Raises `UsageError` that names line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}") from error
    missing = [name for name in _REQUIRED if not lines or name not in lines[0]]
    if missing:
        raise UsageError(f"{path} needs a line of headers with {', '.join(missing)}, and at least one row")
    rows: list[dict[str, Any]] = []
    errors: dict[str, list[float]] = {}
    for number, line in enumerate(lines, start=2):
        try:
            row = read_row(line, hardware)
            found = predict(row.situation, row.policy, row.schedule, rounded=False)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        error_ = None
        if row.measured is not None:
            error_ = found.tokens_per_s / row.measured - 1
            if row.measured >= LEAST_TOKENS_PER_S:
                errors.setdefault(line.get("system") or "", []).append(abs(error_))
        rows.append(
            {
                **line,
                "predicted_tokens_per_s": found.tokens_per_s,
                "predicted_prefill_s": found.prefill_s,
                "predicted_decode_s": found.decode_s,
                "feasible": found.feasible,
                "missing_bytes": dict(found.missing),
                "bottleneck": found.bottleneck,
                "error": error_,
            }
        )
    everything = [error for some in errors.values() for error in some]
    by_system = {system: _summary(some) for system, some in errors.items()}
    return {"rows": rows, "summary": {**_summary(everything), "by_system": by_system}}


def read_row(line: Mapping[str, str], hardware: HardwareProfile) -> Row:
    """Raises `ValueError`, `KeyError` or `UsageError` where a column cannot be read."""
    entry = resolve(line["model"]).entry
    if entry is None:
        raise UsageError(f"model {line['model']!r} is not in the catalogue")
    shares = [_number(line, name) / 100 for name in ("wg", "wc", "cg", "cc", "hg", "hc")]
    policy = Policy(int(line["gpu_batch_size"]), int(line["num_gpu_batches"]), *shares)
    compressed = _switch(line, "compress", False)
    disk = hardware.disk
    if line.get("disk_read_gb_s"):
        disk = replace(disk, read_bytes_s=_number(line, "disk_read_gb_s") * 1e9 * disk.streams)
    if line.get("disk_write_gb_s"):
        disk = replace(disk, write_bytes_s=_number(line, "disk_write_gb_s") * 1e9 * disk.streams)
    hardware = replace(hardware, disk=disk)
    system = (line.get("system") or "flexgen").split()[0].lower()
    if system not in RUNTIMES:
        raise UsageError(f"system {system!r} is not known; take {', '.join(RUNTIMES)}")
    runtime = replace(RUNTIMES[system], page_cache=line.get("page_cache") == "free")
    situation = PlanningProblem(
        entry.config,
        hardware,
        Workload.uniform(int(line["prompt_len"]), int(line["gen_len"]), 1),
        COMPRESSED if compressed else FP16,
        2,
        {},
        runtime,
        overlap=_switch(line, "overlap", True),
        cpu_attention=_switch(line, "cpu_attention", True),
        endless=True,
    )
    situation = replace(situation, limits={tier: capacity(situation, tier) for tier in ("gpu", "cpu", "disk")})
    measured = line.get("tokens_per_s") or ""
    try:
        value = float(measured)
    except ValueError:
        value = None
    return Row(situation, policy, cast(Schedule, line.get("schedule") or "zigzag"), value)


def _summary(errors: Iterable[float]) -> dict[str, Any]:
    found = sorted(errors)
    return {
        "median_error": median(found) if found else None,
        "max_error": max(found) if found else None,
        "n": len(found),
    }


def _number(line: Mapping[str, str], name: str) -> float:
    try:
        return float(line[name])
    except ValueError:
        raise UsageError(f"column {name} holds {line[name]!r}, which is no number") from None


def _switch(line: Mapping[str, str], name: str, default: bool) -> bool:
    text = line.get(name) or ""
    return default if not text else text not in ("0", "false", "False")
