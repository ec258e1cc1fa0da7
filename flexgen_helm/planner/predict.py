"""Predict seconds and bytes of a workload under a policy, and what bounds it. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flexgen_helm.planner.affine import COLUMNS, WEIGHTS, FractionVector, fraction_vector
from flexgen_helm.planner.cost_model import (
    CHANNELS,
    RESOURCES,
    BlockCosts,
    WeightReads,
    block_costs,
    pass_seconds,
)
from flexgen_helm.planner.placement import achieved_fractions, choose_tiers
from flexgen_helm.planner.policy import BlockShape, Policy
from flexgen_helm.planner.problem import PlanningProblem, matrix_kinds
from flexgen_helm.planner.schedules import ZIGZAG, Schedule
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.shared_sizes import BLOCK_SEQUENCES
from flexgen_helm.tiers import TIERS, Kind, Tier


@dataclass(frozen=True)
class TierMemory:
    """Bytes of a tier: the peak of the plan, the limit, and the workspace of computing besides."""

    peak: int
    limit: int
    workspace: int = 0


@dataclass(frozen=True)
class CostEstimate:
    """Cost of a workload.

    prefill_s, decode_s: of the first block.
    latency_s: of the whole workload.
    tokens_per_s: generated tokens per second.
    block_s: from a sequence's admission to its end, at most; where all begin together, of the first
        block.
    seconds: phase -> resource or part of computing -> seconds of the first block, each as if it
        were alone.
    missing: tier -> bytes short.
    passes: over the prompts of a block, or parts of a single pass whose experts are computed in
        turn.
    """

    prefill_s: float
    decode_s: float
    latency_s: float
    tokens_per_s: float
    block_s: float
    seconds: Mapping[str, Mapping[str, float]]
    memory: Mapping[Tier, TierMemory]
    missing: Mapping[Tier, int]
    bottleneck: str
    passes: int = 1

    @property
    def feasible(self) -> bool:
        return not self.missing


def predict(
    problem: PlanningProblem,
    policy: Policy,
    schedule: Schedule,
    rounded: bool = True,
    passes: int = 0,
) -> CostEstimate:
    """Predict the cost of a policy.

    rounded: place whole matrices and cache blocks as the engine does, instead of the exact
        fractions.
    passes: over a block's prompts; 0 for the fewest that have room.
    """
    shape = BlockShape(policy.gpu_batch_size, policy.num_gpu_batches, schedule, passes=passes)
    if rounded:
        fractions = placed_fractions(problem, policy)
    else:
        fractions = fraction_vector(policy, problem.compute_tier == "gpu")
    # None: every matrix is divided by the fractions. Experts are not: each is on one tier.
    has_reads = rounded or problem.config.experts is not None
    return evaluate(
        problem, shape, fractions, weight_reads(problem, policy, fractions) if has_reads else None
    )


def cache_blocks(problem: PlanningProblem, batch_size: int, num_batches: int) -> list[int]:
    """Return the sequences of each cache block, in the order in which they are placed."""
    shape = BlockShape(batch_size, num_batches, ZIGZAG)  # whose sizes alone count
    if not problem.endless:
        shape = shrunk(shape, problem.workload.num_sequences)
    batch, left = shape.gpu_batch_size, int(shape.num_sequences)
    blocks = []
    for first in range(0, left, batch):
        end = min(left, first + batch)
        blocks += [
            min(BLOCK_SEQUENCES, end - start) for start in range(first, end, BLOCK_SEQUENCES)
        ]
    return blocks


@lru_cache(maxsize=16)  # blocks of many shapes, and scenarios of a suite, place weights alike
def _weight_tiers(
    storage: StorageSizes, fractions: tuple[tuple[Tier, float], ...]
) -> Mapping[str, Tier]:
    return choose_tiers(storage.matrices, dict(fractions))


def placed_fractions(problem: PlanningProblem, policy: Policy) -> FractionVector:
    """Return the fractions as the engine achieves them: it places whole matrices and whole cache
    blocks.
    """
    has_gpu = problem.compute_tier == "gpu"
    weights = _weight_tiers(
        problem.storage, tuple(policy.tier_fractions("weights", has_gpu).items())
    )
    blocks = cache_blocks(problem, policy.gpu_batch_size, policy.num_gpu_batches)
    cache = {str(number): sequences for number, sequences in enumerate(blocks)}
    fractions = fraction_vector(policy, has_gpu)
    placed: dict[Kind, tuple[Mapping[str, int], Mapping[str, Tier]]] = {
        "weights": (problem.storage.matrices, weights),
        "cache": (cache, choose_tiers(cache, policy.tier_fractions("cache", has_gpu))),
    }
    for kind, (sizes, tiers) in placed.items():
        for tier, fraction in achieved_fractions(sizes, tiers).items():
            fractions[COLUMNS[kind][tier]] = fraction
    return fractions


def weight_reads(
    problem: PlanningProblem, policy: Policy, fractions: FractionVector
) -> dict[Tier, WeightReads]:
    """Return what passes read of each tier's weights, per share that `fractions` says the tier
    has.
    """
    placed = policy.tier_fractions("weights", problem.compute_tier == "gpu")
    shares = {tier: float(fractions[WEIGHTS[tier]]) for tier in TIERS}
    return {
        tier: WeightReads(
            **{field: total / shares[tier] for field, total in reads.items()}
            if shares[tier] > 0
            else {}
        )
        for tier, reads in _read_bytes(problem.storage, tuple(placed.items())).items()
    }


@lru_cache(maxsize=16)
def _read_bytes(
    storage: StorageSizes, fractions: tuple[tuple[Tier, float], ...]
) -> dict[Tier, Counter[str]]:
    """Return what passes read of each tier, by the fields of `WeightReads`."""
    sums = {tier: Counter[str]() for tier in TIERS}
    placed, experts = _weight_tiers(storage, fractions), set[str]()
    for name, kind in matrix_kinds(storage.config).items():
        reads, num_bytes = sums[placed[name]], storage.matrices[name]
        if kind == "layer":
            reads["layer_bytes"] += num_bytes
            reads["matrices"] += 1
        elif kind == "head":
            reads["head_bytes"] += num_bytes
        elif kind != "embedding":  # an expert, whose matrices are one transfer
            reads["expert_bytes"] += num_bytes
            reads["experts"] += kind not in experts
            experts.add(kind)
    return sums


def as_placed(problem: PlanningProblem, policy: Policy) -> Policy:
    """Return the policy that names the fractions which are achieved, so that what it says is what
    is placed.

    A kind keeps its fractions if the achieved ones, in hundredths of a percent, would be placed in
    another way.
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


def evaluate(
    problem: PlanningProblem,
    shape: BlockShape,
    fractions: FractionVector,
    reads: Mapping[Tier, WeightReads] | None = None,
) -> CostEstimate:
    """Predict the cost of the whole workload in blocks of one shape; reads: see `block_costs`."""
    workload = problem.workload
    if not problem.endless:
        shape = shrunk(shape, workload.num_sequences)
    resident = bool(fractions[WEIGHTS[problem.compute_tier]] >= 1 - 1e-9)
    if not shape.passes:  # only streamed weights are read once a pass
        shape = replace(shape, passes=1 if resident else _fewest_passes(problem, shape, fractions))
    costs = block_costs(problem, shape, resident, reads)
    prefill_s, decode_s = _phase_seconds(problem, costs, fractions)
    latency_s = workload_seconds(problem, costs, fractions)
    block_s = prefill_s + decode_s
    tokens = costs.sequences * workload.mean_output if problem.endless else workload.output_tokens
    memory, missing = _memory(problem, costs, fractions)
    phases = {"prefill": (costs.prefill, 1.0), "decode": (costs.decode, costs.decode_passes)}
    seconds = {
        phase: {
            name: passes * float(form @ fractions)
            for name, form in times.items()
            if name not in CHANNELS  # bounds of a pass, no resources
        }
        for phase, (times, passes) in phases.items()
    }
    bottleneck = max(
        RESOURCES, key=lambda name: sum(phase.get(name, 0.0) for phase in seconds.values())
    )
    return CostEstimate(
        prefill_s,
        decode_s,
        latency_s,
        tokens / latency_s,
        block_s,
        seconds,
        memory,
        missing,
        bottleneck,
        shape.passes,
    )


def workload_seconds(
    problem: PlanningProblem, costs: BlockCosts, fractions: FractionVector
) -> float:
    """Return the seconds of all blocks, the last of which may be smaller; of one block if the
    workload is endless.
    """
    block_s = sum(_phase_seconds(problem, costs, fractions))
    if problem.endless:
        return block_s
    full_blocks, rest = divmod(problem.workload.num_sequences, int(costs.sequences))
    if not rest:
        return full_blocks * block_s
    last = block_costs(problem, shrunk(costs.shape, rest), costs.resident, costs.reads)
    return full_blocks * block_s + sum(_phase_seconds(problem, last, fractions))


def shrunk(shape: BlockShape, sequences: int) -> BlockShape:
    """Return the shape of a block that has no more than `sequences` sequences, in batches of about
    equal size.
    """
    if shape.num_sequences <= sequences:
        return shape
    batches = max(1, min(shape.num_gpu_batches, -(-sequences // shape.gpu_batch_size)))
    batch_size = -(-sequences // batches)
    batches = -(-sequences // batch_size)  # 10 in up to 7 batches are five batches of 2
    count = sequences if batch_size * batches > sequences else None
    return BlockShape(
        batch_size,
        batches,
        shape.schedule,
        count,
        -int(-shape.passes * sequences // shape.num_sequences),
    )


def _phase_seconds(
    problem: PlanningProblem, costs: BlockCosts, fractions: FractionVector
) -> tuple[float, float]:
    """Return the seconds of a block's prefill and of its decoding."""
    prefill_s = pass_seconds(costs.prefill, fractions, problem.overlap_share)
    return prefill_s, pass_seconds(
        costs.decode, fractions, problem.overlap_share
    ) * costs.decode_passes


def _fewest_passes(problem: PlanningProblem, shape: BlockShape, fractions: FractionVector) -> int:
    """Return the fewest passes over a block's prompts that have room, or the most there may be."""

    def fits(passes: int) -> bool:
        return not _memory(problem, block_costs(problem, replace(shape, passes=passes)), fractions)[
            1
        ]

    most = problem.most_passes(shape)
    return 1 if most == 1 or fits(1) else 2 + bisect_left(range(2, most), True, key=fits)


def _memory(
    problem: PlanningProblem, costs: BlockCosts, fractions: FractionVector
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
