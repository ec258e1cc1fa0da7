"""Predicted against measured time, and the searched policy against a grid of others:
`python -m benchmarks.policy`.

Ten policies over schedules, placements and devices (the simulated gpu included) are predicted and
run. Before that, the profile of each device is corrected by runs of one other policy, as an
engine's profile is by its own runs: the transfers of a simulated gpu take the host's cores, which
no single measurement shows. Then the searched policy runs in alternation with a grid of more than
twenty under the same limits. The first run of each engine is not counted, because it also allocates
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from flexgen_helm.benchmarks.common import report, script, summary
from flexgen_helm.benchmarks.engine_task import run_blocks
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.cli.arguments import OutFile
from flexgen_helm.engine.machine_profile import measured_profile
from flexgen_helm.hardware.device_profile import simulated_gpu
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner import workload as planner_workload
from flexgen_helm.planner.corrections import corrected, corrections
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import SCHEDULES, Schedule
from flexgen_helm.planner.search import search
from flexgen_helm.tiers import MemoryLimits

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

    def limits(self, device: str) -> dict[str, int]:
        """Return the bytes of each limited tier."""
        limits = {"cpu": self.cpu_mib * MIB}
        return limits | {"gpu": self.gpu_mib * MIB} if device == "sim" else limits


@dataclass(frozen=True)
class Case:
    """A policy on a device, 'cpu' or 'sim'."""

    device: str
    policy: Policy
    schedule: Schedule

    @classmethod
    def parse(cls, line: str) -> Case:
        device, schedule, policy = line.split()
        return cls(device, Policy.parse(policy), SCHEDULES[schedule])

    def __str__(self) -> str:
        return f"{self.device} {self.schedule} {self.policy}"


def parse(cases: str) -> list[Case]:
    return [Case.parse(line) for line in cases.strip().splitlines()]


# The runs that correct each device's profile; they are not among the judged ones.
CORRECTION = parse("""
cpu zigzag 24x4,0,20,0,100,0,100
sim zigzag 24x4,10,90,0,100,0,100
""")
# Schedules, placements and devices.
SPREAD = parse("""
cpu zigzag 96x1,0,100,0,100,0,100
cpu zigzag 96x1,0,0,0,100,0,100
cpu zigzag 32x3,0,50,0,100,0,100
cpu zigzag 16x1,0,0,0,100,0,100
cpu row 24x4,0,0,0,100,0,100
sim zigzag 48x2,0,100,0,100,0,100
sim zigzag 32x3,20,80,0,100,0,100
sim zigzag 24x4,0,50,0,100,0,100
sim row 16x2,20,80,0,100,0,100
sim zigzag 8x1,0,100,100,0,100,0
""")
# Block shapes x placements, and one policy batch by batch.
GRID = [
    *(
        Case.parse(f"sim zigzag {block},{weights},0,100,0,100")
        for block in ("96x1", "48x2", "32x3", "24x4", "32x1")
        for weights in ("0,100", "20,80", "0,50", "50,50")
    ),
    Case.parse("sim row 24x4,20,80,0,100,0,100"),
]


def main(out: OutFile = None, repeats: int = 5) -> None:
    """Predict and measure."""
    report(measure(Workload(), repeats, measured_profile(fresh=True)), out)


def measure(workload: Workload, repeats: int, profile: HardwareProfile) -> dict[str, Any]:
    """Return rows in seconds; `of_prediction` is measured over predicted, `ratios` are what the
    project promises.
    """
    profiles = {case.device: corrected_profile(workload, profile, case) for case in CORRECTION}
    problems = {device: problem_of(workload, profiles[device], device) for device in profiles}
    solution = search(problems["sim"])
    chosen = Case("sim", solution.policy, solution.schedule)
    predicted = {
        case: predict(problems[case.device], case.policy, case.schedule) for case in SPREAD
    }
    grid = [c for c in GRID if predict(problems["sim"], c.policy, c.schedule).feasible]
    measured: dict[str, list[float]] = {}
    for case in [case for case, prediction in predicted.items() if prediction.feasible]:
        measured[str(case)] = seconds_of(run_case(workload, case, repeats))
        print(f"{case}: {median(measured[str(case)]):.2f} s")
    rows = [
        {
            "label": str(case),
            **summary(seconds := measured[str(case)]),
            "predicted_s": prediction.latency_s,
            "of_prediction": median(seconds) / prediction.latency_s,
            "bottleneck": prediction.bottleneck,
            "seconds": seconds,
        }
        for case, prediction in predicted.items()
        if prediction.feasible
    ]
    errors = [abs(1 / row["of_prediction"] - 1) for row in rows]
    beside: dict[str, list[float]] = {}
    for _ in range(repeats):
        for mark, case in [("chosen", chosen), *(("grid", case) for case in grid)]:
            beside.setdefault(f"{mark}: {case}", []).extend(seconds_of(run_case(workload, case, 1)))
    rows += [{"label": label, **summary(s), "seconds": s} for label, s in beside.items()]
    first, *others = map(median, beside.values())
    return {
        "name": "policy",
        "workload": asdict(workload),
        "hardware": {"profile": profile.to_json()},
        "rows": rows,
        "ratios": {
            "chosen_to_best_of_grid": first / min(others),
            "largest_error": 1 + max(errors),
            "median_error": 1 + median(errors),
        },
        "notes": [f"{len(errors)} policies predicted and measured; a grid of {len(grid)}"],
    }


def corrected_profile(workload: Workload, profile: HardwareProfile, case: Case) -> HardwareProfile:
    """Correct the profile five times by the same run; each correction closes half of the
    difference.
    """
    (record,) = run_case(workload, case, 1)
    machine = problem_of(workload, replace(profile, gpu=None, link=None), case.device).hardware
    for _ in range(5):
        prediction = predict(problem_of(workload, machine, case.device), case.policy, case.schedule)
        machine = corrected(machine, corrections(prediction, record))
    return machine


def problem_of(workload: Workload, profile: HardwareProfile, device: str) -> PlanningProblem:
    config, dtype = read_model_config(workload.model)
    if device == "sim" and profile.gpu is None:
        profile = simulated_gpu(profile, workload.link_gb_s)
    lengths = planner_workload.Workload.uniform(
        workload.prompt, workload.output, workload.sequences
    )
    limits = MemoryLimits(**workload.limits(device))
    return planning_problem(config, profile, lengths, storage_dtype=dtype, limits=limits)


def run_case(workload: Workload, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Return the records of `repeats` runs after a warm-up."""
    return run_blocks(
        model=workload.model,
        engine={
            "device": case.device,
            "policy": case.policy,
            "schedule": case.schedule.name,
            "link_gb_s": workload.link_gb_s if case.device == "sim" else None,
        },
        limits=workload.limits(case.device),
        rows=workload.sequences,
        prompt=workload.prompt,
        output=workload.output,
        repeats=repeats,
    )


def seconds_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(record["latency_s"]) for record in records]


if __name__ == "__main__":
    script(main)
