"""A scored run that needs no download: HELM's simple question answering, answered by
log-probability.
"""

from __future__ import annotations

from helm.benchmark.adaptation.adapter_spec import (
    ADAPT_MULTIPLE_CHOICE_SEPARATE_ORIGINAL,
    AdapterSpec,
)
from helm.benchmark.metrics.common_metric_specs import get_exact_match_metric_specs
from helm.benchmark.run_spec import RunSpec, run_spec_function
from helm.benchmark.scenarios.scenario import ScenarioSpec


@run_spec_function("simple_mcqa_scored")
def get_simple_mcqa_scored_run_spec() -> RunSpec:
    """Return HELM's `simple_mcqa` ('Is 24 even or odd?') by the 'separate' method, with examples.

    HELM's own separate adapter spec has no examples, because its scenarios are running text. These
    questions need some to be understood, and shared examples are what scoring in batches saves.
    """
    return RunSpec(
        name="simple_mcqa_scored",
        scenario_spec=ScenarioSpec(
            class_name="helm.benchmark.scenarios.simple_scenarios.SimpleMCQAScenario"
        ),
        adapter_spec=AdapterSpec(
            method=ADAPT_MULTIPLE_CHOICE_SEPARATE_ORIGINAL,
            input_prefix="Question: ",
            input_suffix="\n",
            output_prefix="Answer: ",
            # HELM scores the last tokens of the prompt: nothing may follow the answer
            output_suffix="",
            max_train_instances=5,
            num_outputs=1,
            max_tokens=0,
            temperature=0.0,
        ),
        metric_specs=get_exact_match_metric_specs(),
        groups=["simple_mcqa"],
    )
