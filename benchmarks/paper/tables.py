"""Evaluate each row of a table of throughputs with the cost model.

The columns are those of the paper's tables: system, model, prompt_len, gen_len, schedule, block shape, percentages,
switches, and what the disk of that measurement did. A column `machine` names a profile of `machines/` for its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks.common import script
from flexgen_helm.benchmarks.paper.systems import (
    COMPRESSED,
    COMPRESSED_WEIGHTS,
    SYSTEMS,
    with_page_cache,
    with_torch_dequantization,
)
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.cli.console import output, print_table
from flexgen_helm.engine.machine_profile import profile_named
from flexgen_helm.errors import UsageError
from flexgen_helm.files import count
from flexgen_helm.hardware.profile import HardwareProfile, load_profile
from flexgen_helm.planner.placement import TIERS
from flexgen_helm.planner.plan import Spread, spread_of
from flexgen_helm.planner.policy import SCHEDULES, ZIGZAG, Policy, Schedule, Workload
from flexgen_helm.planner.predict import CostEstimate, predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.quant.precisions import FP16, Precision

# A smaller figure with two decimals is too coarse to compare with.
MIN_TOKENS_PER_S = 0.05
MACHINES = Path(__file__).parent / "machines"
_SHARES = ("wg", "wc", "cg", "cc", "hg", "hc")
_REQUIRED = ("model", "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", *_SHARES)


def evaluate_csv(path: Path, hardware: HardwareProfile) -> dict[str, Any]:
    """Return {rows, summary}: the table's columns with predictions, and the errors over all rows and by system.

    Rows that measure less than `MIN_TOKENS_PER_S` are not in the summary.
    Raises `UsageError` with line and column.
    """
    try:
        lines = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False).fillna("").to_dict("records")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}") from error
    missing = [name for name in _REQUIRED if not lines or name not in lines[0]]
    if missing:
        raise UsageError(f"{path} needs a line of headers with {', '.join(missing)}, and at least one row")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=2):
        try:
            prediction = predict_row({str(name): str(text) for name, text in line.items()}, hardware)
        except (ValueError, KeyError, UsageError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        try:
            deviation = prediction.tokens_per_s / float(line.get("tokens_per_s") or "") - 1
        except ValueError:
            deviation = None  # the table says that memory ran out, or nothing
        rows.append(
            {
                **line,
                "predicted_tokens_per_s": prediction.tokens_per_s,
                "predicted_prefill_s": prediction.prefill_s,
                "predicted_decode_s": prediction.decode_s,
                "feasible": prediction.feasible,
                "missing_bytes": dict(prediction.missing),
                "bottleneck": prediction.bottleneck,
                "error": deviation,
            }
        )
    return {"rows": rows, "summary": summarize(rows, spread_of(hardware))}


def main(file: Path, hardware: str = "t4") -> None:
    """Print the prediction for every row of a table of throughputs, and the errors."""
    result = evaluate_csv(file, profile_named(hardware))
    rows = pd.DataFrame(result["rows"])
    shares = [rows[[f"{kind}g", f"{kind}c"]].agg("/".join, axis=1) for kind in "wch"]
    table = rows.reindex(columns=["system", "model"]).fillna("")
    table["block"] = rows["gpu_batch_size"] + "x" + rows["num_gpu_batches"]
    table["wg/wc cg/cc hg/hc"] = pd.concat(shares, axis=1).agg(" ".join, axis=1)
    table["token/s"] = rows.get("tokens_per_s", "")
    table["predicted"] = rows["predicted_tokens_per_s"].map("{:.3g}".format).where(rows["feasible"], "OOM")
    table["error"] = rows["error"].map("{:+.0%}".format, na_action="ignore")
    table["bottleneck"] = rows["bottleneck"]
    print_table(table.to_dict("records"))
    for name, errors in {"all": result["summary"], **result["summary"]["by_system"]}.items():
        if errors["n"]:
            median, largest = errors["median_error"], errors["max_error"]
            output().print(f"{name}: median error {median:.1%}, largest {largest:.0%}, {count(errors['n'], 'row')}")
    within = result["summary"]["within_range"]
    low, high = within["times_predicted"]
    output().print(
        f"{within['n']} of {count(result['summary']['n'], 'row')} took {low:.2g} to {high:.2g} times as long as "
        "predicted, which is the range of a plan for this machine."
    )


def summarize(rows: list[dict[str, Any]], spread: Spread) -> dict[str, Any]:
    """Return {median_error, max_error, n} over all rows and, under `by_system`, for each system.

    Systems are divided by machine if the table names machines. Under `within_range`, how many rows the range of a plan
    holds.
    """
    counted = [row for row in rows if row["error"] is not None and float(row["tokens_per_s"]) >= MIN_TOKENS_PER_S]
    systems = [" on ".join(filter(None, (row.get("system"), row.get("machine")))) for row in counted]
    errors = pd.Series([abs(row["error"]) for row in counted], index=systems, dtype=float)
    by_system = {system: _errors(errors[[system]]) for system in dict.fromkeys(systems)}
    within = sum(spread.holds(1 + row["error"]) for row in counted)  # 1 + error: measured by predicted time
    in_range = {"times_predicted": (spread.low, spread.high), "n": within}
    return {**_errors(errors), "by_system": by_system, "within_range": in_range}


def _errors(errors: pd.Series) -> dict[str, Any]:
    if errors.empty:
        return {"median_error": None, "max_error": None, "n": 0}
    return {"median_error": float(errors.median()), "max_error": float(errors.max()), "n": len(errors)}


def predict_row(line: Mapping[str, str], hardware: HardwareProfile) -> CostEstimate:
    """Predict one row. Raises `ValueError`, `KeyError` or `UsageError` if a column cannot be read."""
    problem, policy, schedule = row_problem(line, hardware)
    return predict(problem, policy, schedule, rounded=False)


def row_problem(line: Mapping[str, str], hardware: HardwareProfile) -> tuple[PlanningProblem, Policy, Schedule]:
    """Return what a row asks of the cost model. Raises as `predict_row` does."""
    entry = resolve(line["model"]).entry
    if entry is None:
        raise UsageError(f"model {line['model']!r} is not in the catalog")
    shares = (_number(line, name) / 100 for name in _SHARES)
    policy = Policy(int(line["gpu_batch_size"]), int(line["num_gpu_batches"]), *shares)
    system = (line.get("system") or "flexgen").split()[0].lower()
    if system not in SYSTEMS:
        raise UsageError(f"system {system!r} is not known; take {', '.join(SYSTEMS)}")
    if system == "flexgen" and not _switch(line, "pin_weight", True):
        system = "flexgen-pageable"
    name = line.get("schedule") or ZIGZAG.name
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name!r} is not known; take {', '.join(SCHEDULES)}")
    problem = full_memory(
        SYSTEMS[system](
            entry.config,
            hardware_of(line, hardware),
            Workload.uniform(int(line["prompt_len"]), int(line["gen_len"]), 1),
            _precision_of(line),
            compute_bytes=2,
            limits={},
            overlap=_switch(line, "overlap", True),
            cpu_attention=_switch(line, "cpu_attention", True),
            endless=True,
        )
    )
    return problem, policy, SCHEDULES[name]


def full_memory(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with all that the machine has of each tier."""
    return replace(problem, limits={tier: problem.capacity(tier) for tier in TIERS})


def hardware_of(line: Mapping[str, str], hardware: HardwareProfile) -> HardwareProfile:
    """Return the row's own machine, as FlexGen uses it, if it names one, with the disk of the row."""
    if name := line.get("machine"):
        if not (MACHINES / f"{name}.json").is_file():
            known = sorted(path.stem for path in MACHINES.glob("*.json"))
            raise UsageError(f"machine {name!r} is not known; take {', '.join(known)}, or leave the column out")
        hardware = load_profile(str(MACHINES / f"{name}.json"))
    else:
        hardware = with_torch_dequantization(hardware)
    disk = hardware.disk
    if line.get("disk_read_gb_s"):
        disk = replace(disk, read_bytes_s=_number(line, "disk_read_gb_s") * 1e9 * disk.streams)
    if line.get("disk_write_gb_s"):
        disk = replace(disk, write_bytes_s=_number(line, "disk_write_gb_s") * 1e9 * disk.streams)
    hardware = replace(hardware, disk=disk)
    return with_page_cache(hardware) if line.get("page_cache") == "free" else hardware


def _precision_of(line: Mapping[str, str]) -> Precision:
    if line.get("compress") == "weights":
        return COMPRESSED_WEIGHTS
    return COMPRESSED if _switch(line, "compress", False) else FP16


def _number(line: Mapping[str, str], name: str) -> float:
    try:
        return float(line[name])
    except ValueError:
        raise UsageError(f"column {name} holds {line[name]!r}, which is no number") from None


def _switch(line: Mapping[str, str], name: str, default: bool) -> bool:
    text = line.get(name) or ""
    return default if not text else text not in ("0", "false", "False")


if __name__ == "__main__":
    script(main)
