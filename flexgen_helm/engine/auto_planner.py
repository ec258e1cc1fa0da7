"""`policy='auto'`: where an engine's weights go, the block for each run, and what is learnt from the last one.

Weights are placed once, before requests are known, for a workload as evaluation suites have them. The block, the
cache and the hidden states are planned anew for the lengths of every run, with rates that were corrected by the runs
before: the machine may be busier, or better, than when it was measured.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_helm.engine.profiler import measured_profile, profile_named, saved_profile
from flexgen_helm.errors import FlexgenError, MemoryLimitError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.cost_model import RESOURCES
from flexgen_helm.planner.linear_program import Solution
from flexgen_helm.planner.placement import Tier
from flexgen_helm.planner.plan import planning_problem, simulated_gpu
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import Prediction, predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import AUTOMATIC, search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.request import MemoryLimits

# Names another profile than this machine's measured one: a shipped machine, or a file that `profile -o` wrote.
HARDWARE_VARIABLE = "FLEXGEN_HELM_HARDWARE"
# Before requests are known: few-shot prompts, short answers, and enough of them to fill every block.
TYPICAL = Workload.uniform(512, 32, 1)
# How far one run moves a rate towards what it measured, and how far any may go in all.
_STEP, _LEAST, _MOST = 0.5, 0.25, 4.0
# Rates are learnt where the predicted share of the time is at least this: of a phase, and of what was waited for.
_NOTABLE_PHASE, _NOTABLE_WAIT = 0.1, 0.3
_PHASES = ("prefill", "decode")


class AutoPlanner:
    """Plans for one engine. limits: bytes of its tiers; device: 'cpu', 'cuda' or 'sim' (with its link, in GB/s)."""

    def __init__(
        self,
        config: ModelConfig,
        limits: Mapping[Tier, int],
        folder: Path,
        *,
        device: str,
        storage_dtype: str,
        link_gb_s: tuple[float, float] | None,
        overlap: bool,
        cpu_attention: bool,
        schedule: Schedule | None,
        max_latency: float | None,
        precision: Precision,
    ) -> None:
        self._config, self._limits, self._folder = config, limits, folder
        self._device, self._storage_dtype, self._link = device, storage_dtype, link_gb_s
        self._overlap, self._cpu_attention = overlap, cpu_attention
        self._schedule, self._max_latency, self._precision = schedule, max_latency, precision
        self._profile: HardwareProfile | None = None
        self._refused: bool | None = None
        if os.environ.get(HARDWARE_VARIABLE, "measured") != "measured":
            _ = self.profile  # one that cannot be used is refused now

    @property
    def profile(self) -> HardwareProfile:
        """This machine's, as corrected so far; measured at the first use."""
        if self._profile is None:
            named = os.environ.get(HARDWARE_VARIABLE) or "measured"
            tell = logging.getLogger(__name__).warning
            if named == "measured":
                found = measured_profile(folder=self._folder, tell=tell)
            else:
                found = profile_named(named, tell)
            if self._device == "sim":
                found = simulated_gpu(replace(found, gpu=None, link=None), self._limits["gpu"], self._link)
            elif self._device == "cpu":
                found = replace(found, gpu=None, link=None)
            # Limits were set from what is free now; a profile from before may have seen less.
            cpu = replace(found.cpu, memory_bytes=max(found.cpu.memory_bytes, self._limits["cpu"]))
            disk = replace(found.disk, bytes=max(found.disk.bytes, self._limits["disk"]))
            gpu = found.gpu
            if gpu is not None:
                gpu = replace(gpu, memory_bytes=max(gpu.memory_bytes, self._limits["gpu"]))
            self._profile = replace(found, cpu=cpu, disk=disk, gpu=gpu)
        return self._profile

    def situation(self, workload: Workload, endless: bool = False) -> PlanningProblem:
        return planning_problem(
            self._config,
            self.profile,
            workload,
            precision=self._precision,
            rest_dtype=self._storage_dtype,
            limits=MemoryLimits(self._limits["gpu"], self._limits["cpu"], self._limits["disk"]),
            overlap=self._overlap,
            cpu_attention=self._cpu_attention,
            endless=endless,
        )

    def weights(self) -> Policy | None:
        """A policy for weights that do not fit beside the computing; None where there is no profile, or the search
        finds none that fits."""
        found = self._search(self.situation(TYPICAL, endless=True), None) if self._measurable() else None
        return None if found is None else found.policy

    def block(self, workload: Workload, weights: Policy) -> Solution | None:
        """The block for a run whose weights lie as `weights` says; None as `weights`."""
        return self._search(self.situation(workload), weights) if self._measurable() else None

    def predict(
        self, workload: Workload, policy: Policy, schedule: Schedule, *, measure: bool = True
    ) -> Prediction | None:
        """What a run should take; None where there is no profile. measure: the machine, where none was kept."""
        if not measure and self._profile is None and saved_profile(self._folder) is None:
            return None
        return predict(self.situation(workload), policy, schedule) if self._measurable() else None

    def _measurable(self) -> bool:
        """Whether there is a profile: a machine that cannot be measured (a full disk) is no reason to lose a run."""
        if self._refused is None:
            try:
                _ = self.profile
                self._refused = False
            except (FlexgenError, OSError) as error:
                self._refused = True
                logging.getLogger(__name__).warning("this machine cannot be measured, so nothing is planned: %s", error)
        return not self._refused

    def learn(self, prediction: Prediction, measured: Mapping[str, Any]) -> None:
        """Correct the rates of what the run was bound by. measured: the run's record."""
        self._profile = corrected(self.profile, corrections(prediction, measured))

    def _search(self, situation: PlanningProblem, weights: Policy | None) -> Solution | None:
        schedules = AUTOMATIC if self._schedule is None else (self._schedule,)
        try:
            return search(situation, schedules, max_latency=self._max_latency, fixed=weights)
        except MemoryLimitError:
            if self._max_latency is not None:
                raise
            return None


def corrected(profile: HardwareProfile, factors: Mapping[str, float]) -> HardwareProfile:
    """The profile with the rates of some resources multiplied."""
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


def corrections(prediction: Prediction, measured: Mapping[str, Any]) -> dict[str, float]:
    """Resource -> factor for its rate: half of the way from what was predicted to what was measured, in logarithms.

    Computing is judged phase by phase, by the time that batches took without waiting; a link or the disk by the whole
    time, where the run mostly waited for it; else the share of overlap, by how much of the transfers did hide.
    """
    blocks = prediction.latency_s / (prediction.prefill_s + prediction.decode_s)
    told = {phase: blocks * prediction.seconds[phase].get("compute", 0.0) for phase in _PHASES}
    total, waited = float(measured["latency_s"]), float(measured["time_s"]["wait"])
    taken = {phase: float(measured[f"{phase}_s"]) for phase in _PHASES}
    # Which phase waited is not measured: as predicted.
    idle = {
        phase: max(0.0, blocks * seconds - told[phase])
        for phase, seconds in zip(_PHASES, (prediction.prefill_s, prediction.decode_s))
    }
    whole = sum(idle.values()) or 1.0
    computed = {phase: taken[phase] - waited * idle[phase] / whole for phase in _PHASES}
    mixed = not told["prefill"]  # prompts and single tokens in one pass, which is told as decoding
    if mixed:
        told, computed = dict.fromkeys(_PHASES, sum(told.values())), dict.fromkeys(_PHASES, sum(computed.values()))
    found: dict[str, float] = {}
    for phase in _PHASES:
        if told[phase] > _NOTABLE_PHASE * prediction.latency_s and computed[phase] > 0:
            found[phase] = _step(told[phase], computed[phase])
    if waited > _NOTABLE_WAIT * total:
        spent = {
            name: blocks * sum(phase.get(name, 0.0) for phase in prediction.seconds.values())
            for name in ("disk_read", "to_gpu")
        }
        slowest = max(spent, key=lambda name: spent[name])
        if spent[slowest] > _NOTABLE_WAIT * prediction.latency_s:
            return {**found, slowest: _step(spent[slowest], total)}
    phases = [prediction.seconds[phase] for phase in _PHASES]
    moved = [[blocks * spent.get(name, 0.0) for name in RESOURCES if name != "compute"] for spent in phases]
    expected = _hidden(moved, list(told.values()), prediction.latency_s)
    seen = _hidden(moved, list(computed.values()), sum(taken.values()))
    notable = not mixed and sum(map(sum, moved)) > _NOTABLE_PHASE * total
    if notable and expected is not None and seen is not None:
        found["overlap"] = _step(seen, expected)
    return found


def _hidden(moved: Sequence[Sequence[float]], computed: Sequence[float], total: float) -> float | None:
    """Of what can hide behind the longest resource of each phase, the share that did; None where nothing can or did."""
    together = sum(map(sum, moved)) + sum(computed)
    longest = sum(max([own, *others]) for own, others in zip(computed, moved))
    share = (together - total) / (together - longest) if together > longest else 0.0
    return min(1.0, share) if share > 0.05 else None


def _step(predicted: float, measured: float) -> float:
    return min(_MOST, max(_LEAST, predicted / measured)) ** _STEP
