"""Pages of commands: tables and notes, as text or one HTML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from flexgen_helm.report import tables
from flexgen_helm.report.choice import next_steps_of
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.comparison_tables import comparison_tables, interval_scales, summary_table
from flexgen_helm.report.flips import FlipGroup, flip_groups
from flexgen_helm.report.notes import run_notes
from flexgen_helm.report.pools import pool_by_scenario
from flexgen_helm.report.scores import RunScores, grouped, precision_rank
from flexgen_helm.report.speeds import total_speeds
from flexgen_helm.report.suite import SuiteReport
from flexgen_helm.report.tables import Table
from flexgen_helm.terminal import fill
from flexgen_helm.tiers import TIER_PLACES
from flexgen_helm.units import count, size

REPORT_FILE, COMPARE_FILE = "flexgen_report.html", "flexgen_compare.html"
# Columns of a terminal that text is made for.
TEXT_WIDTH = 100
# A longer table is collapsed if the page has a shorter one above it.
_MAX_ROWS = 30

_SCORES_NOTE = (
    "HELM scores one split of the instances only (test, else valid); ± is one standard error"
)
_POOLED_NOTE = (
    "A row such as 'mmlu (57 runs)' is over all instances of these runs, so larger runs count more"
)
_COMPUTED_NOTE = "Fewer prompt tokens are computed than asked for where prompts share a prefix"
_USAGE_NOTE = (
    "The roofline is the time of the same operations at the rate of this machine's fastest matrix "
    "product. Times are of what this suite computed itself"
)
# Flips of a direction that a page shows, and characters of their texts: a thousand must open
# quickly.
_MAX_FLIPS, _MAX_CHARACTERS = 1000, 2000
_FLIP_TITLES = {
    "lost": "lost: the score fell",
    "won": "won: the score rose",
    "changed": "with another answer and the same score",
}
_COMPARISON_LEGEND = (
    "Changes are on the same n instances: pp are percentage points, × is a ratio, the others are "
    "differences of the metric. Flips are instances whose score fell : rose : stayed with another "
    "answer. Equivalent: the 90 % interval lies within the margin. Worse, better: the 95 % "
    "interval does not reach 'no change'. Verdicts and p, which is of 'no change', are corrected "
    "for all that this page compares (Hochberg), so in at most 5 % of such pages one is wrong; the "
    "intervals shown are of 95 % each. Tokens/s are of whole runs, whatever instances they share, "
    "in the memory that they had."
)


@dataclass(frozen=True)
class Section:
    """A part of a page; notes: sentences without their full stops."""

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A page.

    legend: how to read the tables.
    facts: what was run, on which machine, and when.
    headline: what it says in short, above all else. next_steps: what to do then.
    notes: sentences, without full stops, about what is missing.
    links: title -> file in the same folder.
    flips: instances whose answers changed; HTML alone shows them.
    """

    title: str
    legend: str
    sections: Sequence[Section]
    facts: Mapping[str, str]
    notes: Sequence[str] = ()
    links: Mapping[str, str] | None = None
    flips: Sequence[FlipGroup] = ()
    headline: Sequence[str] = ()
    next_steps: Sequence[str] = ()

    def to_text(self, width: int = TEXT_WIDTH) -> str:
        """Return tables of at most `width` columns, and notes."""

        def lines(texts: Iterable[str]) -> str:
            return "\n".join(fill(text, width) for text in texts)

        parts = [
            lines([self.title, *self.headline]),
            lines(f"Next: {step}" for step in self.next_steps),
            lines(f"{label}: {fact}" for label, fact in self.facts.items()),
            lines(f"- {note}." for note in self.notes),
        ]
        for section in self.sections:
            parts.append(
                f"{section.title}\n{'=' * len(section.title)}" if len(self.sections) > 1 else ""
            )
            for table in section.tables:
                text = tables.table_to_text(table, width)
                parts.append(f"{table.title}\n{text}" if table.title else text)
            parts.append(lines(f"- {note}." for note in section.notes))
        parts.append(fill(self.legend, width))
        return "\n\n".join(filter(None, parts)) + "\n"

    def to_html(self, folder: Path | None = None, *, beside: Collection[str] = ()) -> str:
        """Return one HTML file that needs no other, and no script.

        It links to those of `links` that `folder` has, or that are written `beside` it.
        """
        from jinja2 import Environment, PackageLoader
        from markupsafe import Markup, escape

        def breakable(text: str) -> Markup:
            """Let names break after a comma, a colon, an underscore or a slash instead of within a
            word.
            """
            return Markup("<wbr>").join(
                escape(part) for part in re.split(r"(?<=[,:_/])(?!\d)", text)
            )

        links = {
            title: file
            for title, file in (self.links or {}).items()
            if file in beside or (folder and (folder / file).exists())
        }
        environment = Environment(
            loader=PackageLoader("flexgen_helm.report"), autoescape=True, trim_blocks=True
        )
        environment.filters |= {"breakable": breakable, "shortened": _shortened, "quoted": quote}
        page = replace(self, links=links)
        return environment.get_template("page.html").render(
            page=page,
            flip_titles=_FLIP_TITLES,
            several_models=len({group.model for group in self.flips}) > 1,
        )


def scores_page(folder: Path, runs: Sequence[RunScores]) -> Page:
    """Build what `run` prints at its end: the scores of `runs`, which are in the suite's
    `folder`.
    """
    section = _scores_section(runs)
    # The last lines are those that a terminal shows: scenarios come after their runs.
    section = replace(
        section, tables=section.tables[::-1], notes=[*section.notes, *run_notes(runs)]
    )
    title = f"{count(len(runs), 'run')} in {folder}: scores{_of_model(runs)}"
    return Page(title, legend="", sections=[section], facts={})


def suite_page(report: SuiteReport) -> Page:
    """Build the page of `flexgen-helm report`."""
    sections = [
        _scores_section(report.runs),
        Section(
            "Throughput", _tables_by_level(report.runs, tables.throughput_table), [_COMPUTED_NOTE]
        ),
    ]
    for name, table in tables.usage_tables(report.models).items():
        sections.append(Section(f"Time and memory of flexgen/{name}", [table], [_USAGE_NOTE]))
    return Page(
        f"Suite {report.suite}",
        legend="",
        sections=sections,
        facts=_run_facts(report.runs),
        notes=report.notes,
        links={"Precisions compared": COMPARE_FILE},
    )


def comparison_page(models: Sequence[ModelComparison], suite: str) -> Page:
    """Build the page of `flexgen-helm compare`."""
    scales = interval_scales(
        comparison for model in models for comparison in (*model.comparisons, *model.pooled)
    )
    sections, verdicts, next_steps = [], [], []
    for model in models:
        name, has_several = f"flexgen/{model.model}", len(models) > 1
        title = f"Models against {name}" if model.kind == "model" else name
        sections.append(_comparison_section(title, model, scales))
        verdicts += [f"{name} {text}" if has_several else text for text in _verdicts(model)]
        next_steps += [f"{name}: {step}" if has_several else step for step in next_steps_of(model)]
    facts = {"baseline": _distinct(model.baseline_run.at_rest for model in models)}
    return Page(
        f"{suite}: {models[0].baseline} and other {models[0].kind}s",
        _COMPARISON_LEGEND,
        sections,
        facts | _run_facts([run for model in models for run in model.runs]),
        links={"Report of the suite": REPORT_FILE},
        flips=list(flip_groups(models, _MAX_FLIPS)),
        headline=verdicts,
        next_steps=list(dict.fromkeys(next_steps)),
    )


def _of_model(runs: Sequence[RunScores]) -> str:
    models = {run.typed_model for run in runs}
    return f" of {models.pop()}" if len(models) == 1 else ""


def _scores_section(runs: Sequence[RunScores]) -> Section:
    levels = _tables_by_level(runs, tables.scores_table)
    notes = [_SCORES_NOTE, _POOLED_NOTE] if len(levels) > 1 else [_SCORES_NOTE]
    speeds = sorted(total_speeds(runs), key=lambda speed: precision_rank(speed.label))
    rates = [
        f"{speed.label} {tables.tokens_per_s_text(speed)}"
        for speed in speeds
        if speed.latency_s > 0
    ]
    if rates:
        notes.append(f"Tokens of prompts and answers per second: {', '.join(rates)}")
    return Section(f"Scores{_of_model(runs)}", levels, notes)


def _tables_by_level(
    runs: Sequence[RunScores], build: Callable[[Sequence[RunScores], bool], Table]
) -> list[Table]:
    """Return a table of all runs; where a scenario has several runs, after one of scenarios.

    build: makes a table of runs, with a column for the model or without it.
    """
    show_model = len({run.model for run in runs}) > 1
    table, pooled = build(runs, show_model), pool_by_scenario(runs)
    if len(pooled) == len(runs):
        return [table]
    all_runs = replace(table, title=f"All {len(runs)} runs", collapsed=len(table.cells) > _MAX_ROWS)
    return [replace(build(pooled, show_model), title="By scenario"), all_runs]


def _comparison_section(title: str, model: ModelComparison, scales: Mapping[str, float]) -> Section:
    shown = comparison_tables(model, model.comparisons, scales)
    if model.pooled:
        pooled = comparison_tables(model, model.by_scenario, scales)
        shown = [replace(table, title=f"{table.title}, by scenario") for table in pooled] + [
            replace(table, title=f"{table.title}, all runs", collapsed=len(table.cells) > _MAX_ROWS)
            for table in shown
        ]
    return Section(title, [summary_table(model), *shown], model.notes)


def _verdicts(model: ModelComparison) -> list[str]:
    by_text = grouped(model.verdicts, lambda label: model.verdicts[label].text)
    return [f"{', '.join(labels)}: {text}" for text, labels in by_text.items()]


def _run_facts(runs: Sequence[RunScores]) -> dict[str, str]:
    """Return what was run, on which machine, with which versions, and when, as far as the records
    say it.
    """
    records = [run.record for run in runs]
    limits: dict[str, list[float]] = {}
    for record in records:
        for tier, limit in (record.get("limit_bytes") or {}).items():
            limits.setdefault(tier, []).append(limit)
    times = sorted(
        record["finished_at"][:16].replace("T", " ")
        for record in records
        if record.get("finished_at")
    )
    machines = [
        f"{', '.join(machine[key] for key in ('device', 'name') if key in machine)}, "
        f"{machine['compute_dtype']}, {count(machine['threads'], 'thread')}, "
        f"{size(machine['memory_bytes'])} of memory"
        for record in records
        if (machine := record.get("hardware"))
    ]
    versions = [", ".join(map(" ".join, record.get("versions", {}).items())) for record in records]
    # Runs that only score or continue texts have no `prompts`. They are told apart where other runs
    # have.
    also_scored = any(run.prompts for run in runs) and any(
        "chat_template" in run.record and not run.prompts for run in runs
    )
    prompts = _distinct(run.prompts for run in runs if run.prompts)
    facts = {
        "model": _distinct(run.typed_model for run in runs),
        "prompts": f"{prompts}; scored ones unchanged" if also_scored else prompts,
        "precisions": ", ".join(sorted({run.precision for run in runs}, key=precision_rank)),
        "machine": _distinct(machines),
        "limits": _limits_text(limits),
        "versions": _distinct(filter(None, versions)),
        "finished": " to ".join(dict.fromkeys([times[0], times[-1]])) + " UTC" if times else "",
    }
    return {label: fact for label, fact in facts.items() if fact}


def _limits_text(limits: Mapping[str, Sequence[float]]) -> str:
    """Return limits by tier; a range if runs had several, because what is free was not always the
    same.
    """
    texts = []
    for tier, label in TIER_PLACES.items():
        values = limits.get(tier, [0])
        if ends := dict.fromkeys(size(end) for end in (min(values), max(values)) if end):
            texts.append(f"{' to '.join(ends)} {label}")
    return ", ".join(texts)


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _shortened(text: str) -> str:
    """Leave out the middle of a long text: the question is at the end of a prompt with examples."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    head, tail = text[: _MAX_CHARACTERS // 4], text[-3 * _MAX_CHARACTERS // 4 :]
    return f"{head}\n[… {len(text) - len(head) - len(tail):,} characters …]\n{tail}"
