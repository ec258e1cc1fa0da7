"""Two runs of an entry, compared metric by metric over the instances that they share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.report.metrics import metric_named
from flexgen_helm.report.paired import PairedScores
from flexgen_helm.report.run_folder import differing_settings
from flexgen_helm.report.scores import RunScores
from flexgen_helm.report.verdicts import Comparison, Flips, equivalence

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class RunPair:
    """Two runs of an entry, or two pools of runs, that are compared.

    base: in the baseline.
    run: in another precision, or of another model.
    """

    base: RunScores
    run: RunScores

    @cached_property
    def shared(self) -> pd.Index:
        """The instances that both runs have, with the same text under the same id as far as texts
        are known.
        """
        shared = self.base.instances.index.intersection(self.run.instances.index, sort=False)
        base, run = self.base.digests, self.run.digests
        return shared[[base.get(key) == run.get(key) for key in shared]] if base and run else shared

    @property
    def notes(self) -> list[str]:
        """What is not compared, and what differs beside the precision."""
        base, run = self.base, self.run
        with_same_id = base.instances.index.intersection(run.instances.index)
        notes = [
            f"{missing} instances of {side.entry} are in {side.label} only and are left out"
            for side in (base, run)
            if (missing := side.num_scored - len(with_same_id))
        ]
        if unknown := [side.label for side in (base, run) if not side.digests]:
            notes.append(
                f"{base.entry} is paired by ids of instances alone: {' and '.join(unknown)} has no "
                "texts (scenario_state.json) to compare"
            )
        if different := len(with_same_id) - len(self.shared):
            notes.append(
                f"{different:,} of {len(with_same_id):,} instances of {base.entry} ask something "
                f"else in {run.label} than in {base.label} under the same id and are left out: the "
                "data has changed between the runs"
            )
        joint = f" in {base.label} and "
        if (
            base.settings
            and run.settings
            and (differing := differing_settings(base.settings, run.settings, joint))
        ):
            notes.append(
                f"{base.entry} has other settings in {run.label}: {differing} in {run.label}"
            )
        origins = base.record.get("origin"), run.record.get("origin")
        if base.model == run.model and None not in origins and origins[0] != origins[1]:
            notes.append(
                f"{base.typed_model} means {origins[0]} in {base.label} and {origins[1]} in "
                f"{run.label}, so the difference is not that of the precision alone"
            )
        if base.prompts and run.prompts and base.prompts != run.prompts:
            notes.append(
                f"Prompts were sent {base.prompts} in {base.label} and {run.prompts} in {run.label}"
            )
        return notes

    @cached_property
    def changed(self) -> NDArray[np.bool_] | None:
        """Which of the shared instances have another answer; None if the answers are not known."""
        base, run = self.base.answers, self.run.answers
        if not all(key in base and key in run for key in self.shared):
            return None
        return np.array([base[key] != run[key] for key in self.shared], bool)

    def paired(self, metric: str) -> PairedScores:
        """Return the numerators of a metric in both runs, over the shared instances."""
        (base, weights), (scores, _) = (
            side.ratios[metric].loc[self.shared].to_numpy().T for side in (self.base, self.run)
        )
        return PairedScores(metric_named(metric), base, scores, weights)

    def comparisons(self, margin: float, notes: list[str]) -> list[Comparison]:
        """Compare the metrics that both have; notes: gets one on each that cannot be compared."""
        comparisons = []
        for metric in self.base.scores:
            if metric in self.run.scores:
                if comparison := self._compare(metric, margin):
                    comparisons.append(comparison)
                else:
                    notes.append(
                        f"{metric} of {self.base.entry} in {self.run.label} is left out, because "
                        f"{self.base.label} has other instances and it cannot be computed over the "
                        "shared ones alone"
                    )
        return comparisons

    def _compare(self, name: str, margin: float) -> Comparison | None:
        """Compare one metric over the shared instances.

        None if it cannot be computed over them alone: the recorded scores are over others, too.
        """
        base, run, num_shared = self.base, self.run, len(self.shared)
        values = base.scores[name], run.scores[name]
        interval = p_value = flips = verdict = None
        has_pairs = bool(name in base.ratios and name in run.ratios and num_shared)
        if has_pairs:  # of one tokenizer: numbers of tokens and bytes may differ by a few
            counts = [side.ratios[name].loc[self.shared, "denominator"] for side in (base, run)]
            has_pairs = np.allclose(counts[0], counts[1], rtol=0.01)
        if has_pairs:
            paired = self.paired(name)
            values = paired.values
            if np.isfinite(paired.baseline).all() and np.isfinite(paired.scores).all():
                interval, p_value = paired.interval(), paired.p_value()
                level_share = min(base.level_share, run.level_share)
                if p_value is not None:
                    p_value = min(1.0, p_value / level_share)
                verdict = equivalence(paired, margin, base.data_size, level_share)
                if paired.are_in_unit_interval:
                    same_score, changed = paired.unchanged, self.changed
                    num_changed = None if changed is None else int((same_score & changed).sum())
                    flips = Flips(paired.lost, paired.won, num_changed)
        elif not num_shared == base.num_scored == run.num_scored:
            return None
        metric = metric_named(name)
        with np.errstate(all="ignore"):
            change = float(metric.change_between(values[1], values[0]))
        return Comparison(
            base.entry,
            name,
            run.label,
            num_shared,
            *values,
            metric.change,
            change,
            interval,
            p_value,
            flips,
            verdict,
        )
