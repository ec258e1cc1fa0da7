"""What a run teaches: rates of the machine, corrected by how far its prediction was from the
measurement. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner.cost_model import RESOURCES
from flexgen_helm.planner.predict import CostEstimate

# Exponent by which one run moves a rate towards what it measured, and bounds of the factor before
# it.
_STEP, _MIN_FACTOR, _MAX_FACTOR = 0.5, 0.25, 4.0
# Rates are corrected if the predicted share of the time is at least this: of a phase (of transfers
# for the overlap), and of what was waited for.
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
    """Return factors for rates by resource: half of the way, in logarithms, from predicted to
    measured.

    Computing is judged phase by phase, by the time that batches took without waiting. A link or the
    disk is judged by the whole time, if the run mostly waited for it; otherwise the overlap, by how
    much of the transfers was hidden.

        predicted     prefill: compute, wait          decode: compute, wait
        measured      prefill in all                  decode in all            wait of both
        compared      compute = in all - wait, which is divided between the phases as predicted
    """
    # seconds of phases are of one block
    num_blocks = prediction.latency_s / (prediction.prefill_s + prediction.decode_s)
    # Predicted seconds of the run by phase and resource, each as if it were alone.
    alone = {
        phase: {name: num_blocks * seconds for name, seconds in prediction.seconds[phase].items()}
        for phase in _PHASES
    }
    predicted_compute = {phase: alone[phase].get("compute", 0.0) for phase in _PHASES}
    predicted_wait = {
        phase: max(0.0, num_blocks * seconds - predicted_compute[phase])
        for phase, seconds in zip(_PHASES, (prediction.prefill_s, prediction.decode_s))
    }
    run_s, wait_s = float(record["latency_s"]), float(record["time_s"]["wait"])
    phase_s = {phase: float(record[f"{phase}_s"]) for phase in _PHASES}
    # Which phase waited is not measured: it is divided as predicted, else by the phases' seconds.
    waited = predicted_wait if sum(predicted_wait.values()) else phase_s
    wait_ratio = wait_s / (sum(waited.values()) or 1.0)
    compute = {phase: phase_s[phase] - wait_ratio * waited[phase] for phase in _PHASES}
    # prompts and single tokens in one pass, which is predicted as decoding
    is_mixed = not predicted_compute["prefill"]
    if is_mixed:
        predicted_compute, compute = (
            dict.fromkeys(_PHASES, sum(times.values())) for times in (predicted_compute, compute)
        )
    factors: dict[str, float] = {}
    for phase in _PHASES:
        if predicted_compute[phase] > _PHASE_SHARE * prediction.latency_s and compute[phase] > 0:
            factors[phase] = _factor(predicted_compute[phase], compute[phase])
    if wait_s > _WAIT_SHARE * run_s:
        links = {
            name: sum(alone[phase].get(name, 0.0) for phase in _PHASES)
            for name in ("disk_read", "to_gpu")
        }
        slowest = max(links, key=lambda name: links[name])
        if links[slowest] > _WAIT_SHARE * prediction.latency_s:
            return {**factors, slowest: _factor(links[slowest], run_s)}
    transfers = [
        [alone[phase].get(name, 0.0) for name in RESOURCES if name != "compute"]
        for phase in _PHASES
    ]
    predicted_share = _hidden_share(
        transfers, list(predicted_compute.values()), prediction.latency_s
    )
    measured_share = _hidden_share(transfers, list(compute.values()), sum(phase_s.values()))
    is_notable = not is_mixed and sum(map(sum, transfers)) > _PHASE_SHARE * run_s
    if is_notable and predicted_share is not None and measured_share is not None:
        factors["overlap"] = _factor(measured_share, predicted_share)  # more of it is a better rate
    return factors


def _hidden_share(
    transfers: Sequence[Sequence[float]], computed: Sequence[float], total: float
) -> float | None:
    """Return the share that was hidden of what can hide behind the longest resource of each phase.

    transfers: seconds of each link and disk direction, by phase, as if alone.
    computed: seconds by phase.
    total: seconds that the phases took together.
    None if nothing can hide, or nothing did.
    """
    together = sum(map(sum, transfers)) + sum(computed)
    longest = sum(max(seconds, *hidden) for seconds, hidden in zip(computed, transfers))
    share = (together - total) / (together - longest) if together > longest else 0.0
    return min(1.0, share) if share > 0.05 else None


def _factor(predicted: float, measured: float) -> float:
    """Return the factor of a rate: of the bounded ratio the square root, half of the way."""
    return min(_MAX_FACTOR, max(_MIN_FACTOR, predicted / measured)) ** _STEP
