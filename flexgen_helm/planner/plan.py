"""A plan: from what a user asks to a situation, from a search to a record that can be read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.hardware.profile import HardwareProfile, Link
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.cost_model import CACHE, HIDDEN, WEIGHTS
from flexgen_helm.planner.linear_program import Solution
from flexgen_helm.planner.placement import TIERS, Tier
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import Prediction, capacity, placed_fractions, predict
from flexgen_helm.planner.problem import PlanningProblem, without_margin
from flexgen_helm.planner.search import search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import Precision, precision_named
from flexgen_helm.request import MemoryLimits

# A tier this full is one whose size decides.
_FULL = 0.9
_WORDS = {
    "compute": "computing",
    "to_gpu": "the link to the GPU",
    "to_cpu": "the link from the GPU",
    "disk_read": "reading the disk",
    "disk_write": "writing the disk",
}


def simulated_gpu(hardware: HardwareProfile, gpu_bytes: int, link_gb_s: tuple[float, float] | None) -> HardwareProfile:
    """The machine with a simulated gpu: its own processor in `gpu_bytes` of host memory behind a link of (in, out)
    GB/s; without them as fast as memory is copied."""
    copy = hardware.cpu.memory_bytes_s / 2
    inward, outward = (rate * 1e9 for rate in link_gb_s) if link_gb_s else (copy, copy)
    link = Link(min(inward, copy), min(outward, copy), min(inward, copy), min(outward, copy))
    return replace(hardware, gpu=replace(hardware.cpu, memory_bytes=gpu_bytes), link=link)


def planning_problem(
    config: ModelConfig,
    hardware: HardwareProfile,
    workload: Workload,
    *,
    precision: str | Precision = "fp16",
    rest_dtype: str = "float16",
    limits: MemoryLimits = MemoryLimits(),
    overlap: bool = True,
    cpu_attention: bool = True,
    endless: bool = False,
) -> PlanningProblem:
    """What the cost model needs. limits: None for what the machine has, less a margin (its disk: all that is free).

    Raises `UsageError` for a negative limit and for a precision that is not there.
    """
    compute = 4 if hardware.gpu is None or hardware.gpu.compute_dtype(rest_dtype) == "float32" else 2
    situation = PlanningProblem(
        config,
        hardware,
        workload,
        precision_named(precision) if isinstance(precision, str) else precision,
        compute,
        {},
        overlap=overlap,
        cpu_attention=cpu_attention,
        endless=endless,
    )
    found: dict[Tier, float] = {}
    given: Mapping[Tier, int | None] = {"gpu": limits.gpu, "cpu": limits.cpu, "disk": limits.disk}
    for tier in TIERS:
        asked, has = given[tier], capacity(situation, tier)
        if asked is not None and asked < 0:
            raise UsageError(f"the limit of the {tier} tier is {asked:,} bytes; it must be at least 0")
        found[tier] = float(asked) if asked is not None else without_margin(has, has if tier != "disk" else 0)
    return replace(situation, limits=found)


@dataclass(frozen=True)
class Plan:
    """A policy with what it costs. why: sentences on what bounds the speed and what would help."""

    situation: PlanningProblem
    policy: Policy
    schedule: Schedule
    prediction: Prediction
    precision: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """As docs/planning.md describes it: bytes, seconds, fractions."""
        found, policy = self.prediction, self.policy
        fractions = placed_fractions(self.situation, policy)
        placed = {
            kind: {tier: float(fractions[index]) for tier, index in columns.items()}
            for kind, columns in (("weights", WEIGHTS), ("cache", CACHE), ("activations", HIDDEN))
        }
        return {
            "policy": {
                **{name: round(float(value), 6) for name, value in _shares(policy).items()},
                "gpu_batch_size": policy.gpu_batch_size,
                "num_gpu_batches": policy.num_gpu_batches,
                "schedule": self.schedule,
                "precision": self.precision,
            },
            "placement": placed,
            "predicted": {
                "prefill_s": found.prefill_s,
                "decode_s": found.decode_s,
                "latency_s": found.latency_s,
                "tokens_per_s": found.tokens_per_s,
                "seconds": {phase: dict(spent) for phase, spent in found.seconds.items()},
            },
            "memory": {tier: asdict(peak) for tier, peak in found.memory.items()},
            "feasible": found.feasible,
            "missing_bytes": dict(found.missing),
            "bottleneck": found.bottleneck,
            "why": self.why,
        }


def make_plan(
    situation: PlanningProblem,
    precision: str,
    *,
    policy: Policy | None = None,
    schedule: Schedule | Literal["auto"] = "auto",
    max_latency: float | None = None,
) -> Plan:
    """Search, or evaluate a policy that is given.

    Raises `MemoryLimitError` where nothing fits; a policy that does not fit is told as not feasible instead.
    """
    if policy is not None:
        taken: Schedule = default_schedule(situation.workload) if schedule == "auto" else schedule
        found = Solution(policy, taken, predict(situation, policy, taken))
        if not found.prediction.feasible:
            tier, missing = max(found.prediction.missing.items(), key=lambda item: item[1])
            why = f"It does not fit: the {tier} tier misses {missing:,} bytes."
            return Plan(situation, policy, taken, found.prediction, precision, why)
    elif schedule == "auto":
        found = search(situation, max_latency=max_latency)
    else:
        found = search(situation, (schedule,), max_latency=max_latency)
    why = explanation(situation, found, searched=policy is None)
    return Plan(situation, found.policy, found.schedule, found.prediction, precision, why)


def default_schedule(workload: Workload) -> Schedule:
    return "prefill-only" if workload.output == 1 else "zigzag"


def explanation(situation: PlanningProblem, found: Solution, searched: bool) -> str:
    """What bounds the speed, and what would help most."""
    prediction = found.prediction
    spent = {
        phase: max(_WORDS, key=lambda name: seconds.get(name, 0.0))
        for phase, seconds in prediction.seconds.items()
        if any(seconds.get(name, 0.0) for name in _WORDS)
    }
    bound = ", ".join(f"{phase} is bound by {_WORDS[name]}" for phase, name in spent.items())
    gains = suggestions(situation, found, searched)
    helps = "; ".join(f"{what} would bring {gain - 1:+.0%}" for what, gain in gains[:2] if gain >= 1.02)
    first = bound[:1].upper() + bound[1:]
    return f"{first}. " + (f"{helps[:1].upper()}{helps[1:]}." if helps else "Doubling one resource brings little.")


def suggestions(situation: PlanningProblem, found: Solution, searched: bool) -> list[tuple[str, float]]:
    """(what, throughput against now) for twice of each resource, the most helpful first.

    More memory is planned anew; a faster part is tried with the same policy.
    """
    hardware, now = situation.hardware, found.prediction.tokens_per_s
    changes: list[tuple[str, PlanningProblem]] = []
    home = hardware.compute_processor
    quick = {
        dtype: replace(curve, points=tuple((s, 2 * r) for s, r in curve.points))
        for dtype, curve in home.matmul_flops.items()
    }
    fast = replace(
        home,
        matmul_flops=quick,
        attention_flops=2 * home.attention_flops,
        attention_bytes_s=2 * home.attention_bytes_s,
        memory_bytes_s=2 * home.memory_bytes_s,
        upcast_elements_s=2 * home.upcast_elements_s,
        dequantize_elements_s=2 * home.dequantize_elements_s,
    )
    machine = replace(hardware, cpu=fast) if hardware.gpu is None else replace(hardware, gpu=fast)
    changes.append(("a processor twice as fast", replace(situation, hardware=machine)))
    disk = replace(
        hardware.disk, read_bytes_s=2 * hardware.disk.read_bytes_s, write_bytes_s=2 * hardware.disk.write_bytes_s
    )
    changes.append(("a disk twice as fast", replace(situation, hardware=replace(hardware, disk=disk))))
    if hardware.link is not None:
        link = replace(
            hardware.link,
            **{name: 2 * getattr(hardware.link, name) for name in asdict(hardware.link) if name.endswith("bytes_s")},
        )
        changes.append(("a link twice as fast", replace(situation, hardware=replace(hardware, link=link))))
    gains = [(what, predict(changed, found.policy, found.schedule).tokens_per_s / now) for what, changed in changes]
    for tier, name in (("gpu", "GPU memory"), ("cpu", "host memory")):
        peak = found.prediction.memory[tier]  # type: ignore[index]
        if not searched or not peak.limit or peak.peak < _FULL * peak.limit:
            continue
        try:
            more = search(_doubled(situation, tier), (found.schedule,))  # type: ignore[arg-type]
        except MemoryLimitError:
            continue
        gains.append((f"twice the {name}", more.prediction.tokens_per_s / now))
    return sorted(gains, key=lambda gain: -gain[1])


def _doubled(situation: PlanningProblem, tier: Tier) -> PlanningProblem:
    hardware = situation.hardware
    if tier == "gpu" and hardware.gpu is not None:
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=2 * hardware.gpu.memory_bytes))
    else:
        hardware = replace(hardware, cpu=replace(hardware.cpu, memory_bytes=2 * hardware.cpu.memory_bytes))
    limits = {**situation.limits, tier: 2 * situation.limits[tier]}
    return replace(situation, hardware=hardware, limits=limits)


def _shares(policy: Policy) -> dict[str, float]:
    return {name: getattr(policy, name) for name in ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")}
