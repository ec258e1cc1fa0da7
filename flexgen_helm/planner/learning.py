"""What a run teaches: rates of the machine, corrected by how far its prediction was from the measurement. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner.cost_model import RESOURCES
from flexgen_helm.planner.predict import CostEstimate

# Exponent by which one run moves a rate towards what it measured, and bounds of the factor before it.
_STEP, _MIN_FACTOR, _MAX_FACTOR = 0.5, 0.25, 4.0
# Rates are corrected if the predicted share of the time is at least this: of a phase, and of what was waited for.
_PHASE_SHARE, _WAIT_SHARE = 0.1, 0.3
_PHASES = ("prefill", "decode")


def corrected(profile: HardwareProfile, factors: Mapping[str, float]) -> HardwareProfile:
    """Return the profile with the rates of some resources multiplied."""
    profile = replace(
        profile,
        prefill_share=profile.prefill_share * factors.get("prefill", 1.0),
        decode_share=profile.decode_share * factors.get("decode", 1.0),
        overlap=min(1.0, profile.overlap * factors.get("overlap", 1.0)),
    )
    if "disk_read" in factors:
        rate = profile.disk.read_bytes_s * factors["disk_read"]
        profile = replace(profile, disk=replace(profile.disk, read_bytes_s=rate))
    if "to_gpu" in factors and profile.link is not None:
        rate = profile.link.to_gpu_bytes_s * factors["to_gpu"]
        profile = replace(profile, link=replace(profile.link, to_gpu_bytes_s=rate))
    return profile


def corrections(prediction: CostEstimate, record: Mapping[str, Any]) -> dict[str, float]:
    """Return factors for rates by resource: half of the way, in logarithms, from predicted to measured.

    Computing is judged phase by phase, by the time that batches took without waiting. A link or the disk is judged by
    the whole time, if the run mostly waited for it; otherwise the overlap, by how much of the transfers was hidden.
    """
    blocks = prediction.latency_s / (prediction.prefill_s + prediction.decode_s)
    expected = {phase: blocks * prediction.seconds[phase].get("compute", 0.0) for phase in _PHASES}
    total, waited = float(record["latency_s"]), float(record["time_s"]["wait"])
    taken = {phase: float(record[f"{phase}_s"]) for phase in _PHASES}
    # Which phase waited is not measured: as predicted.
    idle = {
        phase: max(0.0, blocks * seconds - expected[phase])
        for phase, seconds in zip(_PHASES, (prediction.prefill_s, prediction.decode_s))
    }
    total_idle = sum(idle.values()) or 1.0
    computed = {phase: taken[phase] - waited * idle[phase] / total_idle for phase in _PHASES}
    mixed = not expected["prefill"]  # prompts and single tokens in one pass, which is predicted as decoding
    if mixed:
        expected, computed = (dict.fromkeys(_PHASES, sum(times.values())) for times in (expected, computed))
    factors: dict[str, float] = {}
    for phase in _PHASES:
        if expected[phase] > _PHASE_SHARE * prediction.latency_s and computed[phase] > 0:
            factors[phase] = _factor(expected[phase], computed[phase])
    if waited > _WAIT_SHARE * total:
        transfer_s = {
            name: blocks * sum(phase.get(name, 0.0) for phase in prediction.seconds.values())
            for name in ("disk_read", "to_gpu")
        }
        slowest = max(transfer_s, key=lambda name: transfer_s[name])
        if transfer_s[slowest] > _WAIT_SHARE * prediction.latency_s:
            return {**factors, slowest: _factor(transfer_s[slowest], total)}
    phases = [prediction.seconds[phase] for phase in _PHASES]
    transfers = [[blocks * spent.get(name, 0.0) for name in RESOURCES if name != "compute"] for spent in phases]
    predicted_share = _hidden_share(transfers, list(expected.values()), prediction.latency_s)
    measured_share = _hidden_share(transfers, list(computed.values()), sum(taken.values()))
    notable = not mixed and sum(map(sum, transfers)) > _PHASE_SHARE * total
    if notable and predicted_share is not None and measured_share is not None:
        factors["overlap"] = _factor(measured_share, predicted_share)
    return factors


def _hidden_share(transfers: Sequence[Sequence[float]], computed: Sequence[float], total: float) -> float | None:
    """Return the share that was hidden of what can hide behind the longest resource of each phase.

    None if nothing can hide, or nothing did.
    """
    together = sum(map(sum, transfers)) + sum(computed)
    longest = sum(max([own, *others]) for own, others in zip(computed, transfers))
    share = (together - total) / (together - longest) if together > longest else 0.0
    return min(1.0, share) if share > 0.05 else None


def _factor(predicted: float, measured: float) -> float:
    return min(_MAX_FACTOR, max(_MIN_FACTOR, predicted / measured)) ** _STEP
