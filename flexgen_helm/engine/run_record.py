"""The record of one run: what was planned, what it took, and what was moved (`flexgen_run.json`,
docs/reference).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import psutil
import torch

from flexgen_helm.engine.device import device_name
from flexgen_helm.hardware.process_state import switched_off
from flexgen_helm.kernels.products import (
    library_flops,
    matmul_flops,
    multiplied_dtype,
    product_library,
)
from flexgen_helm.kernels.trial import loops_in_use
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.offload.transfer_stats import ExpertCounts
from flexgen_helm.planner.predict import CostEstimate
from flexgen_helm.planner.problem import expected_experts, fitted_skew
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.report.throughput import throughput
from flexgen_helm.report.versions import versions
from flexgen_helm.request import Cost


@dataclass(frozen=True)
class EngineIdentity:
    """What the records of all runs of one engine share.

    weight_dtype: of matrices in 16 bits; that of products where they are packed.
    dtype_reason: why products are in `dtype`.
    simulated: a gpu in host memory computes.
    load_s: seconds that loading took.
    experts: of the model; None for one without.
    generation_config: settings of the model's folder that were applied, and those that were
        ignored.
    is_proved: a small model of this kind equals `transformers` here; None where nothing was
        compared.
    batch_invariant: what decides the bits of answers that do not follow their batch; empty without
        the option.
    rounded: stored type -> share of the matrices' elements that have it, and are rounded to 16
        bits.
    """

    model: str
    origin: str
    fingerprint: str
    precision: str
    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    dtype_reason: str
    simulated: bool
    load_s: float
    experts: MoEConfig | None = None
    is_proved: bool | None = None
    rounded: Mapping[str, float] = field(default_factory=dict)
    generation_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batch_invariant: Sequence[str] = ()


def run_record(
    engine: EngineIdentity,
    plan: RunPlan,
    tiers: TransferManager,
    costs: Sequence[Cost],
    seconds: float,
) -> dict[str, Any]:
    """Return the record as plain values; bytes, seconds and fractions. The engine adds what its run
    counted.

    costs: of each request.
    """
    figures = throughput(costs, seconds)
    weight_dtype = multiplied_dtype(engine.device, engine.dtype, engine.weight_dtype)
    rate = matmul_flops(engine.device, engine.dtype, weight_dtype)
    transfer_s = tiers.stats.seconds()
    batches_s = figures["prefill_s"] + figures["decode_s"]
    # Also between batches, and in those that ran out of memory, whose seconds no request is
    # charged.
    wait_s = min(
        batches_s, sum(spent for kind, spent in transfer_s.items() if kind.startswith("wait_"))
    )
    limits, policy = plan.limits, plan.policy
    return {
        "model": engine.model,
        "origin": engine.origin,
        "fingerprint": engine.fingerprint,
        "precision": engine.precision,
        "policy": {
            "batch_tokens": limits.batch_tokens if policy is None else None,
            "gpu_batch_size": limits.batch_sequences,
            "max_rows": limits.max_sequences,
            **({} if policy is None else asdict(policy)),
        },
        "schedule": plan.schedule.name,
        **figures,
        "workload": {"num_requests": len(costs), **figures["workload"]},
        "wall_s": {"load": engine.load_s, "generate": seconds},
        "bytes": tiers.stats.bytes(),
        "time_s": {
            "compute": batches_s - wait_s,
            "wait": wait_s,
            "other": max(0.0, seconds - batches_s),
            **transfer_s,
        },
        "experts": None
        if engine.experts is None
        else _experts(engine.experts, tiers.stats.experts),
        "peak_bytes": {tier: ledger.peak for tier, ledger in tiers.ledgers.items()},
        "limit_bytes": {tier: ledger.limit for tier, ledger in tiers.ledgers.items()},
        "predicted_latency_s": None,
        "roofline_s": figures["flops"] / rate,
        "hardware": {
            "device": "sim" if engine.simulated else str(engine.device),
            "name": device_name(engine.device),
            "compute_dtype": str(engine.dtype).removeprefix("torch."),
            "host_memory": None
            if tiers.copy_engine is None
            else "pinned"
            if tiers.copy_engine.pins
            else "pageable",
            "compute_dtype_reason": engine.dtype_reason,
            "product_library": product_library(engine.device, engine.dtype),
            "loops": dict(loops_in_use),
            "switched_off": dict(switched_off),
            "threads": torch.get_num_threads(),
            "matmul_flops": rate,
            "library_flops": library_flops(engine.device, engine.dtype),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "proved": engine.is_proved,
        "batch_invariant": list(engine.batch_invariant) or None,
        "rounded_weights": dict(engine.rounded),
        "generation_config": engine.generation_config,
        "versions": versions(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _experts(experts: MoEConfig, counts: ExpertCounts) -> dict[str, Any]:
    """Return what a record says of experts.

    used, used_if_even: experts of a layer that a batch used, on average, and if tokens had selected
        all alike.
    skew: how much they preferred some (`fitted_skew`).
    routed_bytes, read_bytes, wasted_bytes: as in `ExpertCounts`.
    """
    uses = sum(number for number, _ in counts.touched.values()) or 1
    even = sum(
        number * expected_experts(experts.count, experts.per_token, tokens)
        for tokens, (number, _) in counts.touched.items()
    )
    return {
        "used": sum(used for _, used in counts.touched.values()) / uses,
        "used_if_even": even / uses,
        "skew": fitted_skew(experts.count, experts.per_token, counts.touched),
        "routed_bytes": counts.routed_bytes,
        "read_bytes": counts.read_bytes,
        "wasted_bytes": counts.wasted_bytes,
    }


def add_prediction(
    record: dict[str, Any], prediction: CostEstimate, product_flops: float, num_ranks: int
) -> None:
    """Add a prediction to a record.

    product_flops: rate of the fastest product that it was made with.
    num_ranks: of the pipeline.
    """
    record["predicted_latency_s"] = prediction.latency_s
    record["predicted"] = {
        "prefill_s": prediction.prefill_s,
        "decode_s": prediction.decode_s,
        "latency_s": prediction.latency_s,
        "seconds": {phase: dict(spent) for phase, spent in prediction.seconds.items()},
    }
    # One rate bounds both: products may have been slower when the run began than when the machine
    # was measured.
    rate = max(record["hardware"]["matmul_flops"], product_flops)
    record["hardware"]["matmul_flops"], record["roofline_s"] = (
        rate,
        record["flops"] / (rate * num_ranks),
    )
