"""The record of one run: what was planned, what it took, and what was moved (`flexgen_run.json`,
docs/reference).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import psutil
import torch

from flexgen_helm.engine.device import device_name, dtype_name, dtype_reason
from flexgen_helm.engine.executor import Executor
from flexgen_helm.engine.fingerprint import what_decides_bits
from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.run import ResultCollector
from flexgen_helm.hardware.fast_paths import switched_off
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
from flexgen_helm.planner.expert_use import expected_experts, fitted_skew
from flexgen_helm.planner.predict import CostEstimate
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.report.throughput import throughput
from flexgen_helm.report.versions import versions
from flexgen_helm.tiers import TIERS, Fractions, Tier

# Of what the record of a pipeline says for each rank.
_OF_RANK = "hardware", "achieved_placement", "peak_bytes", "limit_bytes", "time_s", "bytes"


@dataclass(frozen=True)
class EngineIdentity:
    """What the records of all runs of one engine share.

    weight_dtype: of matrices in 16 bits; that of products where they are packed.
    load_s: seconds that loading took.
    experts: of the model; None for one without.
    entries, hardware: what the record, and its `hardware`, say of the model and its device.
    """

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    load_s: float
    experts: MoEConfig | None
    entries: Mapping[str, Any]
    hardware: Mapping[str, Any]

    @classmethod
    def of(
        cls, model: OpenedModel, experts: MoEConfig | None, is_proved: bool | None, load_s: float
    ) -> EngineIdentity:
        """Describe a model whose weights are loaded; is_proved: as of `Engine`."""
        checkpoint, generation = model.checkpoint, model.generation
        device, dtype = model.device, model.dtype
        weight_dtype = checkpoint.storage_dtype if model.precision.weights is None else dtype
        entries = {
            "model": model.name,
            "origin": checkpoint.origin,
            "fingerprint": model.fingerprint,
            "precision": model.precision.name,
            "proved": is_proved,
            "batch_invariant": list(what_decides_bits(model.options)) or None,
            "rounded_weights": dict(checkpoint.rounded),
            "generation_config": {"applied": generation.applied, "ignored": generation.ignored},
        }
        reason = model.why_not_float16 or dtype_reason(device, dtype, checkpoint)
        hardware = {
            "device": "sim" if model.is_simulated else str(device),
            "name": device_name(device),
            "compute_dtype": dtype_name(dtype),
            "compute_dtype_reason": reason,
        }
        return cls(device, dtype, weight_dtype, load_s, experts, entries, hardware)


def run_record(
    engine: EngineIdentity,
    plan: RunPlan,
    executor: Executor,
    answers: ResultCollector,
    seconds: float,
) -> dict[str, Any]:
    """Return the record as plain values; bytes, seconds and fractions. On a pipeline it waits for
    what the other ranks say of themselves.
    """
    costs, tiers, runs = answers.costs(), executor.model.tiers, answers.runs
    pipeline = executor.model.pipeline
    figures = throughput(costs, seconds)
    limits, policy = plan.limits, plan.policy
    hardware = _hardware(engine, tiers)
    record = {
        **engine.entries,
        "policy": {
            "batch_tokens": limits.batch_tokens if policy is None else None,
            "gpu_batch_size": limits.batch_sequences,
            "max_rows": limits.max_sequences,
            **({} if policy is None else asdict(policy)),
        },
        "schedule": plan.schedule.name,
        **figures,
        "workload": {
            "num_requests": len(costs),
            **figures["workload"],
            "num_unique": sum(len(run.requests) for run in runs),
        },
        "wall_s": {"load": engine.load_s, "generate": seconds},
        "bytes": tiers.stats.bytes(),
        "time_s": _times(figures["prefill_s"] + figures["decode_s"], seconds, tiers),
        "experts": engine.experts and _experts(engine.experts, tiers.stats.experts),
        "peak_bytes": {tier: ledger.peak for tier, ledger in tiers.ledgers.items()},
        "limit_bytes": {tier: ledger.limit for tier, ledger in tiers.ledgers.items()},
        "predicted_latency_s": None,
        "roofline_s": figures["flops"] / (hardware["matmul_flops"] * pipeline.rank.size),
        "hardware": hardware,
        "versions": versions(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "peak_workspace_bytes": executor.peak_workspace_bytes + tiers.peak_transfer_bytes,
        "halvings": sum(run.halvings for run in runs),
        "preemptions": sum(run.num_preempted for run in runs),
        "achieved_placement": {
            "weights": dict(plan.weights),
            "cache": _fractions(executor.cache.placed, plan.cache),
            "activations": _fractions(executor.activations.placed, plan.activations),
        },
    }
    part = executor.model.decoder.config
    layers = [part.layers_before, part.layers_before + part.num_layers]
    rank = {"layers": layers, **{key: record[key] for key in _OF_RANK}}
    return record | pipeline.record(len(runs), rank)


def _times(batches_s: float, seconds: float, tiers: TransferManager) -> dict[str, float]:
    """Return where the seconds of a run went; batches_s: of its batches."""
    transfer_s = tiers.stats.seconds()
    # Also between batches, and in those that ran out of memory, whose seconds no request is
    # charged.
    wait_s = sum(spent for kind, spent in transfer_s.items() if kind.startswith("wait_"))
    wait_s = min(batches_s, wait_s)
    return {
        "compute": batches_s - wait_s,
        "wait": wait_s,
        "other": max(0.0, seconds - batches_s),
        **transfer_s,
    }


def _hardware(engine: EngineIdentity, tiers: TransferManager) -> dict[str, Any]:
    """Return what computed, and how fast it multiplies."""
    device, dtype, link = engine.device, engine.dtype, tiers.copy_engine
    return {
        **engine.hardware,
        "host_memory": link and ("pinned" if link.pins else "pageable"),
        "product_library": product_library(device, dtype),
        "loops": dict(loops_in_use),
        "switched_off": dict(switched_off),
        "threads": torch.get_num_threads(),
        "matmul_flops": matmul_flops(
            device, dtype, multiplied_dtype(device, dtype, engine.weight_dtype)
        ),
        "library_flops": library_flops(device, dtype),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _fractions(placed: Mapping[Tier, int], planned: Fractions) -> Fractions:
    """Return fractions of bytes by tier; as planned where nothing was placed."""
    total = sum(placed.values())
    return {tier: placed[tier] / total if total else planned[tier] for tier in TIERS}


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


def add_prediction(record: dict[str, Any], prediction: CostEstimate, product_flops: float) -> None:
    """Add a prediction to a record.

    product_flops: rate of the fastest product that it was made with.
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
    hardware = record["hardware"]
    rate = max(hardware["matmul_flops"], product_flops)
    record["roofline_s"] *= hardware["matmul_flops"] / rate
    hardware["matmul_flops"] = rate
