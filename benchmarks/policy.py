"""`bench policy`: predicted against measured time, and the searched policy against a grid of others.

Ten policies over schedules, placements and devices (the simulated gpu included) are predicted and run. Before that,
the profile of each device is corrected by runs of one other policy, as an engine's profile is by its own runs: the
transfers of a simulated gpu take the host's cores, which no single measurement shows. Then the searched policy runs in
alternation with a grid of more than twenty under the same limits. The first run of each engine is not counted, because
it also allocates memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.common import check_engine_flags, load_notes
from flexgen_helm.benchmarks.engine_task import prompts
from flexgen_helm.benchmarks.memory_settings import policy_text
from flexgen_helm.checkpoint.model_config import read_model_config
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner import workload as planner_workload
from flexgen_helm.planner.plan import planning_problem, simulated_gpu
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import search
from flexgen_helm.report.throughput import versions
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


QUICK = Workload(prompt=6, output=3, sequences=4, repeats=1)


@dataclass(frozen=True)
class Case:
    """A policy on a device, 'cpu' or 'sim'."""

    device: str
    policy: Policy
    schedule: Schedule


def run(options: Options) -> dict[str, Any]:
    """Return rows in seconds; `of_prediction` is measured over predicted, `ratios` are what the project promises."""
    from flexgen_helm.engine.machine_profile import measured_profile

    check_engine_flags("policy", options)
    workload = QUICK if options.quick else Workload()
    workload = replace(workload, repeats=options.repeats or workload.repeats)
    notes = load_notes()
    folder = options.engine.get("offload_dir")
    profile = measured_profile(
        folder=None if folder is None else Path(folder), fresh=not options.quick, tell=options.tell
    )
    result = measure(workload, profile, options)
    return {**result, "notes": result["notes"] + notes}


def measure(workload: Workload, profile: HardwareProfile, options: Options) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    errors = []
    profiles = {case.device: corrected_profile(workload, profile, case, options) for case in CORRECTION_CASES}
    for case in spread_cases():
        problem = problem_of(workload, profiles[case.device], case.device)
        predicted = predict(problem, case.policy, case.schedule)
        if not predicted.feasible:
            options.tell(f"left out, does not fit: {label(case)}")
            continue
        seconds = run_case(workload, case, workload.repeats, options)
        rows.append(
            {
                "label": label(case),
                **summary(seconds),
                "predicted_s": predicted.latency_s,
                "of_prediction": median(seconds) / predicted.latency_s,
                "bottleneck": predicted.bottleneck,
                "seconds": seconds,
            }
        )
        errors.append(abs(predicted.latency_s / median(seconds) - 1))
        options.tell(f"{label(case)}: {median(seconds):.2f} s, predicted {predicted.latency_s:.2f} s")
    problem = problem_of(workload, profiles["sim"], "sim")
    solution = search(problem)
    chosen = Case("sim", solution.policy, solution.schedule)
    grid = [case for case in grid_cases() if predict(problem, case.policy, case.schedule).feasible]
    measured: dict[str, list[float]] = {}
    for repeat in range(workload.repeats):
        for case in (chosen, *grid):
            seconds = run_case(workload, case, 1, options)
            measured.setdefault(label(case), []).extend(seconds)
        options.tell(f"the grid: {repeat + 1} of {workload.repeats}")
    for name, seconds in measured.items():
        mark = "chosen: " if name == label(chosen) else "grid: "
        rows.append({"label": mark + name, **summary(seconds), "seconds": seconds})
    best = min(median(seconds) for name, seconds in measured.items() if name != label(chosen))
    noise = [max(seconds) / min(seconds) - 1 for seconds in measured.values()]
    hardware = {"cores": psutil.cpu_count(logical=False), "memory_bytes": psutil.virtual_memory().total}
    return {
        "name": "policy",
        "workload": asdict(workload),
        "hardware": {**hardware, "profile": profile.to_json()},
        "versions": versions(),
        "rows": rows,
        "ratios": {
            "chosen_to_best_of_grid": median(measured[label(chosen)]) / best,
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
    Case("cpu", Policy(24, 4, 0, 0.2, 0, 1, 0, 1), "zigzag"),
    Case("sim", Policy(24, 4, 0.1, 0.9, 0, 1, 0, 1), "zigzag"),
)


def corrected_profile(workload: Workload, profile: HardwareProfile, case: Case, options: Options) -> HardwareProfile:
    """Correct the profile five times by the same run; each correction closes half of the difference."""
    from flexgen_helm.engine.auto_planner import corrected, corrections

    records: list[dict[str, Any]] = []
    run_case(workload, case, 1, options, records)
    machine = problem_of(workload, replace(profile, gpu=None, link=None), case.device).hardware
    for _ in range(5):
        prediction = predict(problem_of(workload, machine, case.device), case.policy, case.schedule)
        machine = corrected(machine, corrections(prediction, records[-1]))
    return machine


def spread_cases() -> list[Case]:
    """Return ten policies over schedules, placements and devices."""
    return [
        Case("cpu", Policy(96, 1, 0, 1, 0, 1, 0, 1), "zigzag"),
        Case("cpu", Policy(96, 1, 0, 0, 0, 1, 0, 1), "zigzag"),
        Case("cpu", Policy(32, 3, 0, 0.5, 0, 1, 0, 1), "zigzag"),
        Case("cpu", Policy(16, 1, 0, 0, 0, 1, 0, 1), "zigzag"),
        Case("cpu", Policy(24, 4, 0, 0, 0, 1, 0, 1), "row"),
        Case("sim", Policy(48, 2, 0, 1, 0, 1, 0, 1), "zigzag"),
        Case("sim", Policy(32, 3, 0.2, 0.8, 0, 1, 0, 1), "zigzag"),
        Case("sim", Policy(24, 4, 0, 0.5, 0, 1, 0, 1), "zigzag"),
        Case("sim", Policy(16, 2, 0.2, 0.8, 0, 1, 0, 1), "row"),
        Case("sim", Policy(8, 1, 0, 1, 1, 0, 1, 0), "zigzag"),
    ]


def grid_cases() -> list[Case]:
    """Return block shapes x placements, and one policy batch by batch."""
    blocks: Sequence[tuple[int, int]] = ((96, 1), (48, 2), (32, 3), (24, 4), (32, 1))
    weights = ((0.0, 1.0), (0.2, 0.8), (0.0, 0.5), (0.5, 0.5))  # on gpu and cpu
    zigzag = [Case("sim", Policy(*block, *shares, 0, 1, 0, 1), "zigzag") for block in blocks for shares in weights]
    return [*zigzag, Case("sim", Policy(24, 4, 0.2, 0.8, 0, 1, 0, 1), "row")]


def problem_of(workload: Workload, profile: HardwareProfile, device: str) -> PlanningProblem:
    config, dtype = read_model_config(workload.model)
    machine = profile
    limits = MemoryLimits(cpu=workload.cpu_mib * MIB)
    if device == "sim":
        limits = replace(limits, gpu=workload.gpu_mib * MIB)
        if machine.gpu is None:
            # Its memory is the host's, and so is the workspace of computing.
            machine = simulated_gpu(machine, machine.cpu.memory_bytes, workload.link_gb_s)
    lengths = planner_workload.Workload.uniform(workload.prompt, workload.output, workload.sequences)
    return planning_problem(config, machine, lengths, storage_dtype=dtype, limits=limits)


def run_case(
    workload: Workload, case: Case, repeats: int, options: Options, records: list[dict[str, Any]] | None = None
) -> list[float]:
    """Return the seconds of `repeats` runs after a warm-up; the records of all runs are appended to `records`."""
    from flexgen_helm import Engine, GenerationRequest

    extra: dict[str, Any] = {}
    limits = MemoryLimits(cpu=workload.cpu_mib * MIB)
    if case.device == "sim":
        limits, extra = replace(limits, gpu=workload.gpu_mib * MIB), {"link_gb_s": workload.link_gb_s}
    with Engine.from_pretrained(
        workload.model,
        weights="dummy",
        device=case.device,
        limits=limits,
        policy=case.policy,
        schedule=case.schedule,
        offload_dir=options.engine.get("offload_dir"),
        **extra,
    ) as engine:
        requests = [
            GenerationRequest(prompt_token_ids=ids, max_tokens=workload.output, ignore_eos=True)
            for ids in prompts(workload.sequences, workload.prompt, engine.config.vocab_size)
        ]
        seconds = []
        for _ in range(repeats + 1):
            for result in engine.run(requests):
                if result.error is not None:
                    raise result.error
            seconds.append(float(engine.last_run["latency_s"]))
            if records is not None:
                records.append(engine.last_run)
    return seconds[1:]


def label(case: Case) -> str:
    return f"{case.device} {case.schedule} {policy_text(case.policy)}"
