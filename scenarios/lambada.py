"""LAMBADA (OpenAI's version): is the last word of a passage predicted, and how probable is it."""

from __future__ import annotations

from typing import NamedTuple

from helm.benchmark.adaptation.adapter_spec import ADAPT_GENERATION, ADAPT_LANGUAGE_MODELING
from helm.benchmark.metrics.metric import MetricSpec
from helm.benchmark.presentation.taxonomy_info import TaxonomyInfo
from helm.benchmark.run_spec import RunSpec, run_spec_function
from helm.benchmark.scenarios.scenario import (
    CORRECT_TAG,
    TEST_SPLIT,
    Input,
    Instance,
    Output,
    Reference,
    Scenario,
    ScenarioMetadata,
    ScenarioSpec,
)
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.errors import UsageError
from flexgen_helm.runs.data import LAMBADA as FILE
from flexgen_helm.scenarios.adapters import LastWordAdapterSpec
from flexgen_helm.scenarios.data import json_lines, read_hub, read_local

PASSAGES = 5153


class Mode(NamedTuple):
    """HELM's method, the metric that leads HELM's tables, and the class that computes it."""

    method: str
    main_metric: str
    metric_class: str


MODES = {
    "accuracy": Mode(ADAPT_GENERATION, "exact_match", "LambadaAccuracyMetric"),
    "perplexity": Mode(ADAPT_LANGUAGE_MODELING, "target_perplexity", "LambadaPerplexityMetric"),
}


class LambadaScenario(Scenario):
    """The test split, one passage per instance: the text before the last space, and the space and
    last word.

    mode: one of `MODES`. Instances are the same in both; only the metric that leads HELM's tables
        differs.
    """

    name = "lambada"
    description = (
        "LAMBADA (OpenAI's version), test split: passages whose last word can be guessed only from "
        "all of the passage, as in the task 'lambada_openai' of lm-evaluation-harness "
        "[(Paperno et al., 2016)](https://arxiv.org/pdf/1606.06031.pdf)."
    )
    tags = ["language_modeling", "last_word_prediction"]

    def __init__(self, mode: str = "accuracy") -> None:
        super().__init__()
        self.mode = mode

    def __post_init__(self) -> None:
        self.definition_path = "flexgen_helm/scenarios/lambada.py"

    def get_instances(self, output_path: str) -> list[Instance]:
        """Return all instances; `output_path` stays empty."""
        passages = read_passages()
        if len(passages) != PASSAGES:
            hwarn(
                f"LAMBADA has {PASSAGES} passages, this data {len(passages)}: figures are not "
                "those of the whole set"
            )
        return [_instance(passage) for passage in passages]

    def get_metadata(self) -> ScenarioMetadata:
        return ScenarioMetadata(
            name=f"lambada_{self.mode}",
            display_name=f"LAMBADA ({self.mode})",
            description=self.description,
            taxonomy=TaxonomyInfo(
                task="last word prediction",
                what="novels",
                when="before 2016",
                who="novelists",
                language="English",
            ),
            main_metric=MODES[self.mode].main_metric,
            main_split="test",
        )


@run_spec_function("lambada")
def get_lambada_run_spec(mode: str = "accuracy") -> RunSpec:
    """Return the run spec of one mode: 'accuracy' generates the last word, 'perplexity' scores
    it.
    """
    if mode not in MODES:
        raise UsageError(f"lambada: mode is {mode!r}; it must be one of {', '.join(MODES)}")
    return RunSpec(
        name=f"lambada:mode={mode}",
        scenario_spec=ScenarioSpec(class_name=f"{__name__}.LambadaScenario", args={"mode": mode}),
        adapter_spec=LastWordAdapterSpec(
            method=MODES[mode].method,
            input_prefix="",
            input_suffix="",
            output_prefix="",
            output_suffix="",
            max_train_instances=0,
            num_outputs=1,
            max_tokens=0,  # the adapter asks for as many as the last word has
            temperature=0.0,
        ),
        metric_specs=[
            MetricSpec(class_name=f"flexgen_helm.scenarios.metrics.{MODES[mode].metric_class}")
        ],
        groups=[f"lambada_{mode}"],
    )


def read_passages() -> list[str]:
    """Return the passages from the data folder or the hub. Raises `UsageError` where neither has
    them.
    """
    passages = read_local(FILE, json_lines("text"))
    if passages is not None:
        return passages
    return read_hub("LAMBADA", FILE, "EleutherAI/lambada_openai", "default", "text")


def split_passage(passage: str) -> tuple[str, str]:
    """Return context and target; the target is the last word and the white space before it."""
    context = passage.rpartition(" ")[0].rstrip()
    return context, passage[len(context) :]


def _instance(passage: str) -> Instance:
    context, target = split_passage(passage)
    return Instance(
        Input(context), [Reference(Output(target), tags=[CORRECT_TAG])], split=TEST_SPLIT
    )
