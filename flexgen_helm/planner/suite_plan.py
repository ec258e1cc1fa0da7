"""How long a suite of run entries takes: each scenario alone, and all together as one run. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from flexgen_helm.planner.measured_range import Expectation
from flexgen_helm.planner.plan import Plan, make_plan, search_precisions
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import search
from flexgen_helm.planner.workload import Workload

# Answers have between so much less and so much more than the right ones:
# docs/explanation/planning.md has measurements.
ANSWER_FACTOR = 2.0
# By how much batches become smaller until longer sequences fit.
_SMALLER = 0.8


@dataclass(frozen=True)
class EntryWorkload:
    """The requests of one run entry.

    entry: without its model.
    instances: of HELM, with one or more requests.
    lengths: of each sequence, tokens of the prompt, of the right answer, and most of an answer.
    saved_tokens: of prompts, which shared beginnings save.
    scored_tokens: of prompts, whose log-probabilities are wanted.
    """

    entry: str
    instances: int
    lengths: Sequence[tuple[int, int, int]]
    saved_tokens: int = 0
    scored_tokens: int = 0

    @property
    def scenario(self) -> str:
        return self.entry.partition(":")[0]


@dataclass(frozen=True)
class ScenarioPlan:
    """The entries of one scenario, which share nothing with each other, and what they take without
    the other ones.
    """

    entries: Sequence[EntryWorkload]
    plan: Plan
    alone: Expectation

    @property
    def expected(self) -> Workload:
        return self.plan.problem.workload

    @property
    def limit(self) -> Workload:
        return suite_workload(self.entries, math.inf)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.entries[0].scenario,
            "entries": [entry.entry for entry in self.entries],
            "sequences": self.expected.num_sequences,
            "prompt_tokens": self.expected.mean_prompt,
            "shared_tokens": self.expected.mean_prompt - self.expected.mean_computed,
            "answer_tokens": self.expected.mean_output,
            "most_answer_tokens": self.limit.mean_output,
            **self.alone.to_json(),
            "policy_flag": str(self.plan.solution.policy),
        }


@dataclass(frozen=True)
class SuitePlan:
    """The plan of a suite.

    plan: of all entries together.
    as_one: seconds of that run.
    by_precision: the plan in each precision that users choose between, None where nothing fits;
        empty where a precision was asked for.
    """

    scenarios: Sequence[ScenarioPlan]
    plan: Plan
    as_one: Expectation
    by_precision: Mapping[str, SuitePlan | None] = field(default_factory=dict)

    @property
    def one_by_one(self) -> Expectation:
        """Seconds of a run for each scenario, one after another."""
        return Expectation(
            *map(sum, zip(*(astuple(scenario.alone) for scenario in self.scenarios)))
        )

    @property
    def is_one_run(self) -> bool:
        """Whether one run is expected to be no slower than a run for each scenario."""
        return self.as_one.seconds <= self.one_by_one.seconds

    @property
    def expected(self) -> Expectation:
        """Seconds of the better way."""
        return self.as_one if self.is_one_run else self.one_by_one

    @property
    def entries(self) -> list[EntryWorkload]:
        return [entry for scenario in self.scenarios for entry in scenario.entries]

    def sample_s(self, share: float, factor: float = 1.0) -> float:
        """Return the seconds of one run of a share of the sequences; factor: of their answers."""
        return _seconds(self.plan, suite_workload(self.entries, factor).part(share))

    @property
    def limit_s(self) -> float:
        """Seconds of the better way if every answer had all tokens that it may have."""
        if self.is_one_run:
            return _seconds(self.plan, suite_workload(self.entries, math.inf))
        return sum(_seconds(scenario.plan, scenario.limit) for scenario in self.scenarios)

    def to_json(self) -> dict[str, Any]:
        """Return seconds and tokens as docs/explanation/planning.md describes them."""
        return {
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
            "total": {**self.expected.to_json(), "seconds_at_limit": self.limit_s},
            "as_one_run": self.as_one.to_json(),
            "one_by_one": self.one_by_one.to_json(),
            "precisions": {
                name: plan and plan.expected.to_json() for name, plan in self.by_precision.items()
            },
            "plan": self.plan.to_json(),
        }


def plan_suite(
    problem: PlanningProblem, entries: Sequence[EntryWorkload], compare: bool = False
) -> SuitePlan:
    """Search the plan of all entries as one run, and of each scenario alone.

    problem: with any workload.
    compare: in other precisions, too.

    Raises `MemoryLimitError` where nothing fits.
    """
    plan = make_plan(replace(problem, workload=suite_workload(entries), endless=False))
    planned = _suite_plan(plan, entries)
    by_precision: dict[str, SuitePlan | None] = {}
    for name, in_precision in (
        search_precisions(plan, schedule=None, max_latency=None).items() if compare else ()
    ):
        if in_precision is plan:
            by_precision[name] = planned
        else:
            by_precision[name] = (
                None if in_precision is None else _suite_plan(in_precision, entries)
            )
    return replace(planned, by_precision=by_precision)


def _suite_plan(plan: Plan, entries: Sequence[EntryWorkload]) -> SuitePlan:
    by_scenario: dict[str, list[EntryWorkload]] = {}
    for entry in entries:
        by_scenario.setdefault(entry.scenario, []).append(entry)
    scenarios = []
    for scenario_entries in by_scenario.values():
        problem = replace(plan.problem, workload=suite_workload(scenario_entries))
        alone = plan if len(by_scenario) == 1 else Plan(problem, search(problem))
        expected = _expectation(alone, scenario_entries)
        scenarios.append(ScenarioPlan(scenario_entries, alone, expected))
    return SuitePlan(scenarios, plan, _expectation(plan, entries))


def _expectation(plan: Plan, entries: Sequence[EntryWorkload]) -> Expectation:
    """Return the seconds to expect: the range of runs, from shorter answers to longer ones."""
    shortest = _seconds(plan, suite_workload(entries, 1 / ANSWER_FACTOR))
    longest = _seconds(plan, suite_workload(entries, ANSWER_FACTOR))
    low, high = plan.range.of_time(shortest)[0], plan.range.of_time(longest)[1]
    return Expectation(plan.solution.prediction.latency_s, low, high)


def _seconds(plan: Plan, workload: Workload) -> float:
    """Return the seconds of a workload of other lengths with the policy of a plan, in smaller
    batches if they do not fit.

    A search would find policies that are as good or better; it takes a hundred times as long.
    """
    if workload == plan.problem.workload:
        return plan.solution.prediction.latency_s
    problem, solution = replace(plan.problem, workload=workload), plan.solution
    policy = solution.policy
    # a single pass cannot take answers of more than one token
    while workload.mean_output == 1 or not solution.schedule.is_single_pass:
        prediction = predict(problem, policy, solution.schedule)
        if prediction.feasible:
            return prediction.latency_s
        if policy.block_size == 1:
            break
        if policy.num_gpu_batches > 1:
            policy = replace(policy, num_gpu_batches=int(policy.num_gpu_batches * _SMALLER))
        else:
            policy = replace(policy, gpu_batch_size=int(policy.gpu_batch_size * _SMALLER))
    return search(problem).prediction.latency_s


def suite_workload(entries: Sequence[EntryWorkload], factor: float = 1.0) -> Workload:
    """Return all sequences of entries; factor: their answers' tokens by those of the right ones."""
    lengths = [
        (prompt, max(1, round(min(most, factor * answer))))
        for entry in entries
        for prompt, answer, most in entry.lengths
    ]
    saved = sum(entry.saved_tokens for entry in entries)
    return Workload.of(lengths, saved, sum(entry.scored_tokens for entry in entries))
