"""Pages of `report`, `compare` and `plan --frontier`: tables, figures and notes as markdown or self-contained HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_helm.report import figures, tables
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.scores import RunScores
from flexgen_helm.report.suite import BASELINE, SuiteReport

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from flexgen_helm.planner.problem import PlanningProblem

_THROUGHPUT_LEGEND = (
    "Throughput counts requested tokens, padded throughput computed padding positions too; efficiency is their ratio. "
    "'To the longest' and 'in buckets' are the efficiencies of padding the same requests to the longest of all, or to "
    "the longest of 32 of similar length. Fewer prompt tokens are computed than requested where prompts share a prefix."
)


@dataclass(frozen=True)
class Section:
    """A part of a page; notes: sentences without their full stops."""

    title: str
    tables: Sequence[pd.DataFrame]
    figures: Sequence[go.Figure] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    title: str
    summary: str
    sections: Sequence[Section]

    def to_markdown(self) -> str:
        """Return headings, tables and notes; columns also line up in a terminal."""
        parts = [f"# {self.title}", self.summary]
        for section in self.sections:
            parts.append(f"## {section.title}")
            parts += [tables.markdown(table) for table in section.tables]
            parts += [f"- {note}." for note in section.notes]
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        """Return one HTML file that needs no other, plotly's script included."""
        from jinja2 import Environment, PackageLoader
        from markupsafe import Markup, escape

        def breakable(text: str) -> Markup:
            """Let names of runs break after a comma or a colon instead of within a word."""
            return Markup("<wbr>").join(escape(part) for part in re.split("(?<=[,:])", text))

        def draw(figure: go.Figure) -> str:
            with_script = figure is first
            return str(figure.to_html(full_html=False, include_plotlyjs=with_script, config={"displaylogo": False}))

        first = next((figure for section in self.sections for figure in section.figures), None)
        environment = Environment(loader=PackageLoader("flexgen_helm.report"), autoescape=True, trim_blocks=True)
        environment.filters |= {"breakable": breakable, "draw": draw, "right_aligned": tables.right_aligned}
        return environment.get_template("page.html").render(page=self)


def suite_page(report: SuiteReport) -> Page:
    """Build the page of `flexgen-helm report`."""
    sections = [Section("Runs", [tables.runs_table(report.runs)], _run_figures(report.runs), report.notes)]
    if report.models:
        sections.append(Section("Models", [tables.models_table(report.models)], _model_figures(report.models)))
    for model in report.compared:
        notes = [note for note in model.notes if note not in report.notes]
        sections.append(_comparison_section(f"Precisions of {model.model}", model, BASELINE, notes))
    return Page(report.suite, _THROUGHPUT_LEGEND, sections)


def comparison_page(models: Sequence[ModelComparison], suite: str, baseline: str) -> Page:
    """Build the page of `flexgen-helm compare`."""
    legend = (
        f"Changes are against {baseline} on the same instances: × is a ratio, the others are differences. Intervals: "
        "bootstrap over instances. Tests: exact McNemar for right and wrong answers, else a permutation of signs. "
        "Tokens/s are of whole runs, whatever instances they share."
    )
    sections = [_comparison_section(model.model, model, baseline, model.notes) for model in models]
    return Page(f"{suite}: {baseline} and other precisions", legend, sections)


def frontier_page(points: Sequence[Mapping[str, Any]], problem: PlanningProblem) -> Page:
    """Build the page of `flexgen-helm plan --frontier --picture`; points: from `planner.frontier`."""
    workload = problem.workload
    title = f"{problem.hardware.name}: {workload.prompt:.0f} prompt + {workload.output:.0f} output tokens"
    legend = "The Pareto-optimal policies; a label is the block's batch size x batches."
    return Page(title, legend, [Section("Throughput over latency", (), [figures.frontier(points)])])


def _comparison_section(title: str, model: ModelComparison, baseline: str, notes: Sequence[str]) -> Section:
    comparisons = tables.comparisons_table(model.comparisons, baseline)
    frame = tables.comparisons_frame([model])
    charts = [figures.intervals(of_kind, baseline) for _, of_kind in frame.groupby("kind")]
    return Section(title, [comparisons, tables.speeds_table(model.speeds)], charts, notes)


def _run_figures(runs: Sequence[RunScores]) -> list[go.Figure]:
    # Run and model on two lines.
    names = [re.sub("[,:]model=flexgen_", "<br>", run.name) for run in runs]
    frame = tables.runs_frame(runs).set_axis(names)
    throughputs = {"padded_throughput": "padded", "actual_throughput": "actual"}
    prompts = {"workload.prompt_tokens": "prompt tokens", "workload.prompt_tokens_computed": "computed"}
    return [figures.bars(frame, "tokens/s", throughputs), figures.bars(frame, "tokens", prompts)]


def _model_figures(models: Mapping[str, Mapping[str, Any]]) -> list[go.Figure]:
    frame = tables.models_frame(models).set_index("model")
    parts = {"time_s.compute": "compute", "time_s.wait": "wait for data", "time_s.other": "between batches"}
    latencies = {"busy_s": "measured", "predicted_latency_s": "predicted", "roofline_s": "roofline"}
    charts = [figures.bars(frame, "seconds", parts, stacked=True), figures.bars(frame, "seconds", latencies)]
    moved = tables.transfers_frame(models)
    return charts if moved.empty else [*charts, figures.bars(moved, "GB", stacked=True)]
