"""The planner of one engine (`policy='auto'`): `place` its weights once, `plan` each run, `learn`
from each.

Weights are placed once, before requests are known, for a workload that is typical of evaluation
suites. Block, cache and hidden states are planned for the lengths of every run, with rates that
earlier runs have corrected: the machine may be busier, or faster, than when it was measured. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.corrections import corrected, corrections
from flexgen_helm.planner.least_memory import require_least_memory
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import Choices, Policy
from flexgen_helm.planner.predict import CostEstimate, predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.run_memory import RunSize
from flexgen_helm.planner.run_plan import RunPlan, plan_run
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.planner.search import Solution, search
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import Placement, leaving_room, place_weights
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.tiers import MemoryLimits, Tier

# Before requests are known: few-shot prompts, short answers, and enough of them to fill every
# block.
TYPICAL_WORKLOAD = Workload.uniform(512, 32, 1)
# Unplanned runs longer than this measure the machine, so that a prediction can be reported;
# measuring takes half of it.
_MEASURE_FROM_S = 60.0


class ProfileSource(Protocol):
    """Where the planner has the machine's rates from."""

    @property
    def pins_host_memory(self) -> bool:
        """Whether the driver has pinned all host memory so far."""

    def profile(self, measure: bool) -> HardwareProfile | None:
        """Return the machine's profile; None if it cannot be measured, or has not been and
        `measure` is false.
        """


class Planner:
    """Decides for one engine where weights rest and how each run goes, by the user's choices, or
    searched.

    searches: block, cache and hidden states of runs are searched for their lengths.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        machine: Machine,
        choices: Choices,
        source: ProfileSource,
    ) -> None:
        """config: of the whole model, also on a rank of a pipeline (`take_layers`)."""
        self._config = config
        self._precision = precision
        self._machine = machine
        self._choices = choices
        self._source = source
        self._config_here, self._ranks = config, 1.0
        self._profile: HardwareProfile | None = None  # with what runs have taught
        self._expert_skew = 0.0
        self._placement: Placement | None = None
        self.searches = False

    def take_layers(self, config: ModelConfig) -> None:
        """Plan for a rank of a pipeline that has these of the model's layers, from now on."""
        self._config_here, self._ranks = config, self._config.num_layers / config.num_layers

    def place(self, name: str) -> Placement:
        """Place the weights: by the user's policy, by the rule of thumb if they fit, else as a
        search finds them.

        name: of the model, for messages.
        Raises `MemoryLimitError` with the missing bytes.
        """
        model = StorageSizes(self._config_here, self._precision)
        machine = self._machine
        policy = self._choices.policy
        if policy is None:
            require_least_memory(model, machine, name)
        placement = place_weights(model, machine, policy)
        self.searches = policy is None and (
            placement.streams_weights or self._choices.max_latency is not None
        )
        if self.searches and (found := self._search(TYPICAL_WORKLOAD, None)) is not None:
            placement = place_weights(model, machine, leaving_room(found.policy, model, machine))
        self._placement = placement
        return placement

    def plan(
        self, size: RunSize, free: Mapping[Tier, int], schedule: Schedule | None = None
    ) -> RunPlan:
        """Plan a run on the placed weights.

        free: bytes left on each tier.
        schedule: one that must be followed although it was not asked for.

        Raises `MemoryLimitError` if not even one sequence has room.
        """
        assert self._placement is not None
        solution = None
        if self.searches and size.workload is not None and schedule is None:
            shares = self._placement.shares
            solution = self._search(size.workload, Policy(1, 1, wg=shares["gpu"], wc=shares["cpu"]))
        choices = replace(self._choices, schedule=schedule or self._choices.schedule)
        return plan_run(self._placement, size, free, choices, solution)

    def learn(
        self,
        plan: RunPlan,
        drawn: Workload,
        at_once: int,
        record: Mapping[str, Any],
        *,
        is_whole: bool = True,
    ) -> CostEstimate | None:
        """Predict the run that was made, and correct the rates by how far that is off; return None
        without a profile.

        drawn: the lengths that sequences came to.
        at_once: most sequences of a pass.
        record: of the run.
        is_whole: nothing is learnt from one rank of a pipeline: what it waited for says little
            about its rates.
        """
        rates = self._rates(measure=self.searches or record["latency_s"] > _MEASURE_FROM_S)
        if rates is None:
            return None
        prediction = predict(self._problem(drawn), plan.comparable_policy(at_once), plan.schedule)
        if is_whole:
            if record.get("experts") is not None:
                self._expert_skew = record["experts"]["skew"]
            self._profile = corrected(rates, corrections(prediction, record))
        return prediction

    @property
    def product_flops(self) -> float:
        """Rate of the fastest product that predictions are made with."""
        return self._problem(TYPICAL_WORKLOAD).product_flops.best

    def _rates(self, measure: bool = True) -> HardwareProfile | None:
        if self._profile is None:
            self._profile = self._source.profile(measure)
        return self._profile

    def _problem(self, workload: Workload, endless: bool = False) -> PlanningProblem:
        """Return the planning problem of a workload; endless: it goes on for ever."""
        assert self._profile is not None
        machine = self._machine
        return planning_problem(
            self._config,
            self._profile,
            workload,
            precision=self._precision,
            storage_dtype=machine.multiplied_as_stored or machine.compute_dtype,
            limits=MemoryLimits(
                machine.limits["gpu"], machine.limits["cpu"], machine.limits["disk"]
            ),
            overlap=machine.overlap,
            cpu_attention=machine.cpu_attention,
            endless=endless,
            pins_host_memory=self._source.pins_host_memory,
            ranks=self._ranks,
            expert_skew=self._expert_skew,
        )

    def _search(self, workload: Workload, weights: Policy | None) -> Solution | None:
        """Search a policy; weights: one whose weights are loaded already. Without, the workload
        goes on for ever.
        """
        if self._rates() is None:
            return None
        schedule, max_latency = self._choices.schedule, self._choices.max_latency
        try:
            problem = self._problem(workload, endless=weights is None)
            return search(problem, schedule, max_latency=max_latency, fixed=weights)
        except MemoryLimitError:
            # of no requests yet, their lengths may be shorter than those
            if max_latency is not None and weights is not None:
                raise
            return None  # the rule of thumb has plans for less memory
