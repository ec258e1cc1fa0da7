"""Plans for the runs of one engine, whose weights are loaded, and what the runs teach about the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.auto_planner import AutoPlanner
from flexgen_helm.engine.pipeline import Pipeline
from flexgen_helm.engine.run_record import predicted
from flexgen_helm.errors import FlexgenError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.planner.constants import UNLIMITED
from flexgen_helm.planner.memory import MemoryPlan, RunSize
from flexgen_helm.planner.placement import Tier
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.run_plan import RunPlan, plan_run
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.lanes import common_limits
from flexgen_helm.scheduling.prefix_tree import PrefixCostModel
from flexgen_helm.scheduling.prepare import PreparedRequests, planned_workload
from flexgen_helm.scheduling.sequence import Request

# Seconds that a batch takes in one layer for one more segment of keys: a few small operations.
_SEGMENT_S = 1e-4
# Operations that a token takes for one more segment, for each element of its queries: passes over queries and merged
# outputs, in operations of products that take as long (7 % of computing the token for SmolLM2-135M on two cores, 1 %
# for 7B).
_SEGMENT_FLOPS = 900.0
# Rates that the two are weighed with. Not measured: what is shared, and with it the last bits of a result, must not
# change between two processes.
_TYPICAL_FLOPS = {"cpu": 2e11, "cuda": 1e14}
# Unplanned runs longer than this measure the machine, so that a prediction can be reported; measuring takes half of it.
_MEASURE_FROM_S = 60.0


class RunPlanner:
    """Plans each run within what the weights leave of the tiers.

    prefix_cost: what sharing a prefix costs in tokens, over all layers; room is left open.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: ModelConfig,
        options: EngineConfig,
        memory: MemoryPlan,
        weights: Mapping[Tier, float],
        tiers: Tiers,
        auto: AutoPlanner,
        *,
        searches: bool,
        cache_format: CacheFormat | None,
        compute_bytes: int,
        pipeline: Pipeline | None,
    ) -> None:
        """config: of the whole model; part: the layers that are here.

        weights: fractions by tier as loaded.
        searches: block, cache and hidden states are searched by `auto`.
        """
        self._part, self._options, self._memory, self._weights = part, options, memory, weights
        self._tiers, self._auto, self._searches, self._pipeline = tiers, auto, searches, pipeline
        self._cache_format, self._compute_bytes = cache_format, compute_bytes
        flops_per_layer = config.linear_flops_per_token / config.num_layers
        self.prefix_cost = PrefixCostModel(
            UNLIMITED,
            _SEGMENT_S * _TYPICAL_FLOPS[tiers.device.type] / flops_per_layer,
            token_overhead=_SEGMENT_FLOPS * config.q_size / flops_per_layer,
        )

    def workload(self, prepared: PreparedRequests) -> Workload | None:
        """Return the lengths of a run's sequences; None without requests.

        Only a search must know beforehand what will be shared; the run plans that with its own room.
        """
        return planned_workload(prepared.distinct, self.prefix_cost, self._searches, self._cache_format)

    def plan(self, prepared: PreparedRequests, workload: Workload | None) -> RunPlan:
        """Plan one run; on a rank of a pipeline, within limits that suit all ranks."""
        if self._pipeline is None:
            return self._own_plan(prepared, workload)
        plan, plans = self._plans_of_ranks(self._pipeline, prepared, workload)
        if len({other.schedule == "prefill-only" for other in plans}) > 1:
            plan, plans = self._plans_of_ranks(self._pipeline, prepared, workload, "zigzag")  # all can follow that
        return replace(plan, limits=common_limits([other.limits for other in plans]))

    def compare(self, plan: RunPlan, workload: Workload, record: dict[str, Any]) -> None:
        """Record the prediction for what was computed, and correct the rates by how far it is from the measurement."""
        policy = plan.comparable_policy(self._weights, workload.num_sequences, self._tiers.compute_tier)
        measure = self._searches or record["latency_s"] > _MEASURE_FROM_S
        prediction = self._auto.predict(workload, policy, plan.schedule, measure=measure)
        if prediction is not None:
            record.update(predicted(prediction))
            if self._pipeline is None:  # what one rank waited for says little about its rates
                self._auto.learn(prediction, record)

    def _plans_of_ranks(
        self,
        pipeline: Pipeline,
        prepared: PreparedRequests,
        workload: Workload | None,
        schedule: Schedule | None = None,
    ) -> tuple[RunPlan, list[RunPlan]]:
        """Return this rank's plan, and those of all ranks; one that cannot plan ends the run on all."""
        try:
            plan = self._own_plan(prepared, workload, schedule)
        except FlexgenError as error:
            pipeline.agree(error)
            raise
        return plan, pipeline.agree(plan)

    def _own_plan(
        self, prepared: PreparedRequests, workload: Workload | None, schedule: Schedule | None = None
    ) -> RunPlan:
        """Plan one run; `auto` searches block, cache and hidden states for it, with the weights as they are.

        schedule: one that must be followed although it was not asked for.
        """
        solution = None
        if self._searches and workload is not None and schedule is None:
            solution = self._auto.block(workload, Policy(1, 1, wg=self._weights["gpu"], wc=self._weights["cpu"]))
        requests = prepared.distinct
        decoded = [request for request in requests if request.request.max_tokens > 1]
        size = RunSize(
            max(map(_positions, requests), default=1),
            sum(max(len(request.tokens), request.num_completions) for request in requests),
            max((request.length_group or 0 for request in requests), default=0),
            max(map(_positions, decoded), default=0),
            max((request.request.max_tokens - 1 for request in decoded), default=0),
        )
        return plan_run(
            self._memory,
            size,
            {tier: ledger.free for tier, ledger in self._tiers.ledgers.items()},
            policy=self._options.fixed_policy,
            schedule=schedule or self._options.fixed_schedule,
            solution=solution,
            config=self._part,
            cache_format=self._cache_format,
            compute_tier=self._tiers.compute_tier,
            compute_bytes=self._compute_bytes,
            cpu_attention=self._options.cpu_attention,
        )


def _positions(request: Request) -> int:
    """Return the positions of one completion with its prompt."""
    return len(request.tokens) + max(0, request.request.max_tokens - 1)
