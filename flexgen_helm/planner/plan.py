"""Plans for users: from their choices to a planning problem, and from a search to an explained
record. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.hardware.profile import PROFILED, Curve, HardwareProfile, Link, load_profile
from flexgen_helm.models.architectures import overflows_float16
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import placed_fractions, predict
from flexgen_helm.planner.problem import PlanningProblem, fractions_by_kind
from flexgen_helm.planner.schedules import AUTOMATIC, PREFILL_ONLY, ZIGZAG, Schedule
from flexgen_helm.planner.search import Solution, search, shortage
from flexgen_helm.planner.workload import Workload
from flexgen_helm.progress import KEEP_EVERY_S, KEEP_STATES_EVERY_S
from flexgen_helm.quant.precisions import Precision, precision_named
from flexgen_helm.request import MemoryLimits
from flexgen_helm.tiers import TIERS, Tier

# How far predictions were from measured runs, by where the rates of a machine come from.


@dataclass(frozen=True)
class MeasuredRange:
    """The range of measured times, as multiples of the predicted one, that holds at least 80 % of
    measured runs.

    source: where the rates come from, and what the range was measured on, for people.
    """

    low: float
    high: float
    source: str

    def holds(self, ratio: float) -> bool:
        """Return whether a measured time, as a multiple of the predicted one, is within the
        range.
        """
        return self.low <= ratio <= self.high

    def of_time(self, seconds: float) -> tuple[float, float]:
        """Return the shortest and the longest time to expect."""
        return seconds * self.low, seconds * self.high

    def of_rate(self, rate: float) -> tuple[float, float]:
        """Return the lowest and the highest rate to expect."""
        return rate / self.high, rate / self.low


LEARNT = MeasuredRange(
    1 / 1.2,
    1.2,
    "rates measured and corrected by runs; all of ten such policies were within this range",
)
NEW = MeasuredRange(
    1 / 1.2,
    2.0,
    (
        "rates measured, not corrected by a run yet; such runs took 1.1 to 2 times as long as "
        "predicted"
    ),
)
FITTED = MeasuredRange(
    1 / 1.25, 1.25, "rates fitted to the paper's T4; 25 of its 28 rows are within this range"
)
DATA_SHEET = MeasuredRange(
    1 / 2,
    2.0,
    "speeds are from data sheets; 44 of 45 published runs fell within such a range",
)
PIPELINE = MeasuredRange(
    1 / 2, 2.0, "machines in a pipeline; all six rows of the paper's four T4s are within this range"
)


def spread_of(hardware: HardwareProfile, ranks: float = 1) -> MeasuredRange:
    """Return the range for a machine; a profile whose rates have no known source counts as a data
    sheet.
    """
    if ranks > 1:
        return PIPELINE
    if PROFILED in hardware.sources.values():
        is_corrected = (hardware.prefill_share, hardware.decode_share) != (1.0, 1.0)
        return LEARNT if is_corrected else NEW
    paper = load_profile("t4")
    is_fitted = (hardware.gpu, hardware.cpu, hardware.link) == (paper.gpu, paper.cpu, paper.link)
    return FITTED if is_fitted else DATA_SHEET


# Precisions that a plan compares where none is asked for.
_COMPARED = ("fp16", "8bit", "4bit")
_Record = TypeVar("_Record")


def simulated_gpu(
    hardware: HardwareProfile,
    link_gb_s: tuple[float, float] | None,
    disk_gb_s: tuple[float, float] | None = None,
) -> HardwareProfile:
    """Add a simulated gpu: the machine's own processor with host memory behind a link.

    Its limit is the user's, and its capacity the host's: the workspace of computing is there and no
    limit counts it.

    link_gb_s: GB/s in and out, at most and by default as fast as memory is copied.
    disk_gb_s: GB/s of reads and writes of a simulated disk, at most and by default the machine's
        own.
    """
    copy = hardware.cpu.memory_bytes_s / 2
    to_gpu, to_cpu = (min(rate * 1e9, copy) for rate in link_gb_s) if link_gb_s else (copy, copy)
    disk = hardware.disk
    if disk_gb_s is not None:
        read, write = (1e9 * rate for rate in disk_gb_s)
        read, write = min(read, disk.read_bytes_s), min(write, disk.write_bytes_s)
        disk = replace(disk, read_bytes_s=read, write_bytes_s=write, duplex=1.0)
    return replace(hardware, gpu=hardware.cpu, link=Link(to_gpu, to_cpu, to_gpu, to_cpu), disk=disk)


def planning_problem(
    config: ModelConfig,
    hardware: HardwareProfile,
    workload: Workload,
    *,
    precision: str | Precision = "fp16",
    limits: MemoryLimits = MemoryLimits(),
    **more: Any,
) -> PlanningProblem:
    """Collect what the cost model needs.

    limits: None for what the machine has, less a margin; of the disk all that is free.
    more: fields of the problem, such as the checkpoint's `storage_dtype`.

    Raises `UsageError` for a negative limit and for an unknown precision.
    """
    suffices = not overflows_float16(config.architecture)
    stored = more.get("storage_dtype", "float16")
    half = hardware.gpu is not None and hardware.gpu.compute_dtype(stored, suffices) != "float32"
    named = precision_named(precision) if isinstance(precision, str) else precision
    problem = PlanningProblem(config, hardware, workload, named, 2 if half else 4, {}, **more)
    bytes_by_tier: dict[Tier, float] = {}
    for tier in TIERS:
        limit = getattr(limits, tier)
        if limit is not None and limit < 0:
            raise UsageError(
                f"the limit of the {tier} tier is {limit:,} bytes; it must be at least 0"
            )
        bytes_by_tier[tier] = float(problem.largest_limit(tier) if limit is None else limit)
    return replace(problem, limits=bytes_by_tier)


@dataclass(frozen=True)
class Plan:
    """A policy with its cost."""

    problem: PlanningProblem
    solution: Solution

    @property
    def why(self) -> str:
        """What does not fit, or the part that bounds the speed: it brings most if it is twice as
        fast.
        """
        prediction = self.solution.prediction
        if missing := prediction.missing:
            tier = max(missing, key=lambda tier: missing[tier])
            used = prediction.memory[tier]
            return f"Does not fit: needs {shortage(self.problem, tier, used.peak, used.workspace)}."
        faster = _twice_as_fast(self.problem, self.solution)
        part = min(faster, key=lambda name: faster[name])
        saved = 1 - faster[part] / prediction.latency_s
        if saved < 0.02:
            return "Bound by no part alone."
        saves = "halves the time" if saved > 0.45 else f"saves {100 * saved:.0f} % of the time"
        return f"Bound by the {part}: twice as fast {saves}."

    @property
    def block_sequences(self) -> int:
        """Sequences that are computed together."""
        block_size = self.solution.policy.block_size
        num_sequences = self.problem.workload.num_sequences
        if self.problem.endless:
            return block_size
        return (
            num_sequences
            if self.solution.schedule.is_single_pass
            else min(block_size, num_sequences)
        )

    @property
    def sequences_per_h(self) -> float:
        return 3600 * self.solution.prediction.tokens_per_s / self.problem.workload.output

    @property
    def spread(self) -> MeasuredRange:
        return spread_of(self.problem.hardware, self.problem.ranks)

    @property
    def expected(self) -> Expectation:
        seconds = self.solution.prediction.latency_s
        return Expectation(seconds, *self.spread.of_time(seconds))

    @property
    def stop_s(self) -> float:
        """Most seconds of computing that a stop costs: drawn tokens wait to be written, then the
        prompts of a block are computed again with what was drawn, and a pass.
        """
        prediction, workload = self.solution.prediction, self.problem.workload
        num_decoded = max(0.0, workload.output - 1)
        recomputed_prefill_s = prediction.prefill_s * (1 + num_decoded / workload.prompt)
        one_decode_pass_s = prediction.decode_s / max(1.0, num_decoded)
        if self.solution.schedule.is_single_pass:  # its hidden states are kept after a layer
            one_layer_s = recomputed_prefill_s / self.problem.config.num_layers
            recomputed_prefill_s = min(recomputed_prefill_s, KEEP_STATES_EVERY_S + one_layer_s)
        return KEEP_EVERY_S + recomputed_prefill_s + one_decode_pass_s

    @cached_property
    def block(self) -> dict[str, dict[str, float]]:
        """Bytes that a block reads of the disk, and tokens of prompts or answers a second, by
        phase.
        """
        problem, policy, schedule = self.problem, self.solution.policy, self.solution.schedule
        prediction, hardware = self.solution.prediction, problem.hardware
        a_byte_a_second = replace(
            hardware, disk=replace(hardware.disk, read_bytes_s=1.0, access_s=0.0)
        )
        read = predict(replace(problem, hardware=a_byte_a_second), policy, schedule).seconds
        tokens = {"prefill": problem.workload.computed, "decode": problem.workload.output - 1}
        seconds = {"prefill": prediction.prefill_s, "decode": prediction.decode_s}
        return {
            phase: {
                "bytes_read": read[phase]["disk_read"],
                "tokens_per_s": self.block_sequences * count / seconds[phase],
            }
            for phase, count in tokens.items()
            if count
        }

    def to_json(self) -> dict[str, Any]:
        """Return bytes, seconds and fractions as docs/explanation/planning.md describes them."""
        policy, prediction = self.solution.policy, self.solution.prediction
        return {
            "policy": {
                **{name: round(float(value), 6) for name, value in policy.fractions.items()},
                "gpu_batch_size": policy.gpu_batch_size,
                "num_gpu_batches": policy.num_gpu_batches,
                "schedule": self.solution.schedule.name,
                "precision": self.problem.precision.name,
            },
            "policy_flag": str(policy),
            "placement": fractions_by_kind(placed_fractions(self.problem, policy)),
            "predicted": {
                "prefill_s": prediction.prefill_s,
                "decode_s": prediction.decode_s,
                "prefill_passes": prediction.passes,
                "latency_s": prediction.latency_s,
                "tokens_per_s": prediction.tokens_per_s,
                "sequences_per_h": self.sequences_per_h,
                "seconds": {phase: dict(seconds) for phase, seconds in prediction.seconds.items()},
            },
            "block": self.block,
            "range": {
                "latency_s": self.spread.of_time(prediction.latency_s),
                "tokens_per_s": self.spread.of_rate(prediction.tokens_per_s),
                "source": self.spread.source,
            },
            "memory": {tier: asdict(memory) for tier, memory in prediction.memory.items()},
            "feasible": prediction.feasible,
            "missing_bytes": dict(prediction.missing),
            "bottleneck": prediction.bottleneck,
            "why": self.why,
        }


def make_plan(
    problem: PlanningProblem,
    *,
    policy: Policy | None = None,
    schedule: Schedule | None = None,
    max_latency: float | None = None,
) -> Plan:
    """Search a policy, or evaluate the given one.

    schedule: None for the best of those that a search tries.

    Raises `MemoryLimitError` if the search finds nothing. A given policy that does not fit is a
    plan that is not feasible.
    """
    if policy is None:
        schedules = AUTOMATIC if schedule is None else (schedule,)
        solution = search(problem, schedules, max_latency=max_latency)
    else:
        schedule = schedule or (PREFILL_ONLY if problem.workload.output == 1 else ZIGZAG)
        solution = Solution(policy, schedule, predict(problem, policy, schedule))
    return Plan(problem, solution)


def search_precisions(
    made: Plan, schedule: Schedule | None, max_latency: float | None
) -> dict[str, Plan | None]:
    """Return the best plan of each precision that users choose between; None for one that does not
    fit.

    made: the searched plan of one of them, under the same schedule and limit.
    """
    plans: dict[str, Plan | None] = dict.fromkeys(_COMPARED)
    for name in plans:
        if name == made.problem.precision.name:
            plans[name] = made
            continue
        problem = replace(
            made.problem,
            precision=replace(precision_named(name), published=made.problem.precision.published),
        )
        with suppress(MemoryLimitError):
            found = search(
                problem, AUTOMATIC if schedule is None else (schedule,), max_latency=max_latency
            )
            plans[name] = Plan(problem, found)
    return plans


def _twice_as_fast(problem: PlanningProblem, solution: Solution) -> dict[str, float]:
    """Return the seconds with one part twice as fast, by the name of the part."""
    hardware, processor = problem.hardware, problem.hardware.compute_processor
    flops = {
        dtype: Curve(tuple((rows, 2 * rate) for rows, rate in curve.points))
        for dtype, curve in processor.matmul_flops.items()
    }
    rates = (
        "attention_flops",
        "attention_bytes_s",
        "memory_bytes_s",
        "upcast_elements_s",
        "dequantize_elements_s",
    )
    changed = _scaled(replace(processor, matmul_flops=flops), *rates)
    is_gpu = problem.compute_tier == "gpu"
    machines = {
        "GPU" if is_gpu else "processor": (
            replace(hardware, gpu=changed) if is_gpu else replace(hardware, cpu=changed)
        ),
        "disk": replace(hardware, disk=_scaled(hardware.disk, "read_bytes_s", "write_bytes_s")),
    }
    if hardware.link is not None:
        link_rates = (name for name in asdict(hardware.link) if name.endswith("bytes_s"))
        machines["link"] = replace(hardware, link=_scaled(hardware.link, *link_rates))
    return {
        part: predict(
            replace(problem, hardware=machine), solution.policy, solution.schedule
        ).latency_s
        for part, machine in machines.items()
    }


def _scaled(record: _Record, *names: str) -> _Record:
    return replace(record, **{name: 2 * getattr(record, name) for name in names})  # type: ignore[type-var]


# How long a suite of run entries takes: each scenario alone, and all together as one run.

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
    saved_tokens, scored_tokens: of the workload.
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
class Expectation:
    """Seconds that a workload is predicted to take, and the range to expect."""

    seconds: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "range": [self.low, self.high]}


@dataclass(frozen=True)
class ScenarioPlan:
    """The entries of one scenario, which share nothing with each other, and what they take without
    the other ones.
    """

    entries: Sequence[EntryWorkload]
    made: Plan
    alone: Expectation

    @property
    def expected(self) -> Workload:
        return self.made.problem.workload

    @property
    def limit(self) -> Workload:
        return suite_workload(self.entries, math.inf)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.entries[0].scenario,
            "entries": [entry.entry for entry in self.entries],
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
    by_precision: the plan in each precision that users choose between, None where nothing fits;
        empty where a precision was asked for.
    """

    scenarios: Sequence[ScenarioPlan]
    made: Plan
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
        return Expectation(*map(min, astuple(self.as_one), astuple(self.one_by_one)))

    @property
    def entries(self) -> list[EntryWorkload]:
        return [entry for scenario in self.scenarios for entry in scenario.entries]

    def sample_s(self, share: float, factor: float = 1.0) -> float:
        """Return the seconds of one run of a share of the sequences; factor: of their answers."""
        return _seconds(self.made, suite_workload(self.entries, factor).part(share))

    @property
    def limit_s(self) -> float:
        """Seconds of the better way if every answer had all tokens that it may have."""
        if self.is_one_run:
            return _seconds(self.made, suite_workload(self.entries, math.inf))
        return sum(_seconds(scenario.made, scenario.limit) for scenario in self.scenarios)

    def to_json(self) -> dict[str, Any]:
        """Return seconds and tokens as docs/explanation/planning.md describes them."""
        return {
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
            "total": {**self.expected.to_json(), "seconds_at_limit": self.limit_s},
            "as_one_run": self.as_one.to_json(),
            "one_by_one": self.one_by_one.to_json(),
            "precisions": {
                name: found and found.expected.to_json()
                for name, found in self.by_precision.items()
            },
            "plan": self.made.to_json(),
        }


def plan_suite(
    problem: PlanningProblem, entries: Sequence[EntryWorkload], compare: bool = False
) -> SuitePlan:
    """Search the plan of all entries as one run, and of each scenario alone.

    problem: with any workload.
    compare: in other precisions, too.

    Raises `MemoryLimitError` where nothing fits.
    """
    made = make_plan(replace(problem, workload=suite_workload(entries), endless=False))
    planned = _suite_plan(made, entries)
    by_precision: dict[str, SuitePlan | None] = {}
    for name, found in search_precisions(made, None, None).items() if compare else ():
        by_precision[name] = (
            planned if found is made else _suite_plan(found, entries) if found else None
        )
    return replace(planned, by_precision=by_precision)


def _suite_plan(made: Plan, entries: Sequence[EntryWorkload]) -> SuitePlan:
    by_scenario: dict[str, list[EntryWorkload]] = {}
    for entry in entries:
        by_scenario.setdefault(entry.scenario, []).append(entry)
    scenarios = []
    for of_scenario in by_scenario.values():
        problem = replace(made.problem, workload=suite_workload(of_scenario))
        alone = made if len(by_scenario) == 1 else Plan(problem, search(problem, AUTOMATIC))
        scenarios.append(ScenarioPlan(of_scenario, alone, _expectation(alone, of_scenario)))
    return SuitePlan(scenarios, made, _expectation(made, entries))


def _expectation(made: Plan, entries: Sequence[EntryWorkload]) -> Expectation:
    shortest = _seconds(made, suite_workload(entries, 1 / ANSWER_FACTOR))
    longest = _seconds(made, suite_workload(entries, ANSWER_FACTOR))
    low, high = made.spread.of_time(shortest)[0], made.spread.of_time(longest)[1]
    return Expectation(made.solution.prediction.latency_s, low, high)


def _seconds(made: Plan, workload: Workload) -> float:
    """Return the seconds of other lengths with the policy of a plan, in smaller batches if they do
    not fit.

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


def suite_workload(entries: Sequence[EntryWorkload], factor: float = 1.0) -> Workload:
    """Return all sequences of entries; factor: their answers' tokens by those of the right ones."""
    lengths = [
        (prompt, max(1, round(min(most, factor * answer))))
        for entry in entries
        for prompt, answer, most in entry.lengths
    ]
    saved = sum(entry.saved_tokens for entry in entries)
    return Workload.of(lengths, saved, sum(entry.scored_tokens for entry in entries))
