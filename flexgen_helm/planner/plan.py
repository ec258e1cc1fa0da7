"""Plans for users: a planning problem of what they say, and a searched or given policy with its
cost, explained. No torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.hardware.profile import Curve, HardwareProfile
from flexgen_helm.models.architectures import overflows_float16
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.affine import fractions_by_kind
from flexgen_helm.planner.measured_range import Expectation, MeasuredRange, measured_range
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import placed_fractions, predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import PREFILL_ONLY, ZIGZAG, Schedule
from flexgen_helm.planner.search import Solution, search, shortage
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import Precision, precision_named
from flexgen_helm.shared_sizes import KEEP_EVERY_S, KEEP_STATES_EVERY_S
from flexgen_helm.tiers import TIERS, MemoryLimits, Tier

# Precisions that a plan compares where none is asked for.
_COMPARED = ("fp16", "8bit", "4bit")
_Record = TypeVar("_Record")


def planning_problem(
    config: ModelConfig,
    hardware: HardwareProfile,
    workload: Workload,
    *,
    precision: str | Precision = "fp16",
    limits: MemoryLimits = MemoryLimits(),
    **fields: Any,
) -> PlanningProblem:
    """Collect what the cost model needs.

    limits: None for what the machine has, less a margin; of the disk all that is free.
    fields: more of the problem, such as the checkpoint's `storage_dtype`.

    Raises `UsageError` for a negative limit and for an unknown precision.
    """
    float16_suffices = not overflows_float16(config.architecture)
    stored = fields.get("storage_dtype", "float16")
    half = (
        hardware.gpu is not None
        and hardware.gpu.compute_dtype(stored, float16_suffices) != "float32"
    )
    named = precision_named(precision) if isinstance(precision, str) else precision
    problem = PlanningProblem(config, hardware, workload, named, 2 if half else 4, {}, **fields)
    bytes_by_tier: dict[Tier, float] = {}
    for tier in TIERS:
        limit = getattr(limits, tier)
        if limit is not None and limit < 0:
            raise UsageError(
                f"the limit of the {tier} tier is {limit:,} bytes; it must be at least 0"
            )
        bytes_by_tier[tier] = float(problem.largest_limit(tier) if limit is None else limit)
    return replace(problem, limits=bytes_by_tier)


@dataclass(frozen=True)
class Plan:
    """A policy with its cost."""

    problem: PlanningProblem
    solution: Solution

    @property
    def why(self) -> str:
        """What does not fit, or the part that bounds the speed: it brings most if it is twice as
        fast.
        """
        prediction = self.solution.prediction
        if missing := prediction.missing:
            tier = max(missing, key=lambda tier: missing[tier])
            used = prediction.memory[tier]
            return f"Does not fit: needs {shortage(self.problem, tier, used.peak, used.workspace)}."
        faster = _twice_as_fast(self.problem, self.solution)
        part = min(faster, key=lambda name: faster[name])
        saved = 1 - faster[part] / prediction.latency_s
        if saved < 0.02:
            return "Bound by no part alone."
        saves = "halves the time" if saved > 0.45 else f"saves {100 * saved:.0f} % of the time"
        return f"Bound by the {part}: twice as fast {saves}."

    @property
    def block_sequences(self) -> int:
        """Sequences that are computed together."""
        block_size = self.solution.policy.block_size
        num_sequences = self.problem.workload.num_sequences
        if self.problem.endless:
            return block_size
        return (
            num_sequences
            if self.solution.schedule.is_single_pass
            else min(block_size, num_sequences)
        )

    @property
    def sequences_per_h(self) -> float:
        return 3600 * self.solution.prediction.tokens_per_s / self.problem.workload.mean_output

    @property
    def range(self) -> MeasuredRange:
        return measured_range(self.problem.hardware, self.problem.ranks)

    @property
    def expected(self) -> Expectation:
        seconds = self.solution.prediction.latency_s
        return Expectation(seconds, *self.range.of_time(seconds))

    @property
    def stop_s(self) -> float:
        """Most seconds of computing that a stop costs: drawn tokens wait to be written, then the
        prompts of a block are computed again with what was drawn, and a pass.
        """
        prediction, workload = self.solution.prediction, self.problem.workload
        num_decoded = max(0.0, workload.mean_output - 1)
        recomputed_prefill_s = prediction.prefill_s * (1 + num_decoded / workload.mean_prompt)
        one_decode_pass_s = prediction.decode_s / max(1.0, num_decoded)
        if self.solution.schedule.is_single_pass:  # its hidden states are kept after a layer
            one_layer_s = recomputed_prefill_s / self.problem.config.num_layers
            recomputed_prefill_s = min(recomputed_prefill_s, KEEP_STATES_EVERY_S + one_layer_s)
        return KEEP_EVERY_S + recomputed_prefill_s + one_decode_pass_s

    @cached_property
    def block(self) -> dict[str, dict[str, float]]:
        """Bytes that a block reads of the disk, and tokens of prompts or answers a second, by
        phase.
        """
        problem, policy, schedule = self.problem, self.solution.policy, self.solution.schedule
        prediction, hardware = self.solution.prediction, problem.hardware
        # Read at one byte a second, a block takes as many seconds as it reads bytes.
        a_byte_a_second = replace(
            hardware, disk=replace(hardware.disk, read_bytes_s=1.0, access_s=0.0)
        )
        read = predict(replace(problem, hardware=a_byte_a_second), policy, schedule).seconds
        tokens = {
            "prefill": problem.workload.mean_computed,
            "decode": problem.workload.mean_output - 1,
        }
        seconds = {"prefill": prediction.prefill_s, "decode": prediction.decode_s}
        return {
            phase: {
                "bytes_read": read[phase]["disk_read"],
                "tokens_per_s": self.block_sequences * count / seconds[phase],
            }
            for phase, count in tokens.items()
            if count
        }

    def to_json(self) -> dict[str, Any]:
        """Return bytes, seconds and fractions as docs/explanation/planning.md describes them."""
        policy, prediction = self.solution.policy, self.solution.prediction
        return {
            "policy": {
                **{name: round(float(value), 6) for name, value in policy.fractions.items()},
                "gpu_batch_size": policy.gpu_batch_size,
                "num_gpu_batches": policy.num_gpu_batches,
                "schedule": self.solution.schedule.name,
                "precision": self.problem.precision.name,
            },
            "policy_flag": str(policy),
            "placement": fractions_by_kind(placed_fractions(self.problem, policy)),
            "predicted": {
                "prefill_s": prediction.prefill_s,
                "decode_s": prediction.decode_s,
                "prefill_passes": prediction.passes,
                "latency_s": prediction.latency_s,
                "tokens_per_s": prediction.tokens_per_s,
                "sequences_per_h": self.sequences_per_h,
                "seconds": {phase: dict(seconds) for phase, seconds in prediction.seconds.items()},
            },
            "block": self.block,
            "range": {
                "latency_s": self.range.of_time(prediction.latency_s),
                "tokens_per_s": self.range.of_rate(prediction.tokens_per_s),
                "source": self.range.source,
            },
            "memory": {tier: asdict(memory) for tier, memory in prediction.memory.items()},
            "feasible": prediction.feasible,
            "missing_bytes": dict(prediction.missing),
            "bottleneck": prediction.bottleneck,
            "why": self.why,
        }


def make_plan(
    problem: PlanningProblem,
    *,
    policy: Policy | None = None,
    schedule: Schedule | None = None,
    max_latency: float | None = None,
) -> Plan:
    """Search a policy, or evaluate the given one.

    schedule: None for the best of those that a search tries.

    Raises `MemoryLimitError` if the search finds nothing. A given policy that does not fit is a
    plan that is not feasible.
    """
    if policy is None:
        solution = search(problem, schedule, max_latency=max_latency)
    else:
        schedule = schedule or (PREFILL_ONLY if problem.workload.mean_output == 1 else ZIGZAG)
        solution = Solution(policy, schedule, predict(problem, policy, schedule))
    return Plan(problem, solution)


def search_precisions(
    plan: Plan, schedule: Schedule | None, max_latency: float | None
) -> dict[str, Plan | None]:
    """Return the best plan of each precision that users choose between; None for one that does not
    fit.

    plan: the searched plan of one of them, under the same schedule and limit.
    """
    plans: dict[str, Plan | None] = dict.fromkeys(_COMPARED)
    for name in plans:
        if name == plan.problem.precision.name:
            plans[name] = plan
            continue
        problem = replace(
            plan.problem,
            precision=replace(precision_named(name), published=plan.problem.precision.published),
        )
        with suppress(MemoryLimitError):
            plans[name] = Plan(problem, search(problem, schedule, max_latency=max_latency))
    return plans


def _twice_as_fast(problem: PlanningProblem, solution: Solution) -> dict[str, float]:
    """Return the seconds with one part twice as fast, by the name of the part."""
    hardware, processor = problem.hardware, problem.hardware.compute_processor
    flops = {
        dtype: Curve(tuple((rows, 2 * rate) for rows, rate in curve.points))
        for dtype, curve in processor.matmul_flops.items()
    }
    rates = (
        "attention_flops",
        "attention_bytes_s",
        "memory_bytes_s",
        "upcast_elements_s",
        "dequantize_elements_s",
    )
    changed = _doubled(replace(processor, matmul_flops=flops), *rates)
    is_gpu = problem.compute_tier == "gpu"
    machines = {
        "GPU" if is_gpu else "processor": (
            replace(hardware, gpu=changed) if is_gpu else replace(hardware, cpu=changed)
        ),
        "disk": replace(hardware, disk=_doubled(hardware.disk, "read_bytes_s", "write_bytes_s")),
    }
    if hardware.link is not None:
        link_rates = (name for name in asdict(hardware.link) if name.endswith("bytes_s"))
        machines["link"] = replace(hardware, link=_doubled(hardware.link, *link_rates))
    return {
        part: predict(
            replace(problem, hardware=machine), solution.policy, solution.schedule
        ).latency_s
        for part, machine in machines.items()
    }


def _doubled(record: _Record, *names: str) -> _Record:
    """Return the record with twice the rates of these names."""
    return replace(record, **{name: 2 * getattr(record, name) for name in names})  # type: ignore[type-var]
