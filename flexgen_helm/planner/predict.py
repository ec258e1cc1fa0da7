"""What a policy costs: seconds and bytes of the whole workload, and what bounds them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from flexgen_helm.planner.constants import BLOCK_SEQUENCES
from flexgen_helm.planner.cost_model import (
    CACHE,
    RESOURCES,
    WEIGHTS,
    Affine,
    BlockCosts,
    block_costs,
    fraction_vector,
    pass_seconds,
)
from flexgen_helm.planner.placement import TIERS, Tier, achieved_fractions, place, tier_fractions
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.problem import BlockShape, PlanningProblem


@dataclass(frozen=True)
class TierMemory:
    """Bytes of a tier: planned at most, allowed, and beside them the bytes that computing holds."""

    peak: int
    limit: int
    workspace: int = 0


@dataclass(frozen=True)
class Prediction:
    """Seconds of the workload and of its first block's phases; tokens_per_s counts generated tokens. seconds: phase ->
    resource, or part of computing -> seconds of the block, each as if it were alone. missing: tier -> bytes short."""

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


def predict(situation: PlanningProblem, policy: Policy, schedule: Schedule, rounded: bool = True) -> Prediction:
    """Evaluate a policy. rounded: as the engine places it, by whole matrices and groups of rows; else its fractions."""
    has_gpu = situation.compute_tier == "gpu"
    fractions = placed_fractions(situation, policy) if rounded else fraction_vector(policy, has_gpu)
    return evaluate(situation, shape_of(policy, schedule), fractions)


def shape_of(policy: Policy, schedule: Schedule) -> BlockShape:
    return BlockShape(policy.gpu_batch_size, policy.num_gpu_batches, schedule)


def evaluate(situation: PlanningProblem, shape: BlockShape, fractions: Affine) -> Prediction:
    """A block's shape with a vector of fractions, over the whole workload."""
    sequences = situation.workload.num_sequences
    if not situation.endless and shape.schedule in ("row", "zigzag"):
        shape = _fitting(shape, sequences)
    resident = bool(fractions[WEIGHTS[situation.compute_tier]] >= 1 - 1e-9)
    model = block_costs(situation, shape, resident)
    prefill, decode = phase_seconds(situation, shape, model, fractions)
    latency = prefill + decode
    tokens = model.rows * situation.workload.output
    if not situation.endless and model.rows < sequences:
        whole, rest = divmod(sequences, int(model.rows))
        latency *= whole
        if rest:
            last = _fitting(shape, rest)
            latency += sum(phase_seconds(situation, last, block_costs(situation, last, resident), fractions))
        tokens = situation.workload.output_tokens
    memory, missing = _memory(situation, model, fractions)
    seconds = {
        "prefill": _breakdown(model.prefill.resources, model.prefill.parts, fractions, 1.0),
        "decode": _breakdown(model.decode.resources, model.decode.parts, fractions, model.decode_passes),
    }
    spent = {name: seconds["prefill"].get(name, 0.0) + seconds["decode"].get(name, 0.0) for name in RESOURCES}
    bottleneck = max(RESOURCES, key=lambda name: spent[name])
    return Prediction(prefill, decode, latency, tokens / latency, seconds, memory, missing, bottleneck)


def phase_seconds(
    situation: PlanningProblem, shape: BlockShape, model: BlockCosts, fractions: Affine
) -> tuple[float, float]:
    """Seconds of a block's prefill and of its decoding."""
    share = situation.overlap_share
    prefill = pass_seconds(model.prefill, fractions, share)
    decode = pass_seconds(model.decode, fractions, share) * model.decode_passes
    stages, batches = situation.stages, shape.num_gpu_batches
    if stages > 1:
        # Micro-batches flow through the stages (the paper's 'Extension to Multiple GPUs'): prefill waits for the
        # pipeline to fill, decoding wants a batch for each stage.
        prefill *= (batches + stages - 1) / batches / stages
        decode *= max(batches, stages) / batches / stages
    return prefill, decode


def placed_fractions(situation: PlanningProblem, policy: Policy) -> Affine:
    """Fractions as the engine achieves them: whole matrices, and whole groups of up to 32 rows of the cache."""
    has_gpu = situation.compute_tier == "gpu"
    found = fraction_vector(policy, has_gpu).copy()
    sizes = situation.storage.matrices
    weights = achieved_fractions(sizes, place(sizes, tier_fractions(policy, "weights", has_gpu)))
    groups = _groups(policy.gpu_batch_size, policy.num_gpu_batches)
    cache = achieved_fractions(groups, place(groups, tier_fractions(policy, "cache", has_gpu)))
    for tier in TIERS:
        found[WEIGHTS[tier]] = weights[tier]
        found[CACHE[tier]] = cache[tier]
    return found


def _groups(batch: int, batches: int) -> dict[str, int]:
    """Rows of each group of the cache."""
    one = [min(BLOCK_SEQUENCES, batch - first) for first in range(0, batch, BLOCK_SEQUENCES)]
    return {f"{number}": rows for number, rows in enumerate(one * batches)}


def _fitting(shape: BlockShape, sequences: int) -> BlockShape:
    """The block with no more sequences than there are."""
    if shape.num_sequences <= sequences:
        return shape
    batches = max(1, min(shape.num_gpu_batches, -(-sequences // shape.gpu_batch_size)))
    return replace(shape, gpu_batch_size=-(-sequences // batches), num_gpu_batches=batches)


def _memory(
    situation: PlanningProblem, model: BlockCosts, fractions: Affine
) -> tuple[dict[Tier, TierMemory], dict[Tier, int]]:
    peaks: dict[Tier, TierMemory] = {}
    missing: dict[Tier, int] = {}
    for tier in TIERS:
        peak = max(float(coefficients @ fractions) for coefficients in model.memory[tier])
        limit, holds = situation.limits[tier], model.working[tier]
        peaks[tier] = TierMemory(int(peak), int(limit), int(holds))
        short = max(peak - limit, peak + holds - capacity(situation, tier))
        if short > max(1.0, 1e-6 * limit):
            missing[tier] = int(np.ceil(short))
    return peaks, missing


def capacity(situation: PlanningProblem, tier: Tier) -> float:
    """Bytes that the machine has; a limit above it does not count."""
    hardware = situation.hardware
    if tier == "gpu":
        return float(hardware.gpu.memory_bytes) if hardware.gpu else 0.0
    return float(hardware.cpu.memory_bytes if tier == "cpu" else hardware.disk.bytes)


def _breakdown(
    resources: Mapping[str, Affine], parts: Mapping[str, Affine], fractions: Affine, times: float
) -> dict[str, float]:
    return {name: times * float(coefficients @ fractions) for name, coefficients in {**resources, **parts}.items()}
