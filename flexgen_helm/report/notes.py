"""Notes on runs that are shown together: what a reader of their scores must know."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_helm.report.pools import overlap_notes, pool_by_scenario
from flexgen_helm.report.scores import RunScores, grouped
from flexgen_helm.report.verdicts import first_names

# Packages whose releases compute a run's values.
_COMPUTING = ("flexgen-helm", "torch", "transformers")


def run_notes(runs: Sequence[RunScores]) -> list[str]:
    """Return all notes, without full stops, on runs that are shown together."""
    return [*reused_notes(runs), *overlap_notes(runs), *prompt_notes(runs), *trust_notes(runs)]


def reused_notes(runs: Sequence[RunScores]) -> list[str]:
    """Return a note, without full stop, on throughputs that earlier runs measured, if any."""
    reused, answers = sum(run.num_reused for run in runs), sum(run.num_answers for run in runs)
    note = (
        f"{reused:,} of {answers:,} answers come from earlier runs; tokens/s marked * were "
        "measured then (--disable-cache measures again)"
    )
    return [note] if reused else []


def prompt_notes(runs: Sequence[RunScores]) -> list[str]:
    """Return notes, without full stops, on prompts that differ between models, and on answers
    without room.
    """
    notes = []
    by_prompts = grouped((run for run in runs if run.prompts), lambda run: run.prompts)
    if len(by_prompts) > 1:
        models = {
            prompts: ", ".join(dict.fromkeys(run.typed_model for run in group))
            for prompts, group in by_prompts.items()
        }
        differences = "; ".join(f"{names} {prompts}" for prompts, names in models.items())
        notes.append(f"Models differ in how prompts were sent: {differences}")
    for run in pool_by_scenario(runs):
        of_entry = (
            f"of {run.workload.get('num_requests', run.num_answers):,} answers of {run.entry} of "
            f"{run.typed_model}"
        )
        if unfinished := run.record.get("unfinished_thinking"):
            notes.append(
                f"{unfinished:,} {of_entry} ended while still thinking, and count as empty; raise "
                "max_tokens (run entries: increase_max_tokens=2048) or set a thinking budget "
                "(--thinking-budget)"
            )
        if clipped := run.record.get("num_clipped"):
            notes.append(
                f"{clipped:,} {of_entry} had less room in the model's window than max_tokens"
            )
        if ties := run.num_ties:
            notes.append(
                f"{ties:,} of {len(run.instances):,} choices of {run.entry} of {run.typed_model} "
                "are ties of a right and a wrong one, of which HELM counts a share as right"
            )
    return notes


def trust_notes(runs: Sequence[RunScores]) -> list[str]:
    """Return notes, without full stops, on samples, on models that are not proved, and on runs of
    several releases.
    """
    notes = []
    sampled = {
        (part.entry, sample["instances"]): sample
        for run in runs
        for part in run.parts or [run]
        if (sample := part.record.get("sample"))
    }
    if sampled:
        parts = [
            f"{sample['instances']:,} of {sample['of']:,} of {entry}"
            for (entry, _), sample in sampled.items()
        ]
        notes.append(
            f"Random samples of the instances: {first_names(parts)}; run without --until scores all"
        )
    if (level_share := min((run.level_share for run in runs), default=1.0)) < 1:
        notes.append(
            f"Samples grew until pairs were decided: p-values are divided by {level_share:.3g}, "
            "what the last look may spend of the level; intervals are not wider for it"
        )
    if unproved := list(
        dict.fromkeys(run.typed_model for run in runs if run.record.get("proved") is False)
    ):
        notes.append(
            f"NOT VERIFIED: {', '.join(unproved)} ran with --unverified; nothing says that the "
            "scores are those of transformers"
        )
    for package in _COMPUTING:
        releases = {
            str(run.record["versions"][package])
            for run in runs
            if package in run.record.get("versions", {})
        }
        if len(releases) > 1:
            notes.append(f"Runs had different releases of {package}: {', '.join(sorted(releases))}")
    return notes
