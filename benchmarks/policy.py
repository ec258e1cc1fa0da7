"""Predicted against measured time, and the searched policy against a grid of others: `python -m benchmarks.policy`.

Ten policies over schedules, placements and devices (the simulated gpu included) are predicted and run. Before that,
the profile of each device is corrected by runs of one other policy, as an engine's profile is by its own runs: the
transfers of a simulated gpu take the host's cores, which no single measurement shows. Then the searched policy runs in
alternation with a grid of more than twenty under the same limits. The first run of each engine is not counted, because
it also allocates memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks.common import report, script, summary
from flexgen_helm.benchmarks.engine_task import run_blocks
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import OutFile
from flexgen_helm.engine.machine_profile import measured_profile
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner import policy as planner_policy
from flexgen_helm.planner.plan import planning_problem, simulated_gpu
from flexgen_helm.planner.policy import ROW, ZIGZAG, Policy, Schedule
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import search
from flexgen_helm.request import MemoryLimits

MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """The runs of the benchmark.

    prompt, output: tokens of each sequence.
    cpu_mib: limit of host memory, on both devices.
    gpu_mib, link_gb_s: memory and link of the simulated gpu.
    """

    model: str = "opt-125m"
    prompt: int = 48
    output: int = 8
    sequences: int = 96
    cpu_mib: int = 900
    gpu_mib: int = 160
    link_gb_s: tuple[float, float] = (2.0, 2.0)
    repeats: int = 5
    offload_dir: Path | None = None

    def limits(self, device: str) -> dict[str, int]:
        """Return the bytes of each limited tier."""
        limits = {"cpu": self.cpu_mib * MIB}
        return limits | {"gpu": self.gpu_mib * MIB} if device == "sim" else limits


QUICK = Workload(prompt=6, output=3, sequences=4, repeats=1)


@dataclass(frozen=True)
class Case:
    """A policy on a device, 'cpu' or 'sim'."""

    device: str
    policy: Policy
    schedule: Schedule

    def __str__(self) -> str:
        return f"{self.device} {self.schedule} {self.policy}"


def main(out: OutFile = None, quick: bool = False, repeats: int | None = None, offload_dir: Path | None = None) -> None:
    """Predict and measure. --quick: figures mean nothing."""
    workload = QUICK if quick else Workload()
    workload = replace(workload, repeats=repeats or workload.repeats, offload_dir=offload_dir)
    report(measure(workload, measured_profile(folder=offload_dir, fresh=not quick)), out)


def measure(workload: Workload, profile: HardwareProfile) -> dict[str, Any]:
    """Return rows in seconds; `of_prediction` is measured over predicted, `ratios` are what the project promises."""
    rows: list[dict[str, Any]] = []
    errors = []
    profiles = {case.device: corrected_profile(workload, profile, case) for case in CORRECTION_CASES}
    for case in spread_cases():
        problem = problem_of(workload, profiles[case.device], case.device)
        predicted = predict(problem, case.policy, case.schedule)
        if not predicted.feasible:
            say(f"left out, does not fit: {case}")
            continue
        seconds = seconds_of(run_case(workload, case, workload.repeats))
        rows.append(
            {
                "label": str(case),
                **summary(seconds),
                "predicted_s": predicted.latency_s,
                "of_prediction": median(seconds) / predicted.latency_s,
                "bottleneck": predicted.bottleneck,
                "seconds": seconds,
            }
        )
        errors.append(abs(predicted.latency_s / median(seconds) - 1))
        say(f"{case}: {median(seconds):.2f} s, predicted {predicted.latency_s:.2f} s")
    problem = problem_of(workload, profiles["sim"], "sim")
    solution = search(problem)
    chosen = Case("sim", solution.policy, solution.schedule)
    grid = [case for case in grid_cases() if predict(problem, case.policy, case.schedule).feasible]
    measured: dict[str, list[float]] = {}
    for repeat in range(workload.repeats):
        for case in (chosen, *grid):
            measured.setdefault(str(case), []).extend(seconds_of(run_case(workload, case, 1)))
        say(f"the grid: {repeat + 1} of {workload.repeats}")
    for name, seconds in measured.items():
        mark = "chosen: " if name == str(chosen) else "grid: "
        rows.append({"label": mark + name, **summary(seconds), "seconds": seconds})
    best = min(median(seconds) for name, seconds in measured.items() if name != str(chosen))
    noise = [max(seconds) / min(seconds) - 1 for seconds in measured.values()]
    hardware = {"cores": psutil.cpu_count(logical=False), "memory_bytes": psutil.virtual_memory().total}
    return {
        "name": "policy",
        "workload": asdict(replace(workload, offload_dir=None)),
        "hardware": {**hardware, "profile": profile.to_json()},
        "rows": rows,
        "ratios": {
            "chosen_to_best_of_grid": median(measured[str(chosen)]) / best,
            "largest_error": 1 + max(errors),
            "median_error": 1 + median(errors),
        },
        "notes": [
            f"{len(errors)} policies predicted and measured; a grid of {len(grid)}; "
            f"noise: the slowest run of a policy takes {median(noise):.0%} longer than its quickest (median)",
        ],
    }


# The runs that correct each device's profile; they are not among the judged ones.
CORRECTION_CASES = (
    Case("cpu", Policy(24, 4, 0, 0.2, 0, 1, 0, 1), ZIGZAG),
    Case("sim", Policy(24, 4, 0.1, 0.9, 0, 1, 0, 1), ZIGZAG),
)


def corrected_profile(workload: Workload, profile: HardwareProfile, case: Case) -> HardwareProfile:
    """Correct the profile five times by the same run; each correction closes half of the difference."""
    from flexgen_helm.planner.planner import corrected, corrections

    (record,) = run_case(workload, case, 1)
    machine = problem_of(workload, replace(profile, gpu=None, link=None), case.device).hardware
    for _ in range(5):
        prediction = predict(problem_of(workload, machine, case.device), case.policy, case.schedule)
        machine = corrected(machine, corrections(prediction, record))
    return machine


def spread_cases() -> list[Case]:
    """Return ten policies over schedules, placements and devices."""
    cases = (
        ("cpu", "96x1,0,100,0,100,0,100", ZIGZAG),
        ("cpu", "96x1,0,0,0,100,0,100", ZIGZAG),
        ("cpu", "32x3,0,50,0,100,0,100", ZIGZAG),
        ("cpu", "16x1,0,0,0,100,0,100", ZIGZAG),
        ("cpu", "24x4,0,0,0,100,0,100", ROW),
        ("sim", "48x2,0,100,0,100,0,100", ZIGZAG),
        ("sim", "32x3,20,80,0,100,0,100", ZIGZAG),
        ("sim", "24x4,0,50,0,100,0,100", ZIGZAG),
        ("sim", "16x2,20,80,0,100,0,100", ROW),
        ("sim", "8x1,0,100,100,0,100,0", ZIGZAG),
    )
    return [Case(device, Policy.parse(text), schedule) for device, text, schedule in cases]


def grid_cases() -> list[Case]:
    """Return block shapes x placements, and one policy batch by batch."""
    blocks: Sequence[tuple[int, int]] = ((96, 1), (48, 2), (32, 3), (24, 4), (32, 1))
    weights = ((0.0, 1.0), (0.2, 0.8), (0.0, 0.5), (0.5, 0.5))  # on gpu and cpu
    zigzag = [Case("sim", Policy(*block, *shares, 0, 1, 0, 1), ZIGZAG) for block in blocks for shares in weights]
    return [*zigzag, Case("sim", Policy(24, 4, 0.2, 0.8, 0, 1, 0, 1), ROW)]


def problem_of(workload: Workload, profile: HardwareProfile, device: str) -> PlanningProblem:
    config, dtype = read_model_config(workload.model)
    if device == "sim" and profile.gpu is None:
        profile = simulated_gpu(profile, workload.link_gb_s)
    lengths = planner_policy.Workload.uniform(workload.prompt, workload.output, workload.sequences)
    limits = MemoryLimits(**workload.limits(device))
    return planning_problem(config, profile, lengths, storage_dtype=dtype, limits=limits)


def run_case(workload: Workload, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Return the records of `repeats` runs after a warm-up."""
    engine = {
        "device": case.device,
        "policy": case.policy,
        "schedule": case.schedule.name,
        "link_gb_s": workload.link_gb_s if case.device == "sim" else None,
        "offload_dir": workload.offload_dir,
    }
    sizes = {"rows": workload.sequences, "prompt": workload.prompt, "output": workload.output}
    limits = workload.limits(case.device)
    return run_blocks(model=workload.model, engine=engine, limits=limits, **sizes, warm=True, repeats=repeats)


def seconds_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(record["latency_s"]) for record in records]


if __name__ == "__main__":
    script(main)
