"""Throughput as HELM statistics, so that `helm-summarize` and HELM's web page show it beside the scores."""

from __future__ import annotations

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.metric import MetricInterface, MetricMetadata, MetricResult, MetricSpec
from helm.benchmark.metrics.metric_name import MetricName
from helm.benchmark.metrics.metric_service import MetricService
from helm.benchmark.metrics.statistic import Stat

from flexgen_helm.plugin.run_record import current_run

GROUP = "flexgen_throughput"
_METADATA = [
    MetricMetadata(
        name="flexgen_padded_throughput",
        display_name="Padded throughput",
        short_display_name="Padded tok/s",
        description="Prompt and output tokens asked for, and padding positions computed, per second of the engine.",
        lower_is_better=False,
        group=GROUP,
    ),
    MetricMetadata(
        name="flexgen_actual_throughput",
        display_name="Actual throughput",
        short_display_name="Actual tok/s",
        description="Prompt and output tokens asked for, per second of the engine.",
        lower_is_better=False,
        group=GROUP,
    ),
    MetricMetadata(
        name="flexgen_efficiency",
        display_name="Padding efficiency",
        short_display_name="Efficiency",
        description="Actual over padded throughput; 1 where nothing was padded.",
        lower_is_better=False,
        group=GROUP,
    ),
]


class FlexgenThroughputMetric(MetricInterface):
    """One value a run, from the costs of its answers. Outside of a run of ours it says nothing."""

    def __repr__(self) -> str:
        return "FlexgenThroughputMetric"

    def evaluate(
        self, scenario_state: ScenarioState, metric_service: MetricService, eval_cache_path: str, parallelism: int
    ) -> MetricResult:
        record = current_run.get()
        figures = record.usage() if record is not None else {}
        # HELM's tables look a figure up under a scenario's split.
        splits = list(dict.fromkeys(instance.split for instance in scenario_state.instances))
        stats = [
            Stat(MetricName(metadata.name, split=split)).add(figures[metadata.name.removeprefix("flexgen_")])
            for metadata in _METADATA
            for split in splits
            if figures and figures["latency_s"] > 0  # a rate over no time is no figure
        ]
        return MetricResult(aggregated_stats=stats, per_instance_stats=[])

    def get_metadata(self) -> list[MetricMetadata]:
        return list(_METADATA)


def metric_spec() -> MetricSpec:
    """What the plugin appends to each of our runs."""
    return MetricSpec(class_name=f"{__name__}.FlexgenThroughputMetric")
