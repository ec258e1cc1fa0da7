"""Predict seconds and bytes of a workload under a policy, and what bounds it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexgen_helm.planner.affine import COLUMNS, WEIGHTS, Affine, fraction_vector
from flexgen_helm.planner.constants import BLOCK_SEQUENCES
from flexgen_helm.planner.cost_model import CHANNELS, RESOURCES, BlockCosts, block_costs, pass_seconds
from flexgen_helm.planner.placement import TIERS, Kind, Tier, achieved_fractions, place, tier_fractions
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.problem import BlockShape, PlanningProblem


@dataclass(frozen=True)
class TierMemory:
    """Bytes of a tier: the peak of the plan, the limit, and the workspace of computing besides."""

    peak: int
    limit: int
    workspace: int = 0


@dataclass(frozen=True)
class Prediction:
    """Cost of a workload.

    prefill_s, decode_s: of the first block.
    latency_s: of the whole workload.
    tokens_per_s: generated tokens per second.
    seconds: phase -> resource or part of computing -> seconds of the first block, each as if it were alone.
    missing: tier -> bytes short.
    """

    prefill_s: float
    decode_s: float
    latency_s: float
    tokens_per_s: float
    seconds: Mapping[str, Mapping[str, float]]
    memory: Mapping[Tier, TierMemory]
    missing: Mapping[Tier, int]
    bottleneck: str

    @property
    def feasible(self) -> bool:
        return not self.missing

    @property
    def block_s(self) -> float:
        """Seconds of the first block."""
        return self.prefill_s + self.decode_s


def predict(problem: PlanningProblem, policy: Policy, schedule: Schedule, rounded: bool = True) -> Prediction:
    """Predict the cost of a policy.

    rounded: place whole matrices and cache blocks as the engine does, instead of the exact fractions.
    """
    exact = fraction_vector(policy, problem.compute_tier == "gpu")
    fractions = placed_fractions(problem, policy) if rounded else exact
    return evaluate(problem, BlockShape(policy.gpu_batch_size, policy.num_gpu_batches, schedule), fractions)


def cache_blocks(problem: PlanningProblem, policy: Policy) -> list[int]:
    """Return the sequences of each cache block, in the order in which they are placed."""
    shape = BlockShape(policy.gpu_batch_size, policy.num_gpu_batches, "zigzag")
    if not problem.endless:
        shape = shrunk(shape, problem.workload.num_sequences)
    batch = shape.gpu_batch_size
    blocks = [min(BLOCK_SEQUENCES, batch - first) for first in range(0, batch, BLOCK_SEQUENCES)]
    return blocks * shape.num_gpu_batches


def placed_fractions(problem: PlanningProblem, policy: Policy) -> Affine:
    """Return the fractions as the engine achieves them: it places whole matrices and whole cache blocks."""
    has_gpu = problem.compute_tier == "gpu"
    cache = {str(number): sequences for number, sequences in enumerate(cache_blocks(problem, policy))}
    fractions = fraction_vector(policy, has_gpu)
    sizes: dict[Kind, Mapping[str, int]] = {"weights": problem.storage.matrices, "cache": cache}
    for kind, sizes_of_kind in sizes.items():
        placed = place(sizes_of_kind, tier_fractions(policy, kind, has_gpu))
        for tier, fraction in achieved_fractions(sizes_of_kind, placed).items():
            fractions[COLUMNS[kind][tier]] = fraction
    return fractions


def as_placed(problem: PlanningProblem, policy: Policy) -> Policy:
    """Return the policy that names the fractions which are achieved, so that what it says is what is placed.

    A kind keeps its fractions if the achieved ones, in hundredths of a percent, would be placed in another way.
    """
    placed = placed_fractions(problem, policy)
    for kind, columns in COLUMNS.items():
        gpu, cpu, disk = (round(float(placed[columns[tier]]), 4) for tier in TIERS)
        names = {"weights": ("wg", "wc"), "cache": ("cg", "cc"), "activations": ("hg", "hc")}[kind]
        shares: dict[str, Any] = dict(zip(names, (gpu, min(cpu, 1.0 - gpu) if disk else 1.0 - gpu)))
        named = replace(policy, **shares)
        if np.allclose(placed_fractions(problem, named), placed, rtol=0, atol=1e-4):
            policy = named
    return policy


def evaluate(problem: PlanningProblem, shape: BlockShape, fractions: Affine) -> Prediction:
    """Predict the cost of the whole workload in blocks of one shape."""
    workload, num_sequences = problem.workload, problem.workload.num_sequences
    if not problem.endless and shape.schedule in ("row", "zigzag"):
        shape = shrunk(shape, num_sequences)
    resident = bool(fractions[WEIGHTS[problem.compute_tier]] >= 1 - 1e-9)
    costs = block_costs(problem, shape, resident)
    prefill_s, decode_s = _phase_seconds(problem, costs, fractions)
    latency_s, tokens = prefill_s + decode_s, costs.sequences * workload.output
    if not problem.endless and costs.sequences < num_sequences:
        full_blocks, rest = divmod(num_sequences, int(costs.sequences))
        latency_s *= full_blocks
        tokens = workload.output_tokens
        if rest:
            last = shrunk(shape, rest)
            latency_s += sum(_phase_seconds(problem, block_costs(problem, last, resident), fractions))
    memory, missing = _memory(problem, costs, fractions)
    phases = {"prefill": (costs.prefill, 1.0), "decode": (costs.decode, costs.decode_passes)}
    seconds = {
        phase: {name: passes * float(form @ fractions) for name, form in times.items() if name not in CHANNELS}
        for phase, (times, passes) in phases.items()
    }
    bottleneck = max(RESOURCES, key=lambda name: sum(phase.get(name, 0.0) for phase in seconds.values()))
    return Prediction(prefill_s, decode_s, latency_s, tokens / latency_s, seconds, memory, missing, bottleneck)


def shrunk(shape: BlockShape, sequences: int) -> BlockShape:
    """Return the shape of a block that has no more than `sequences` sequences."""
    if shape.num_sequences <= sequences:
        return shape
    batches = max(1, min(shape.num_gpu_batches, -(-sequences // shape.gpu_batch_size)))
    return replace(shape, gpu_batch_size=-(-sequences // batches), num_gpu_batches=batches)


def _phase_seconds(problem: PlanningProblem, costs: BlockCosts, fractions: Affine) -> tuple[float, float]:
    """Return the seconds of a block's prefill and of its decoding."""
    prefill_s = pass_seconds(costs.prefill, fractions, problem.overlap_share)
    return prefill_s, pass_seconds(costs.decode, fractions, problem.overlap_share) * costs.decode_passes


def _memory(
    problem: PlanningProblem, costs: BlockCosts, fractions: Affine
) -> tuple[dict[Tier, TierMemory], dict[Tier, int]]:
    """Return peak, limit and workspace of each tier, and the missing bytes."""
    memory: dict[Tier, TierMemory] = {}
    missing: dict[Tier, int] = {}
    for tier in TIERS:
        peak = max(float(form @ fractions) for form in costs.memory[tier])
        limit, workspace = problem.limits[tier], costs.workspace[tier]
        memory[tier] = TierMemory(int(peak), int(limit), int(workspace))
        short = max(peak - limit, peak + workspace - problem.capacity(tier))
        if short > max(1.0, 1e-6 * limit):
            missing[tier] = int(np.ceil(short))
    return memory, missing
