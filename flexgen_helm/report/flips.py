"""Flips: the instances whose score or answer is not that of the baseline, with both answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from flexgen_helm.report.answers import Answer, read_answers
from flexgen_helm.report.comparison import ModelComparison, changed_answers, shared_instances
from flexgen_helm.report.scores import RunScores, precision_rank

Direction = Literal["lost", "won", "changed"]
DIRECTIONS: tuple[Direction, ...] = ("lost", "won", "changed")
_NO_ANSWER = Answer("", (), "", None)


@dataclass(frozen=True)
class Flip:
    """An instance whose score or answer is not that of the baseline.

    direction: the score is lower (lost), higher (won), or the same with another answer (changed).
    prompt, references: as in `Answer`; of several trials, the answers are those of the first.
    folder, baseline_folder: names of the runs' folders.
    """

    model: str
    run: str
    precision: str
    metric: str
    instance: str
    direction: Direction
    baseline_score: float
    score: float
    prompt: str
    references: Sequence[str]
    baseline_answer: str
    answer: str
    baseline_logprob: float | None
    logprob: float | None
    baseline_folder: str
    folder: str


@dataclass(frozen=True)
class FlipGroup:
    """Flips of a model in one precision and one direction, against a baseline.

    count: how many there are; `flips` are the first of them.
    """

    model: str
    precision: str
    baseline: str
    direction: Direction
    count: int
    flips: Sequence[Flip]


@dataclass(frozen=True, eq=False)
class _Pair:
    """Two runs of an entry that are compared, and the metric by which its instances are."""

    base: RunScores
    other: RunScores
    metric: str


def flip_groups(
    models: Sequence[ModelComparison], runs: Sequence[RunScores], baseline: str, most: int | None = None
) -> Iterator[FlipGroup]:
    """Return the flips of each model, precision and direction, of each run entry by its first metric that has any.

    runs: those of the suite. most: flips of a group whose answers are read; None for all.
    """
    by_key = {(run.model, run.entry, run.precision): run for run in runs}
    for model in models:
        pairs: dict[str, dict[str, _Pair]] = {}
        for each in model.comparisons:
            if each.flips is not None:
                base, other = (by_key[model.model, each.run, precision] for precision in (baseline, each.precision))
                pairs.setdefault(each.precision, {}).setdefault(each.run, _Pair(base, other, each.metric))
        for precision in sorted(pairs, key=precision_rank):
            flipped = [(pair, _flipped(pair)) for pair in pairs[precision].values()]
            for direction in DIRECTIONS:
                keys = [(pair, key) for pair, found in flipped for key in found[direction]]
                if keys:
                    flips = list(_with_answers(keys[:most], direction))
                    yield FlipGroup(model.model, precision, baseline, direction, len(keys), flips)


def _flipped(pair: _Pair) -> dict[Direction, list[str]]:
    """Return the ids of the instances that flipped, by direction."""
    shared, _ = shared_instances(pair.base, pair.other)
    before, after = (run.terms[pair.metric].loc[shared, "numerator"].to_numpy() for run in (pair.base, pair.other))
    changed = np.array(changed_answers(pair.base, pair.other, shared) or np.zeros(len(shared)), bool)
    flipped = {"lost": after < before, "won": after > before, "changed": (after == before) & changed}
    return {direction: list(shared[flipped[direction]]) for direction in DIRECTIONS}


def _with_answers(flipped: Sequence[tuple[_Pair, str]], direction: Direction) -> Iterator[Flip]:
    for pair, group in groupby(flipped, key=lambda each: each[0]):
        keys = [key for _, key in group]
        before, after = (read_answers(run, set(keys)) for run in (pair.base, pair.other))
        for key in keys:
            old, new = before.get(key, _NO_ANSWER), after.get(key, _NO_ANSWER)
            scores = [float(run.terms[pair.metric].loc[key, "numerator"]) for run in (pair.base, pair.other)]
            yield Flip(
                model=pair.other.model,
                run=pair.other.entry,
                precision=pair.other.precision,
                metric=pair.metric,
                instance=key,
                direction=direction,
                baseline_score=scores[0],
                score=scores[1],
                prompt=new.prompt or old.prompt,
                references=new.references or old.references,
                baseline_answer=old.text,
                answer=new.text,
                baseline_logprob=old.logprob,
                logprob=new.logprob,
                baseline_folder=pair.base.name,
                folder=pair.other.name,
            )
