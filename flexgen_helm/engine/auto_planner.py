"""Plans for one engine (`policy='auto'`): where weights go, the block of each run, and corrections by measurement.

Weights are placed once, before requests are known, for a workload that is typical of evaluation suites. Block, cache
and hidden states are planned for the lengths of every run, with rates that earlier runs have corrected: the machine
may be busier, or faster, than when it was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.machine_profile import load_saved, measured_profile, profile_named
from flexgen_helm.errors import FlexgenError, MemoryLimitError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.cost_model import RESOURCES
from flexgen_helm.planner.layers import seconds_by_layers
from flexgen_helm.planner.linear_program import Solution
from flexgen_helm.planner.placement import Tier
from flexgen_helm.planner.plan import planning_problem, simulated_gpu
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import Prediction, predict
from flexgen_helm.planner.problem import MEASURED, PlanningProblem
from flexgen_helm.planner.search import AUTOMATIC, search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.progress import Message, report
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.request import MemoryLimits

# Names another profile than this machine's measured one: a shipped machine, or a file that `profile -o` wrote.
HARDWARE_VARIABLE = "FLEXGEN_HELM_HARDWARE"
# Before requests are known: few-shot prompts, short answers, and enough of them to fill every block.
TYPICAL_WORKLOAD = Workload.uniform(512, 32, 1)
# Exponent by which one run moves a rate towards what it measured, and bounds of the factor before it.
_STEP, _MIN_FACTOR, _MAX_FACTOR = 0.5, 0.25, 4.0
# Rates are corrected if the predicted share of the time is at least this: of a phase, and of what was waited for.
_PHASE_SHARE, _WAIT_SHARE = 0.1, 0.3
_PHASES = ("prefill", "decode")


class AutoPlanner:
    """Searches and predicts for one engine, with a profile that it corrects."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineConfig,
        limits: Mapping[Tier, int],
        folder: Path,
        *,
        device: Literal["cpu", "cuda", "sim"],
        compute_dtype: str,
        precision: Precision,
        pins_host_memory: Callable[[], bool] = lambda: True,
    ) -> None:
        """Check the profile that `HARDWARE_VARIABLE` names; measure nothing yet.

        config: of the whole model.
        limits: bytes of the engine's tiers.
        compute_dtype: that the engine has chosen; the plan's is the faster of it and float32.
        folder: of the disk tier.
        pins_host_memory: whether the driver has pinned all host memory so far.
        """
        self._pins_host_memory = pins_host_memory
        self._config, self._options, self._limits, self._folder = config, options, limits, folder
        self._device, self._compute_dtype, self._precision = device, compute_dtype, precision
        self._stages = 1.0
        self._profile: HardwareProfile | None = None
        self._has_profile: bool | None = None  # None: not tried yet
        self._expert_skew = 0.0
        if self.profile_name is not None:
            _ = self.profile

    @property
    def profile_name(self) -> str | None:
        """Name of the profile that takes the place of the measured one, if there is one."""
        name = os.environ.get(HARDWARE_VARIABLE) or MEASURED
        return None if name == MEASURED else name

    @property
    def profile(self) -> HardwareProfile:
        """The machine's profile with the corrections so far; measured at its first use."""
        if self._profile is None:
            self._profile = self._load_profile()
        return self._profile

    def problem(self, workload: Workload, endless: bool = False) -> PlanningProblem:
        """Return the planning problem of a workload; endless: it goes on for ever."""
        problem = planning_problem(
            self._config,
            self.profile,
            workload,
            precision=self._precision,
            storage_dtype=self._compute_dtype,
            limits=MemoryLimits(self._limits["gpu"], self._limits["cpu"], self._limits["disk"]),
            overlap=self._options.overlap,
            cpu_attention=self._options.cpu_attention,
            endless=endless,
            pins_host_memory=self._pins_host_memory(),
        )
        return replace(problem, stages=self._stages, expert_skew=self._expert_skew)

    def seconds_by_layers(self, rank: int, num_ranks: int) -> list[float]:
        """Predict a decode step with 1, 2, … layers on this rank; empty without a profile."""
        if not self._measured():
            return []
        problem = self.problem(TYPICAL_WORKLOAD, endless=True)
        return seconds_by_layers(problem, self._limits, rank, num_ranks, self._options.fixed_policy)

    def has_layers(self, count: int) -> None:
        """Plan for a rank with so many of the model's layers from now on."""
        self._stages = self._config.num_layers / count

    def weights(self) -> Policy | None:
        """Search a policy for weights that exceed the compute device; None without a profile or a feasible policy."""
        solution = self._search(self.problem(TYPICAL_WORKLOAD, endless=True), None) if self._measured() else None
        return None if solution is None else solution.policy

    def block(self, workload: Workload, weights: Policy) -> Solution | None:
        """Search batching and cache placement of a run for the given weight placement; None if infeasible."""
        return self._search(self.problem(workload), weights) if self._measured() else None

    def predict(
        self, workload: Workload, policy: Policy, schedule: Schedule, *, measure: bool = True
    ) -> Prediction | None:
        """Predict a run; None without a profile.

        measure: measure the machine if no profile is saved.
        """
        if not measure and self._profile is None and load_saved(self._folder) is None:
            return None
        return predict(self.problem(workload), policy, schedule) if self._measured() else None

    def learn(self, prediction: Prediction, record: Mapping[str, Any]) -> None:
        """Correct the rates of what bound a run, and how evenly its tokens selected experts; record: of the run."""
        if record.get("experts") is not None:
            self._expert_skew = record["experts"]["skew"]
        self._profile = corrected(self.profile, corrections(prediction, record))

    def _load_profile(self) -> HardwareProfile:
        name = self.profile_name
        profile = measured_profile(folder=self._folder) if name is None else profile_named(name)
        if self._device == "sim":
            profile = simulated_gpu(replace(profile, gpu=None, link=None), self._limits["gpu"], self._options.link_gb_s)
        elif self._device == "cpu":
            profile = replace(profile, gpu=None, link=None)
        # Limits follow from what is free now; a saved profile may have seen less.
        cpu, disk, gpu = profile.cpu, profile.disk, profile.gpu
        if gpu is not None:
            gpu = replace(gpu, memory_bytes=max(gpu.memory_bytes, self._limits["gpu"]))
        return replace(
            profile,
            cpu=replace(cpu, memory_bytes=max(cpu.memory_bytes, self._limits["cpu"])),
            disk=replace(disk, bytes=max(disk.bytes, self._limits["disk"])),
            gpu=gpu,
        )

    def _measured(self) -> bool:
        """Return whether there is a profile: a machine that cannot be measured (a full disk) must not end a run."""
        if self._has_profile is None:
            try:
                _ = self.profile
                self._has_profile = True
            except (FlexgenError, OSError) as error:
                self._has_profile = False
                report(Message(f"this machine cannot be measured, so nothing is planned: {error}"))
        return self._has_profile

    def _search(self, problem: PlanningProblem, weights: Policy | None) -> Solution | None:
        schedule, max_latency = self._options.fixed_schedule, self._options.max_latency
        try:
            schedules = AUTOMATIC if schedule is None else (schedule,)
            return search(problem, schedules, max_latency=max_latency, fixed=weights)
        except MemoryLimitError:
            if max_latency is not None:
                raise
            return None


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


def corrections(prediction: Prediction, record: Mapping[str, Any]) -> dict[str, float]:
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
