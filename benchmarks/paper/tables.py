"""Evaluate each row of a table of throughputs with the cost model.

The columns are those of the paper's tables: system, model, prompt_len, gen_len, schedule, block
shape, percentages, switches, and what the disk of that measurement did. A column `machine` names a
profile of `machines/` for its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks.common import choose, script
from flexgen_helm.benchmarks.paper.systems import (
    COMPRESSED,
    COMPRESSED_WEIGHTS,
    SYSTEMS,
    with_page_cache,
    with_torch_dequantization,
)
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.cli.console import print_table
from flexgen_helm.engine.machine_profile import profile_named
from flexgen_helm.errors import UsageError
from flexgen_helm.files import count
from flexgen_helm.hardware.profile import HardwareProfile, load_profile
from flexgen_helm.planner.measured_range import MeasuredRange, measured_range
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import CostEstimate, predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import SCHEDULES, ZIGZAG, Schedule
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16
from flexgen_helm.tiers import TIERS

# A smaller figure with two decimals is too coarse to compare with.
MIN_TOKENS_PER_S = 0.05
MACHINES = Path(__file__).parent / "machines"
_PREDICTED = ("tokens_per_s", "prefill_s", "decode_s")
_SHARES = ("wg", "wc", "cg", "cc", "hg", "hc")
_REQUIRED = ("model", "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", *_SHARES)


def evaluate_csv(path: Path, hardware: HardwareProfile) -> dict[str, Any]:
    """Return {rows, summary}: the table's columns with predictions, and the errors over all rows
    and by system.

    Rows that measure less than `MIN_TOKENS_PER_S` are not in the summary.
    Raises `UsageError` with line and column.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False).fillna("")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}") from error
    if table.empty or not {*_REQUIRED} <= {*table.columns}:
        needed = ", ".join(_REQUIRED)
        raise UsageError(f"{path} needs a line of headers with {needed}, and at least one row")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(table.to_dict("records"), start=2):
        try:
            prediction = predict_row(line, hardware)
        except (ValueError, KeyError, UsageError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        # The table may say that memory ran out, or nothing.
        measured = float(pd.to_numeric(line.get("tokens_per_s", ""), errors="coerce"))
        rows.append(
            {
                **line,
                **{f"predicted_{key}": getattr(prediction, key) for key in _PREDICTED},
                "feasible": prediction.feasible,
                "missing_bytes": dict(prediction.missing),
                "bottleneck": prediction.bottleneck,
                "error": prediction.tokens_per_s / measured - 1 if measured > 0 else None,
            }
        )
    return {"rows": rows, "summary": summarize(rows, measured_range(hardware))}


def main(file: Path, hardware: str = "t4") -> None:
    """Print the prediction for every row of a table of throughputs, and the errors."""
    result = evaluate_csv(file, profile_named(hardware))
    summary = result["summary"]
    print_table(
        [
            {
                "policy": label_of(row),
                "tokens_per_s": row.get("tokens_per_s"),
                "predicted": row["predicted_tokens_per_s"] if row["feasible"] else "OOM",
                "error": None if row["error"] is None else f"{row['error']:+.0%}",
                "bottleneck": row["bottleneck"],
            }
            for row in result["rows"]
        ]
    )
    for name, errors in {"all": summary, **summary["by_system"]}.items():
        if errors["n"]:
            median, largest = errors["median_error"], errors["max_error"]
            print(
                f"{name}: median error {median:.1%}, largest {largest:.0%}, "
                f"{count(errors['n'], 'row')}"
            )
    low, high = summary["within_range"]["times_predicted"]
    print(
        f"{summary['within_range']['n']} of {count(summary['n'], 'row')} took {low:.2g} to "
        f"{high:.2g} times as long as predicted, which is the range of a plan for this machine."
    )


def label_of(line: Mapping[str, str]) -> str:
    """Return system, model, GPU batch x batches, and percent on GPU/CPU of weights, cache and
    hidden states.
    """
    shares = " ".join(f"{line[f'{kind}g']}/{line[f'{kind}c']}" for kind in "wch")
    block = f"{line['gpu_batch_size']}x{line['num_gpu_batches']}"
    held = ", page cache held back" if line.get("page_cache") == "held_back" else ""
    return f"{line.get('system', '')} {line['model']} {block} {shares}{held}".lstrip()


def summarize(rows: list[dict[str, Any]], spread: MeasuredRange) -> dict[str, Any]:
    """Return {median_error, max_error, n} over all rows and, under `by_system`, for each system.

    Systems are divided by machine if the table names machines. Under `within_range`, how many rows
    the range of a plan holds.
    """
    by_system: dict[str, list[float]] = {}
    for row in rows:
        if row["error"] is not None and float(row["tokens_per_s"]) >= MIN_TOKENS_PER_S:
            system = " on ".join(filter(None, (row.get("system"), row.get("machine"))))
            by_system.setdefault(system, []).append(row["error"])
    errors = [error for of_system in by_system.values() for error in of_system]
    # 1 + error: measured by predicted time
    within = sum(spread.low <= 1 + error <= spread.high for error in errors)
    return {
        **_errors(errors),
        "by_system": {system: _errors(of_system) for system, of_system in by_system.items()},
        "within_range": {"times_predicted": (spread.low, spread.high), "n": within},
    }


def _errors(errors: Sequence[float]) -> dict[str, Any]:
    sizes = pd.Series(errors, dtype=float).abs()
    figures = (sizes.median(), sizes.max()) if errors else (None, None)
    return {"median_error": figures[0], "max_error": figures[1], "n": len(errors)}


def predict_row(line: Mapping[str, str], hardware: HardwareProfile) -> CostEstimate:
    """Predict one row. Raises `ValueError`, `KeyError` or `UsageError` if a column cannot be
    read.
    """
    return predict(*row_problem(line, hardware), rounded=False)


def row_problem(
    line: Mapping[str, str], hardware: HardwareProfile
) -> tuple[PlanningProblem, Policy, Schedule]:
    """Return what a row asks of the cost model. Raises as `predict_row` does."""
    if (entry := resolve(line["model"]).entry) is None:
        raise UsageError(f"model {line['model']!r} is not in the catalog")
    shares = (_number(line, name) / 100 for name in _SHARES)
    policy = Policy(int(line["gpu_batch_size"]), int(line["num_gpu_batches"]), *shares)
    system = (line.get("system") or "flexgen").split()[0].lower()
    if system == "flexgen" and line.get("pin_weight") == "0":
        system = "flexgen-pageable"
    problem = choose("system", system, SYSTEMS)(
        entry.config,
        hardware_of(line, hardware),
        Workload.uniform(int(line["prompt_len"]), int(line["gen_len"]), 1),
        _COMPRESSION[line.get("compress") or "0"],
        compute_bytes=2,
        limits={},
        overlap=line.get("overlap") != "0",
        cpu_attention=line.get("cpu_attention") != "0",
        endless=True,
    )
    schedule = choose("schedule", line.get("schedule") or ZIGZAG.name, SCHEDULES)
    return full_memory(problem), policy, schedule


_COMPRESSION = {"0": FP16, "1": COMPRESSED, "weights": COMPRESSED_WEIGHTS}


def full_memory(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with all that the machine has of each tier."""
    return replace(problem, limits={tier: problem.capacity(tier) for tier in TIERS})


def hardware_of(line: Mapping[str, str], hardware: HardwareProfile) -> HardwareProfile:
    """Return the row's machine, as FlexGen uses it, if it names one, with the disk of the row."""
    if name := line.get("machine"):
        path = choose(
            "machine", name, {path.stem: path for path in sorted(MACHINES.glob("*.json"))}
        )
        hardware = load_profile(str(path))
    else:
        hardware = with_torch_dequantization(hardware)
    disk = hardware.disk
    if line.get("disk_read_gb_s"):
        disk = replace(disk, read_bytes_s=_number(line, "disk_read_gb_s") * 1e9 * disk.streams)
    if line.get("disk_write_gb_s"):
        disk = replace(disk, write_bytes_s=_number(line, "disk_write_gb_s") * 1e9 * disk.streams)
    hardware = replace(hardware, disk=disk)
    return with_page_cache(hardware) if line.get("page_cache") == "free" else hardware


def _number(line: Mapping[str, str], name: str) -> float:
    try:
        return float(line[name])
    except ValueError:
        raise UsageError(f"column {name} holds {line[name]!r}, which is no number") from None


if __name__ == "__main__":
    script(main)
