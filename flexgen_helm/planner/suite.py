"""How long a suite of run entries takes: each scenario alone, and all together as one run. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from flexgen_helm.planner.plan import Plan, make_plan, search_precisions
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import AUTOMATIC
from flexgen_helm.planner.search import search
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

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "range": [self.low, self.high]}


@dataclass(frozen=True)
class ScenarioPlan:
    """The entries of one scenario, which share nothing with each other, and what they take without the other ones."""

    entries: Sequence[EntryWorkload]
    made: Plan
    alone: Expectation

    @property
    def expected(self) -> Workload:
        return self.made.problem.workload

    @property
    def limit(self) -> Workload:
        return joined(entry.limit for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.entries[0].scenario,
            "entries": [{"entry": entry.entry, "basis": entry.basis, "source": entry.source} for entry in self.entries],
            "sequences": self.expected.num_sequences,
            "prompt_tokens": self.expected.prompt,
            "shared_tokens": self.expected.prompt - self.expected.computed,
            "answer_tokens": self.expected.output,
            "most_answer_tokens": self.limit.output,
            **self.alone.to_json(),
            "policy_flag": str(self.made.solution.policy),
        }


@dataclass(frozen=True)
class SuitePlan:
    """The plan of a suite.

    made: of all entries together.
    as_one: seconds of that run.
    by_precision: the plan in each precision that users choose between, None where nothing fits; empty where a precision
        was asked for.
    """

    scenarios: Sequence[ScenarioPlan]
    made: Plan
    as_one: Expectation
    by_precision: Mapping[str, SuitePlan | None] = field(default_factory=dict)

    @property
    def one_by_one(self) -> Expectation:
        """Seconds of a run for each scenario, one after another."""
        return Expectation(*map(sum, zip(*(astuple(scenario.alone) for scenario in self.scenarios))))

    @property
    def is_one_run(self) -> bool:
        """Whether one run is expected to be no slower than a run for each scenario."""
        return self.as_one.seconds <= self.one_by_one.seconds

    @property
    def total(self) -> Expectation:
        """Seconds of the better way."""
        return Expectation(*map(min, astuple(self.as_one), astuple(self.one_by_one)))

    def seconds(self, entries: Sequence[EntryWorkload], length: str) -> float:
        """Return the seconds of the better way with other lengths or numbers of the same entries.

        length: 'shortest', 'expected', 'longest' or 'limit'.
        """
        if self.is_one_run:
            return _seconds(self.made, joined(getattr(entry, length) for entry in entries))
        found = {scenario.entries[0].scenario: scenario.made for scenario in self.scenarios}
        asked = {name: [getattr(entry, length) for entry in entries if entry.scenario == name] for name in found}
        return sum(_seconds(made, joined(asked[name])) for name, made in found.items())

    @property
    def limit_s(self) -> float:
        """Seconds of the better way if every answer had all tokens that it may have."""
        return self.seconds([entry for scenario in self.scenarios for entry in scenario.entries], "limit")

    def to_json(self) -> dict[str, Any]:
        """Return seconds and tokens as docs/explanation/planning.md describes them."""
        return {
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
            "total": {**self.total.to_json(), "seconds_at_limit": self.limit_s},
            "as_one_run": self.as_one.to_json(),
            "one_by_one": self.one_by_one.to_json(),
            "precisions": {name: found and found.total.to_json() for name, found in self.by_precision.items()},
            "plan": self.made.to_json(),
        }


def plan_suite(problem: PlanningProblem, entries: Sequence[EntryWorkload], compare: bool = False) -> SuitePlan:
    """Search the plan of all entries as one run, and of each scenario alone.

    problem: with any workload.
    compare: in other precisions, too.

    Raises `MemoryLimitError` where nothing fits.
    """
    made = make_plan(replace(problem, workload=joined(entry.expected for entry in entries), endless=False))
    others = search_precisions(made, None, None) if compare else {}
    planned = _suite_plan(made, entries)
    by_precision = {
        name: None if other is None else planned if other is made else _suite_plan(other, entries)
        for name, other in others.items()
    }
    return replace(planned, by_precision=by_precision)


def _suite_plan(made: Plan, entries: Sequence[EntryWorkload]) -> SuitePlan:
    by_scenario: dict[str, list[EntryWorkload]] = {}
    for entry in entries:
        by_scenario.setdefault(entry.scenario, []).append(entry)
    scenarios = []
    for of_scenario in by_scenario.values():
        problem = replace(made.problem, workload=joined(entry.expected for entry in of_scenario))
        alone = made if len(by_scenario) == 1 else Plan(problem, search(problem, AUTOMATIC), "")
        scenarios.append(ScenarioPlan(of_scenario, alone, _expectation(alone, of_scenario)))
    return SuitePlan(scenarios, made, _expectation(made, entries))


def _expectation(made: Plan, entries: Sequence[EntryWorkload]) -> Expectation:
    shortest = _seconds(made, joined(entry.shortest for entry in entries))
    longest = _seconds(made, joined(entry.longest for entry in entries))
    low, high = made.spread.of_time(shortest)[0], made.spread.of_time(longest)[1]
    return Expectation(made.solution.prediction.latency_s, low, high)


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
