"""The random sample that a suite with an end is scored on: its instances, and how it grows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from helm.benchmark.adaptation.scenario_state import ScenarioState

from flexgen_helm.errors import UsageError
from flexgen_helm.plugin.sample_blocks import (
    LOOKS,
    SEED,
    joining_shares,
    largest_sample,
    possible_shares,
)
from flexgen_helm.plugin.submission import Submission
from flexgen_helm.plugin.usage import HelmRun
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.scores import entry_of
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import SubmittedBlock


class ComputedPart(NamedTuple):
    """Requests that were computed together.

    load_s: seconds that the first model took to load.
    blocks: one per run.
    """

    load_s: float
    blocks: Sequence[SubmittedBlock]

    @property
    def is_measured(self) -> bool:
        """Whether most answers were computed, not stored before."""
        responses = [response for block in self.blocks for response in block.responses().values()]
        return 2 * sum(response.is_cached for response in responses) < len(responses)


class SuiteSample:
    """The part of a suite's instances that is scored; all of them unless `compute` is called.

    until, margin: as of `run_suite`; `compute` is given how much of that is left for it.
    share: of the instances of each run that the sample has.
    growth: of the share since pairs were last looked at, which is the part of the level that the
        look may spend (`level_share`); None without a margin.
    """

    def __init__(self, until: float | None, margin: float | None) -> None:
        self.until, self.margin = until, margin
        self.share = 1.0
        self.growth: float | None = None
        # run -> `joining_shares`
        self._share_of_instance: dict[str, dict[str, float]] = {}

    def compute(
        self,
        submissions: Mapping[str, Submission],
        until: float,
        compute_part: Callable[[Mapping[str, Submission], float], ComputedPart],
        is_decided: Callable[[], bool],
    ) -> float:
        """Compute as large a sample as `until` allows; return the seconds that the first model took
        to load.

        is_decided: with a margin: whether the sample so far decides all pairs.
        Raises `UsageError` if no block ends in time.
        """
        for name, submission in submissions.items():
            self._share_of_instance[name] = joining_shares(entry_of(name), submission.instances)
        load_s, self.share, has_ended = 0.0, 0.0, False

        def grow(old_share: float, new_share: float) -> float | None:
            nonlocal load_s, has_ended
            requests, began = self._between(submissions, old_share, new_share), time.monotonic()
            # To give up a later block would leave out those with long answers.
            part = compute_part(requests, math.inf if old_share else until)
            seconds = time.monotonic() - began - part.load_s
            load_s = load_s or part.load_s
            self.share = new_share
            if self.margin is not None:
                self.growth = new_share - old_share
                has_ended = new_share < 1 and is_decided()
            return seconds if part.is_measured else None

        joining = [
            self._share_of_instance[name][key]
            for name, submission in submissions.items()
            for key, _ in submission.instances
        ]
        most_instances = max(map(len, self._share_of_instance.values()), default=1)
        shares = possible_shares(most_instances) if self.margin is None else LOOKS
        largest_sample(
            joining,
            shares,
            lambda: 0.0 if has_ended else until - time.time(),
            grow,  # None: not measured
            self.margin is not None,
        )
        if not self.share:
            raise UsageError(
                "the time was too short for one instance of each run entry; finished answers are "
                "stored, and the same command with a later time goes on"
            )
        return load_s

    def _between(
        self, submissions: Mapping[str, Submission], old_share: float, new_share: float
    ) -> dict[str, Submission]:
        """Return the requests that take the sample from one share to another."""
        return {
            name: submission._replace(
                requests=[
                    request
                    for request, (key, _) in zip(submission.requests, submission.instances)
                    if old_share <= self._share_of_instance[name][key] < new_share
                ]
            )
            for name, submission in submissions.items()
        }

    def of_run(self, run: HelmRun, scenario_state: ScenarioState) -> ScenarioState:
        """Return the part of a run that is scored, and record it."""
        shares = self._share_of_instance.get(run.name, {})
        run.level_share = self.growth
        chosen = {key for key, share in shares.items() if share < self.share}
        if len(chosen) == len(shares):
            return scenario_state
        run.sample = {"seed": SEED, "instances": len(chosen), "of": len(shares)}
        states = [
            state for state in scenario_state.request_states if str(state.instance.id) in chosen
        ]
        return replace(scenario_state, request_states=states)


def baseline_of(models: Sequence[ModelArguments]) -> str:
    """Return what the others are compared with: fp16, else the first precision; of models in one
    precision the first.
    """
    precisions = [str(model.config.precision) for model in models]
    if len(set(models)) < 2:
        raise UsageError(
            "--until-decided compares precisions or models: give two, for example --precision "
            "fp16,4bit"
        )
    if len(set(precisions)) == 1:
        return models[0].name
    return "fp16" if "fp16" in precisions else precisions[0]


def all_decided(suite: Path, baseline: str, margin: float) -> bool:
    """Whether every pair of the finished runs is decided with this margin."""
    decisions = set()
    with suppress(UsageError):
        pairs = [
            pair
            for model in compare_suite(suite, baseline, margin)
            for precision in model.verdicts
            for pair in model.main_comparisons(precision)
        ]
        decisions = {pair.equivalence.decision for pair in pairs if pair.equivalence is not None}
    return bool(decisions) and decisions <= {"equivalent", "worse", "better"}
