"""Flips: instances whose score or answer is not that of the baseline, with their answers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from flexgen_helm.report.answers import Answer, chosen_answer, generated_answer, is_choice
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.run_folder import read_states
from flexgen_helm.report.run_pair import RunPair
from flexgen_helm.report.scores import RunScores, grouped, precision_rank

Direction = Literal["lost", "won", "changed"]
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


def flip_groups(models: Sequence[ModelComparison], most: int = sys.maxsize) -> Iterator[FlipGroup]:
    """Yield the flips of each model, precision and direction, of all metrics.

    An instance is once in a direction, with the first metric that flips it so; it has changed where
    no metric did.

    most: flips of a group whose answers are read.
    """
    for model in models:
        by_precision = grouped(
            (comparison for comparison in model.comparisons if comparison.flips is not None),
            lambda comparison: comparison.precision,
        )
        for precision in sorted(by_precision, key=precision_rank):
            by_entry = grouped(by_precision[precision], lambda comparison: comparison.run)
            pairs = [model.pairs[entry, precision] for entry in by_entry]
            flipped = [
                _flipped_instances(pair, [comparison.metric for comparison in comparisons])
                for pair, comparisons in zip(pairs, by_entry.values())
            ]
            for direction in get_args(Direction):
                flips: list[Flip] = []
                for pair, by_direction in zip(pairs, flipped):
                    if read := dict(islice(by_direction[direction].items(), most - len(flips))):
                        flips += _read_flips(pair, direction, read)
                if total := sum(len(by_direction[direction]) for by_direction in flipped):
                    yield FlipGroup(model.model, precision, model.baseline, direction, total, flips)


def _flipped_instances(pair: RunPair, metrics: Sequence[str]) -> dict[Direction, dict[str, str]]:
    """Return instance -> the first metric that flipped it, by direction.

    metrics: those whose flips are counted, at least one.
    """
    lost: dict[str, str] = {}
    won: dict[str, str] = {}
    for metric in metrics:
        paired = pair.paired(metric)
        for key in pair.shared[paired.scores < paired.baseline]:
            lost.setdefault(key, metric)
        for key in pair.shared[paired.scores > paired.baseline]:
            won.setdefault(key, metric)
    keys = [] if pair.changed is None else pair.shared[pair.changed]
    changed = {key: metrics[0] for key in keys if key not in lost and key not in won}
    return {"lost": lost, "won": won, "changed": changed}


def _read_flips(pair: RunPair, direction: Direction, flipped: Mapping[str, str]) -> list[Flip]:
    """Return flips with their answers; flipped: instance -> metric."""
    base_answers, answers = (read_answers(run, flipped) for run in (pair.base, pair.run))
    flips = []
    for key, metric in flipped.items():
        old, new = base_answers.get(key, _NO_ANSWER), answers.get(key, _NO_ANSWER)
        scores = [float(run.ratios[metric].loc[key, "numerator"]) for run in (pair.base, pair.run)]
        flips.append(
            Flip(
                model=pair.run.model,
                run=pair.run.entry,
                precision=pair.run.label,
                metric=metric,
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
                folder=pair.run.name,
            )
        )
    return flips


def read_answers(run: RunScores, wanted: Collection[str]) -> dict[str, Answer]:
    """Return the answers of the instances `wanted` in the first trial, by id.

    Of choices the answer is the reference that HELM's statistics say was chosen.
    """
    answers: dict[str, Answer] = {}
    chosen = run.instances.get("predicted_index", {}) if is_choice(run.settings) else None
    for state in () if run.folder is None else read_states(run.folder, wanted):
        key, is_first = state["instance"]["id"], state.get("train_trial_index", 0) == 0
        is_original = state.get("request_mode", "original") == "original"
        is_chosen = chosen is None or (
            is_original and state.get("reference_index") == chosen.get(key, -1)
        )
        if is_first and is_chosen and key not in answers:
            answers[key] = generated_answer(state) if chosen is None else chosen_answer(state)
    return answers
