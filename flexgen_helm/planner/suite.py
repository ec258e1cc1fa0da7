"""How long a suite of run entries takes: each scenario alone, and all together as one run. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexgen_helm.planner.plan import Plan, make_plan, search_precisions
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import AUTOMATIC
from flexgen_helm.planner.search import search
from flexgen_helm.planner.spread import Spread
from flexgen_helm.planner.workload import Workload

# By how much batches become smaller until longer sequences fit.
_SMALLER = 0.8


@dataclass(frozen=True)
class EntryWorkload:
    """What one run entry asks of a model.

    entry: without its model.
    basis: 'prompts' that were read, 'measured' once elsewhere, 'published', or 'assumed'.
    source: where the lengths come from, for people.
    shortest, longest: between which the lengths are expected.
    limit: as `longest`, with answers of all tokens that they may have.
    """

    entry: str
    basis: str
    source: str
    shortest: Workload
    expected: Workload
    longest: Workload
    limit: Workload

    @property
    def scenario(self) -> str:
        return self.entry.partition(":")[0]


@dataclass(frozen=True)
class Expectation:
    """Seconds that a workload is predicted to take, and the range to expect."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class ScenarioPlan:
    """The entries of one scenario, which share nothing with each other, and what they take without the other ones."""

    entries: Sequence[EntryWorkload]
    expected: Workload
    limit: Workload
    alone: Expectation

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.entries[0].scenario,
            "entries": [{"entry": entry.entry, "basis": entry.basis, "source": entry.source} for entry in self.entries],
            "sequences": self.expected.num_sequences,
            "prompt_tokens": self.expected.prompt,
            "shared_tokens": self.expected.prompt - self.expected.computed,
            "answer_tokens": self.expected.output,
            "most_answer_tokens": self.limit.output,
            "seconds": self.alone.seconds,
            "range": [self.alone.low, self.alone.high],
        }


@dataclass(frozen=True)
class SuitePlan:
    """The plan of a suite as one run.

    made: of all entries together.
    total: seconds of that run.
    limit_s: seconds if every answer had all tokens that it may have.
    by_precision: the same plan and seconds in each precision that users choose between, None where nothing fits; empty
        where a precision was asked for.
    """

    scenarios: Sequence[ScenarioPlan]
    made: Plan
    total: Expectation
    limit_s: float
    by_precision: Mapping[str, tuple[Plan, Expectation] | None]

    def to_json(self) -> dict[str, Any]:
        """Return seconds and tokens as docs/explanation/planning.md describes them."""
        return {
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
            "total": {
                "seconds": self.total.seconds,
                "range": [self.total.low, self.total.high],
                "seconds_at_limit": self.limit_s,
            },
            "precisions": {
                name: found and {"seconds": found[1].seconds, "range": [found[1].low, found[1].high]}
                for name, found in self.by_precision.items()
            },
            "plan": self.made.to_json(),
        }


def plan_suite(problem: PlanningProblem, entries: Sequence[EntryWorkload], compare: bool = False) -> SuitePlan:
    """Search the plan of all entries as one run, and of each scenario alone.

    problem: with any workload.
    compare: the run in other precisions, too.

    Raises `MemoryLimitError` where nothing fits.
    """
    made = make_plan(replace(problem, workload=joined(entry.expected for entry in entries), endless=False))
    total = _expectation(made, entries, made.spread)
    limit_s = _seconds(made, joined(entry.limit for entry in entries))
    by_scenario: dict[str, list[EntryWorkload]] = {}
    for entry in entries:
        by_scenario.setdefault(entry.scenario, []).append(entry)
    scenarios = []
    for own in by_scenario.values():
        expected = joined(entry.expected for entry in own)
        alone_problem = replace(made.problem, workload=expected)
        alone = Plan(alone_problem, search(alone_problem, AUTOMATIC), "")
        limit = joined(entry.limit for entry in own)
        scenarios.append(ScenarioPlan(own, expected, limit, _expectation(alone, own, made.spread)))
    others = search_precisions(made, None, None) if compare else {}
    by_precision = {
        name: None if other is None else (other, _expectation(other, entries, other.spread))
        for name, other in others.items()
    }
    return SuitePlan(scenarios, made, total, limit_s, by_precision)


def _expectation(made: Plan, entries: Sequence[EntryWorkload], spread: Spread) -> Expectation:
    shortest = _seconds(made, joined(entry.shortest for entry in entries))
    longest = _seconds(made, joined(entry.longest for entry in entries))
    return Expectation(made.solution.prediction.latency_s, spread.of_time(shortest)[0], spread.of_time(longest)[1])


def _seconds(made: Plan, workload: Workload) -> float:
    """Return the seconds of other lengths with the policy of a plan, in smaller batches if they do not fit.

    A search would find policies that are as good or better; it takes a hundred times as long.
    """
    if workload == made.problem.workload:
        return made.solution.prediction.latency_s
    problem, solution = replace(made.problem, workload=workload), made.solution
    policy = solution.policy
    while workload.output == 1 or not solution.schedule.is_single_pass:
        same = predict(problem, policy, solution.schedule)
        if same.feasible:
            return same.latency_s
        if policy.block_size == 1:
            break
        if policy.num_gpu_batches > 1:
            policy = replace(policy, num_gpu_batches=int(policy.num_gpu_batches * _SMALLER))
        else:
            policy = replace(policy, gpu_batch_size=int(policy.gpu_batch_size * _SMALLER))
    return search(problem, AUTOMATIC).prediction.latency_s


def joined(workloads: Iterable[Workload]) -> Workload:
    """Return all sequences of several workloads as one."""
    every = list(workloads)
    counts: Counter[tuple[int, int]] = Counter()
    for workload in every:
        for prompt, output, count in workload.groups:
            counts[prompt, output] += count
    groups = tuple((prompt, output, count) for (prompt, output), count in sorted(counts.items()))
    return Workload(groups, sum(each.saved_tokens for each in every), sum(each.scored_tokens for each in every))
