"""Which precision to take: the cheapest equivalent one, chosen on a half of the instances, confirmed on the other one.

Whatever the first half chooses, it is one precision, and the second half is independent of it. So the confirmation is
a single test at 5 %. 'Equivalent on every run entry' needs no correction: an intersection-union test (Berger,
Technometrics 24 (1982), 295-300). The choice of a hypothesis on a part of the data and its test on the rest is Cox's
(Biometrika 62 (1975), 441-444).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import ModelComparison, judged_comparisons, pools_between, shared_instances
from flexgen_helm.report.metrics import Vector, metric_named
from flexgen_helm.report.paired import paired_test
from flexgen_helm.report.run_files import is_in_second_half
from flexgen_helm.report.scores import RunScores, precision_rank
from flexgen_helm.report.verdicts import Equivalence, equivalence, first_names, two_digits

Cost = Literal["time", "memory"]
# With which a precision without a difference is chosen and confirmed, over all run entries and both halves.
_POWER = 0.8
_PLAIN_BYTES, _FLOAT32_BYTES = 2, 4


@dataclass(frozen=True, eq=False)
class PairedEntry:
    """A metric of a run entry, or of a pool of them, in the baseline and in another precision.

    baseline, other, weights: [instances] numerators of both, denominators.
    is_second: [instances] whether an instance is in the half that confirms.
    has_all: the data set has no more instances.
    """

    entry: str
    metric: str
    baseline: Vector
    other: Vector
    weights: Vector
    is_second: NDArray[np.bool_]
    has_all: bool = False

    def judge(self, second: bool, margin: float, power: float) -> Equivalence | None:
        """Judge one half; None if it has fewer than two instances."""
        taken = self.is_second == second
        ours, theirs, weights = self.baseline[taken], self.other[taken], self.weights[taken]
        if len(ours) < 2 or not weights.sum() > 0:
            return None
        test = paired_test(ours, theirs)
        return equivalence(metric_named(self.metric), ours, theirs, weights, test, margin, power=power)


@dataclass(frozen=True)
class HalfVerdict:
    """A precision on one half of the instances.

    instances: over all run entries. is_equivalent: on every run entry, each by two one-sided tests at 5 %.
    needed: instances of a run entry, in both halves, that would decide; None if it is decided, or if that is not known.
    text: the verdict in words.
    """

    instances: int
    is_equivalent: bool
    needed: int | None
    text: str


@dataclass(frozen=True)
class Candidate:
    """A precision and its costs.

    seconds_per_token: over the run entries that all candidates have; None if it is not known.
    weight_bytes, cache_bytes: of a weight of the layers, and of an element of the KV cache, with scales.
    first, second: verdicts on the halves; None if they were not needed.
    """

    precision: str
    seconds_per_token: float | None
    weight_bytes: float
    cache_bytes: float
    first: HalfVerdict | None = None
    second: HalfVerdict | None = None

    def cost(self, by: Cost) -> tuple[float, ...]:
        if by == "memory":
            return self.weight_bytes, self.cache_bytes
        return (np.inf if self.seconds_per_token is None else self.seconds_per_token,)


@dataclass(frozen=True)
class Choice:
    """The precision to take.

    precision: the cheapest one that is equivalent to the baseline, else the baseline.
    is_confirmed: the second half confirms it; False for the baseline, which needs no test.
    candidates: the baseline and the others, the cheapest first.
    text: a sentence that says why. command: with which to go on.
    """

    precision: str
    by: Cost
    margin: float
    is_confirmed: bool
    candidates: Sequence[Candidate]
    text: str
    command: str


def choose_precisions(
    models: Sequence[ModelComparison], runs: Sequence[RunScores], baseline: str, margin: float, by: Cost = "time"
) -> dict[str, Choice]:
    """Choose a precision for each model, by name; raises the first one's `UsageError` if no model has a choice."""
    choices, errors = {}, []
    for model in models:
        try:
            choices[model.model] = choose_precision(model, runs, baseline, margin, by)
        except UsageError as error:
            errors.append(error)
    if not choices:
        raise errors[0]
    return choices


def choose_precision(
    model: ModelComparison, runs: Sequence[RunScores], baseline: str, margin: float, by: Cost = "time"
) -> Choice:
    """Choose among the precisions of a model; runs: those of the suite.

    Raises `UsageError` if none can be judged, or if the time of the baseline is not known.
    """
    own = [run for run in runs if run.model == model.model and run.num_scored]
    entries_of: dict[str, set[str]] = {}
    for each in model.comparisons:
        entries_of.setdefault(each.precision, set()).add(each.run)
    every = set().union(*entries_of.values())
    pairs = {
        precision: _paired_entries(model, own, baseline, precision)
        for precision in sorted(entries_of, key=precision_rank)
        if entries_of[precision] == every and precision in PRECISIONS
    }
    pairs = {precision: entries for precision, entries in pairs.items() if entries}
    if not pairs:
        raise UsageError(
            f"no precision of flexgen/{model.model} can be chosen: none has all {len(every):,} run entries with a "
            "verdict; run the same entries in each precision, with two or more instances and a metric such as "
            "exact_match"
        )
    base, *others = (_costs(own, every, precision) for precision in (baseline, *pairs))
    if by == "time" and base.seconds_per_token is None:
        raise UsageError(
            f"the time of flexgen/{model.model} in {baseline} is not known, because its runs' flexgen_run.json has "
            "none; take --by memory"
        )
    others.sort(key=lambda each: each.cost(by))  # equal ones stay in the order of `PRECISIONS`
    cheaper = [each for each in others if each.cost(by) < base.cost(by)]
    first, second = select({each.precision: pairs[each.precision] for each in cheaper}, margin)
    chosen = list(first)[-1] if second is not None else None
    judged = {
        each.precision: replace(
            each, first=first.get(each.precision), second=second if each.precision == chosen else None
        )
        for each in (*others, base)
    }
    candidates = sorted(judged.values(), key=lambda each: each.cost(by))
    is_confirmed = second is not None and second.is_equivalent
    taken = chosen if chosen is not None and is_confirmed else baseline
    text = _sentence(judged, chosen, baseline, by, margin, len(next(iter(pairs.values()))))
    if by == "time" and _is_resident(own, baseline):
        text += f"; {baseline} ran with all weights in the fastest memory, so this is not the time when offloaded"
    timeless = [each.precision for each in others if each.seconds_per_token is None]
    if by == "time" and timeless:
        text += f"; {', '.join(timeless)} cannot be chosen by time, because it is not known (flexgen_run.json has none)"
    left_out = [name for name in entries_of if name not in pairs]
    if left_out:
        text += f"; {', '.join(left_out)} cannot be chosen, because not all {len(every):,} run entries were judged"
    command = f"flexgen-helm run -r ENTRY:model=flexgen/{model.model} -m N --precision {taken}"
    return Choice(taken, by, margin, is_confirmed, candidates, text, command)


def select(
    ordered: Mapping[str, Sequence[PairedEntry]], margin: float
) -> tuple[dict[str, HalfVerdict], HalfVerdict | None]:
    """Return verdicts on the first half, up to that of the first equivalent precision, and its own on the second one.

    ordered: precisions, the cheapest first. The second verdict is None if none is equivalent on the first half.
    A precision that is not confirmed has no successor: that would be a second test on the same half.
    """
    first: dict[str, HalfVerdict] = {}
    for precision, entries in ordered.items():
        first[precision] = judge_half(entries, False, margin)
        if first[precision].is_equivalent:
            return first, judge_half(entries, True, margin)
    return first, None


def judge_half(entries: Sequence[PairedEntry], second: bool, margin: float) -> HalfVerdict:
    """Judge all run entries of a precision on one half.

    `needed` instances show equivalence of every entry, on both halves, in 80 % of cases if there is no difference: each
    of the 2 k tests of k entries has a power of 0.8^(1 / 2k).
    """
    power = _POWER ** (1 / (2 * len(entries)))
    verdicts = [(each, each.judge(second, margin, power)) for each in entries]
    instances = sum(int((each.is_second == second).sum()) for each in entries)
    within = f"{100 * margin:g} % or pp"
    if all(verdict is not None and verdict.decision == "equivalent" for _, verdict in verdicts):
        return HalfVerdict(instances, True, None, f"equivalent within {within}")
    different = [
        (each.entry, v.decision) for each, v in verdicts if v is not None and v.decision in ("worse", "better")
    ]
    if different:
        texts = [
            f"{decision} in {first_names([entry for entry, found in different if found == decision])}"
            for decision in ("worse", "better")
            if decision in dict(different).values()
        ]
        return HalfVerdict(instances, False, None, " and ".join(texts))
    few = [each.entry for each, verdict in verdicts if verdict is None]
    if few:
        return HalfVerdict(instances, False, None, f"not decided: too few instances of {first_names(few)}")
    open_ = [(2 * v.needed, each) for each, v in verdicts if v is not None and v.needed is not None]
    needed = max(number for number, _ in open_)
    lacking = [each for number, each in open_ if number > len(each.baseline)]
    if not lacking:
        text = f"not decided: the difference is too near to {within}"
    else:
        text = f"not decided: about {two_digits(needed):,} instances of a run entry would decide"
        small = [each.entry for each in lacking if each.has_all]
        text += f", and the data of {first_names(small)} has fewer" if small else ""
    return HalfVerdict(instances, False, needed, text)


def _paired_entries(
    model: ModelComparison, runs: Sequence[RunScores], baseline: str, precision: str
) -> list[PairedEntry]:
    """Return what a precision is judged by, instance by instance. Raises `UsageError` where the texts are not known."""
    pools = [run for pair in pools_between(runs, baseline, precision) for run in pair]
    by_key = {(run.entry, run.precision): run for run in (*runs, *pools)}
    entries = []
    for each in judged_comparisons(model.comparisons, model.pooled, precision):
        base, other = by_key[each.run, baseline], by_key[each.run, precision]
        shared, _ = shared_instances(base, other)
        if not all(key in base.digests for key in shared):
            raise UsageError(
                f"{each.run} of flexgen/{model.model} in {baseline} has no texts of its instances "
                "(scenario_state.json), by which --choose halves them; run it again"
            )
        (ours, weights), (theirs, _) = (run.terms[each.metric].loc[shared].to_numpy().T for run in (base, other))
        is_second = np.array([is_in_second_half(base.digests[key]) for key in shared], bool)
        has_all = base.has_all_instances and len(shared) == base.num_scored
        entries.append(PairedEntry(each.run, each.metric, ours, theirs, weights, is_second, has_all))
    return entries


def _costs(runs: Iterable[RunScores], entries: set[str], precision: str) -> Candidate:
    own = [run for run in runs if run.precision == precision and run.entry in entries]
    tokens, seconds = sum(run.num_tokens for run in own), sum(run.latency_s for run in own)
    is_known = tokens > 0 and all(run.latency_s > 0 for run in own)
    format_ = PRECISIONS[precision]
    weights, cache = format_.weights, format_.cache
    dtypes = [run.run.get("hardware", {}).get("compute_dtype") for run in own]
    # A cache that is not quantized has the compute type.
    plain = _FLOAT32_BYTES if "float32" in dtypes else _PLAIN_BYTES
    return Candidate(
        precision,
        seconds / tokens if is_known else None,
        _PLAIN_BYTES if weights is None else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
        plain if cache is None else cache.bytes_per_value(plain),
    )


def _is_resident(runs: Iterable[RunScores], precision: str) -> bool:
    """Whether all weights were where they are computed with, as far as records say where they were."""
    shares = []
    for run in runs:
        placement, hardware = run.run.get("achieved_placement"), run.run.get("hardware")
        if run.precision == precision and placement and hardware:
            shares.append(placement.get("weights", {}).get("cpu" if hardware["device"] == "cpu" else "gpu", 0.0))
    return bool(shares) and min(shares) >= 1


def _sentence(
    candidates: Mapping[str, Candidate], chosen: str | None, baseline: str, by: Cost, margin: float, num_entries: int
) -> str:
    """Say which precision to take, and why."""
    base = candidates[baseline]
    if chosen is not None:
        own = candidates[chosen]
        assert own.first is not None and own.second is not None
        if own.second.is_equivalent:
            total = f"{num_entries:,} run {'entry' if num_entries == 1 else 'entries'}"
            return (
                f"take {chosen}: it is the cheapest by {by} ({_ratio(own, base, by)}) that is equivalent to {baseline} "
                f"within {100 * margin:g} % or pp in {total}, chosen on {own.first.instances:,} instances and "
                f"confirmed on {own.second.instances:,} others"
            )
        return (
            f"stay with {baseline}: {chosen} was chosen on {own.first.instances:,} instances, but "
            f"{own.second.instances:,} others do not confirm it ({own.second.text})"
        )
    judged = [each for each in candidates.values() if each.first is not None]
    if not judged:
        return f"stay with {baseline}: no other precision is cheaper by {by}"
    halves = max(each.first.instances for each in judged if each.first)
    reasons = "; ".join(f"{each.precision}: {each.first.text}" for each in judged if each.first)
    return f"stay with {baseline}: no cheaper precision is equivalent on the half that chooses, of {halves:,} " + (
        f"instances ({reasons})"
    )


def _ratio(own: Candidate, base: Candidate, by: Cost) -> str:
    if by == "time" and own.seconds_per_token and base.seconds_per_token:
        return f"{own.seconds_per_token / base.seconds_per_token:.2f} of {base.precision}'s seconds per token"
    return (
        f"{own.weight_bytes:.2f} bytes per weight and {own.cache_bytes:.2f} per element of the KV cache, "
        f"{base.precision} has {base.weight_bytes:.2f} and {base.cache_bytes:.2f}"
    )
