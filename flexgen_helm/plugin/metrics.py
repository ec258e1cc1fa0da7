"""Throughput as HELM statistics, so that `helm-summarize` and HELM's web page show it beside the
scores.
"""

from __future__ import annotations

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.metric import MetricInterface, MetricMetadata, MetricResult
from helm.benchmark.metrics.metric_name import MetricName
from helm.benchmark.metrics.metric_service import MetricService
from helm.benchmark.metrics.statistic import Stat

from flexgen_helm.plugin.context import get_context

GROUP = "flexgen_throughput"
# Figure -> title, short title, description.
_FIGURES = {
    "padded_throughput": (
        "Padded throughput",
        "Padded tok/s",
        (
            "Prompt and output tokens asked for, and padding positions computed, per second of the "
            "engine."
        ),
    ),
    "actual_throughput": (
        "Actual throughput",
        "Actual tok/s",
        "Prompt and output tokens asked for, per second of the engine.",
    ),
    "efficiency": (
        "Padding efficiency",
        "Efficiency",
        "Actual over padded throughput; 1 where nothing was padded.",
    ),
}


class FlexgenThroughputMetric(MetricInterface):
    """One value per run, from the costs of its results; none outside of a run of ours."""

    def __repr__(self) -> str:
        return "FlexgenThroughputMetric"

    def evaluate(
        self,
        scenario_state: ScenarioState,
        metric_service: MetricService,
        eval_cache_path: str,
        parallelism: int,
    ) -> MetricResult:
        run = get_context().run
        usage = run.usage() if run is not None else {}
        # HELM's tables look a figure up under a scenario's split.
        splits = list(dict.fromkeys(instance.split for instance in scenario_state.instances))
        stats = [
            Stat(MetricName(f"flexgen_{name}", split=split)).add(usage[name])
            for name in _FIGURES
            for split in splits
            if usage and usage["latency_s"] > 0  # a rate over no time is no figure
        ]
        return MetricResult(aggregated_stats=stats, per_instance_stats=[])

    def get_metadata(self) -> list[MetricMetadata]:
        return [
            MetricMetadata(
                f"flexgen_{name}",
                title,
                short_title,
                description,
                lower_is_better=False,
                group=GROUP,
            )
            for name, (title, short_title, description) in _FIGURES.items()
        ]
