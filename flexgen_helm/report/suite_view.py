"""The report of a suite as markdown and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexgen_helm.report import comparison_view
from flexgen_helm.report.page import figure_html, markdown_table, page
from flexgen_helm.report.scores import RunScores
from flexgen_helm.report.suite import BASELINE, SuiteReport

if TYPE_CHECKING:
    import plotly.graph_objects as go

RUN_TITLES = (
    "run", "scores", "requests", "tokens asked for", "prompt tokens computed", "padded token/s", "token/s",
    "efficiency", "to the longest", "in buckets",
)  # fmt: skip
MODEL_TITLES = (
    "model", "schedule", "seconds", "predicted", "computing", "waiting", "of the roofline", "read from the disk",
    "over the link", "peak gpu", "peak cpu", "peak disk",
)  # fmt: skip
_SUMMARY = (
    "Throughput counts the tokens that were asked for; padded throughput counts positions that were computed for "
    "nothing too, and efficiency is the ratio. 'To the longest' and 'in buckets' say what padding the same requests to "
    "the longest of them, or to the longest of 32 neighbours in length, would have left. Prompt tokens computed are "
    "fewer than asked for where requests share a beginning."
)
_KINDS = ("weights", "cache", "activations")
_LINKS = {
    "disk_to_cpu": "disk to memory",
    "cpu_to_disk": "memory to disk",
    "cpu_to_gpu": "memory to GPU",
    "gpu_to_cpu": "GPU to memory",
}


def to_markdown(report: SuiteReport) -> str:
    parts = [f"# {report.suite}", _SUMMARY, "## Runs", markdown_table(RUN_TITLES, run_rows(report.runs), right=8)]
    if report.models:
        parts += ["## Models", markdown_table(MODEL_TITLES, model_rows(report.models), right=10)]
    for found in report.compared:
        rows = comparison_view.rows(found, BASELINE)
        parts += [f"## Precisions of {found.model}", markdown_table(comparison_view.TITLES, rows)]
        parts.append(markdown_table(comparison_view.SPEED_TITLES, comparison_view.speed_rows(found), right=4))
        parts += [f"- {note}." for note in found.notes if note not in report.notes]
    parts += [f"- {note}." for note in report.notes]
    return "\n\n".join(parts) + "\n"


def to_html(report: SuiteReport) -> str:
    sections: list[dict[str, Any]] = [
        {
            "title": "Runs",
            "pictures": [figure_html(_throughput(report.runs), first=True), figure_html(_prefixes(report.runs), False)],
            "tables": [(RUN_TITLES, run_rows(report.runs))],
            "notes": report.notes,
        }
    ]
    if report.models:
        pictures = [_time(report.models), _predictions(report.models)]
        if any(_moved(account) for account in report.models.values()):
            pictures.append(_bytes(report.models))
        sections.append(
            {
                "title": "Models",
                "pictures": [figure_html(picture, first=False) for picture in pictures],
                "tables": [(MODEL_TITLES, model_rows(report.models))],
            }
        )
    for found in report.compared:
        section = comparison_view.section(found, BASELINE, f"Precisions of {found.model}", first=False)
        sections.append({**section, "notes": [note for note in found.notes if note not in report.notes]})
    return page(report.suite, _SUMMARY, sections)


def run_rows(runs: Sequence[RunScores]) -> list[tuple[str, ...]]:
    return [
        (
            run.name,
            "  ".join(f"{name} {score:.3f}" for name, score in run.scores.items()) or "-",
            f"{_work(run, 'num_requests'):,.0f}",
            f"{_work(run, 'prompt_tokens') + _work(run, 'output_tokens'):,.0f}",
            f"{_work(run, 'prompt_tokens_computed'):,.0f}",
            f"{run.run.get('padded_throughput', 0.0):,.0f}",
            run.rate,
            _percent(run.run.get("efficiency")),
            _percent(run.run.get("padding", {}).get("to_longest")),
            _percent(run.run.get("padding", {}).get("in_buckets")),
        )
        for run in runs
    ]


def model_rows(models: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    made = []
    for name, account in models.items():
        spent, moved, peak = account["time_s"], account["bytes"], account["peak_bytes"]
        predicted, bound = account.get("predicted_latency_s"), account.get("roofline_s")
        busy = spent["compute"] + spent["wait"]
        made.append(
            (
                name,
                str(account.get("schedule", "")),
                f"{busy:,.1f}",
                "" if predicted is None else f"{predicted:,.1f}",
                f"{spent['compute']:,.1f}",
                f"{spent['wait']:,.1f}",
                _percent(bound / busy if bound and busy else None),
                _bytes_text(sum(moved["disk_to_cpu"].values())),
                _bytes_text(sum(moved["cpu_to_gpu"].values()) + sum(moved["gpu_to_cpu"].values())),
                *(_bytes_text(peak[tier]) for tier in ("gpu", "cpu", "disk")),
            )
        )
    return made


def _short(name: str) -> str:
    """Run and model on two lines."""
    return name.replace(",model=flexgen_", "<br>").replace(":model=flexgen_", "<br>")


def _work(run: RunScores, key: str) -> float:
    return float(run.run.get("workload", {}).get(key, 0))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _bytes_text(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count else "0"


def _moved(account: Mapping[str, Any]) -> float:
    return float(sum(sum(kinds.values()) for kinds in account["bytes"].values()))


def _bars(names: Sequence[str], series: Mapping[str, Sequence[float]], title: str, stacked: bool = False) -> go.Figure:
    """Horizontal bars, a colour for each of the series."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label, values in series.items():
        text = ["" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        figure.add_trace(go.Bar(name=label, y=list(names), x=list(values), orientation="h", text=text))
    figure.update_layout(
        template="plotly_white",
        barmode="stack" if stacked else "group",
        height=150 + len(names) * (34 if stacked else 22 * len(series)),
        margin={"l": 20, "r": 20, "t": 20, "b": 40},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    )
    figure.update_xaxes(title=title)
    figure.update_yaxes(automargin=True, autorange="reversed")
    return figure


def _throughput(runs: Sequence[RunScores]) -> go.Figure:
    series = {
        "padded": [run.run.get("padded_throughput", 0.0) for run in runs],
        "actual": [run.run.get("actual_throughput", 0.0) for run in runs],
    }
    return _bars([_short(run.name) for run in runs], series, "tokens a second")


def _prefixes(runs: Sequence[RunScores]) -> go.Figure:
    series = {
        "prompt tokens asked for": [_work(run, "prompt_tokens") for run in runs],
        "computed": [_work(run, "prompt_tokens_computed") for run in runs],
    }
    return _bars([_short(run.name) for run in runs], series, "tokens")


def _time(models: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    labels = {"computing": "compute", "waiting for data": "wait", "between batches": "other"}
    series = {label: [account["time_s"][key] for account in models.values()] for label, key in labels.items()}
    return _bars(list(models), series, "seconds", stacked=True)


def _predictions(models: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    series = {
        "measured": [account["time_s"]["compute"] + account["time_s"]["wait"] for account in models.values()],
        "predicted": [account.get("predicted_latency_s") or 0.0 for account in models.values()],
        "roofline": [account.get("roofline_s") or 0.0 for account in models.values()],
    }
    return _bars(list(models), series, "seconds")


def _bytes(models: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    names, series = [], {kind: [] for kind in _KINDS}  # type: ignore[var-annotated]
    for name, account in models.items():
        for link, label in _LINKS.items():
            kinds = account["bytes"][link]
            if sum(kinds.values()):
                names.append(f"{name}<br>{label}")
                for kind in _KINDS:
                    series[kind].append(kinds[kind] / 1e9)
    return _bars(names, series, "GB", stacked=True)
