"""Error detection in tables: is the value of a cell wrong? The sixth data-wrangling task of the
paper's table.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from random import Random

from helm.benchmark.adaptation.common_adapter_specs import get_generation_adapter_spec
from helm.benchmark.metrics.common_metric_specs import (
    get_classification_metric_specs,
    get_exact_match_metric_specs,
)
from helm.benchmark.presentation.taxonomy_info import TaxonomyInfo
from helm.benchmark.run_spec import RunSpec, run_spec_function
from helm.benchmark.scenarios.scenario import (
    CORRECT_TAG,
    TEST_SPLIT,
    TRAIN_SPLIT,
    VALID_SPLIT,
    Input,
    Instance,
    Output,
    Reference,
    Scenario,
    ScenarioMetadata,
    ScenarioSpec,
)
from helm.common.general import ensure_file_downloaded

from flexgen_helm.errors import UsageError

# Each is a folder with one table twice: with errors (dirty), and corrected (clean).
SOURCE = "https://raw.githubusercontent.com/BigDaMa/raha/master/datasets"
DATASETS = {"Hospital": "hospital"}
FILES = ("dirty.csv", "clean.csv")
LABELS = ("Yes", "No")
# Empty cells, which are no questions.
PLACEHOLDERS = ("", "empty")
ROW_NUMBER = "index"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    text: the column's name and the dirty value.
    is_wrong: the clean value is another.
    """

    text: str
    is_wrong: bool


class ErrorDetectionScenario(Scenario):
    """One instance per cell of the dirty table, with its column's name: does it differ from the
    clean table?

        city: birminghxm        Yes
        state: al               No

    Rows are split as in HELM's data imputation: a tenth for test, a fifth of the rest for
    validation, the others for training. Examples of prompts are drawn from the training split,
    which gets as many right cells as wrong ones.
    """

    name = "error_detection"
    description = (
        "Is a value of a table wrong? The task of [Narayan et al. "
        "(2022)](https://arxiv.org/abs/2205.09911) on the tables of [Raha "
        "(2019)](https://github.com/BigDaMa/raha), in which about one cell in forty is."
    )
    tags = ["data_wrangling", "structured_reasoning"]

    def __init__(self, dataset: str = "Hospital", seed: int = 1234) -> None:
        super().__init__()
        self.dataset, self.seed = dataset, seed

    def __post_init__(self) -> None:
        self.definition_path = "flexgen_helm/scenarios/error_detection.py"

    def get_instances(self, output_path: str) -> list[Instance]:
        """Return all instances; files that are already below `output_path`/data are not fetched
        again.
        """
        rows = read_cells(Path(output_path) / "data" / self.dataset, self.dataset)
        draw = Random(self.seed)
        draw.shuffle(rows)
        tested = round(len(rows) / 10)
        validated = tested + round((len(rows) - tested) / 5)
        splits = {
            TEST_SPLIT: rows[:tested],
            VALID_SPLIT: rows[tested:validated],
            TRAIN_SPLIT: rows[validated:],
        }
        instances = []
        for split, members in splits.items():
            cells = [cell for row in members for cell in row]
            if split == TRAIN_SPLIT:
                wrong = [cell for cell in cells if cell.is_wrong]
                right = [cell for cell in cells if not cell.is_wrong]
                cells = wrong + draw.sample(right, min(len(wrong), len(right)))
            instances += [_instance(cell, split) for cell in cells]
        return instances

    def get_metadata(self) -> ScenarioMetadata:
        return ScenarioMetadata(
            name="error_detection",
            display_name="Error detection",
            description=self.description,
            taxonomy=TaxonomyInfo(task="?", what="n/a", when="n/a", who="n/a", language="English"),
            main_metric="classification_macro_f1",
            main_split="test",
        )


@run_spec_function("error_detection")
def get_error_detection_run_spec(dataset: str = "Hospital") -> RunSpec:
    """Return the run spec of one of `DATASETS`."""
    if dataset not in DATASETS:
        raise UsageError(
            f"error_detection: dataset is {dataset!r}; it must be one of {', '.join(DATASETS)}"
        )
    return RunSpec(
        name=f"error_detection:dataset={dataset}",
        scenario_spec=ScenarioSpec(
            class_name=f"{__name__}.ErrorDetectionScenario", args={"dataset": dataset}
        ),
        adapter_spec=get_generation_adapter_spec(
            instructions="Is there an error in the value of the attribute? Yes or No?",
            output_noun="Answer",
        ),
        metric_specs=get_exact_match_metric_specs()
        + get_classification_metric_specs(labels=list(LABELS)),
        groups=["error_detection"],
    )


def read_cells(folder: Path, dataset: str) -> list[list[Cell]]:
    """Return the cells of each row without placeholders.

    Raises `UsageError` where the tables are neither in `folder` nor reachable, or are not the same
    cell by cell.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dirty, clean = (
        _read_table(folder / name, f"{SOURCE}/{DATASETS[dataset]}/{name}") for name in FILES
    )
    if [len(row) for row in dirty] != [len(row) for row in clean] or len(dirty) < 2:
        raise UsageError(
            f"{folder}: {FILES[0]} with {len(dirty)} rows and {FILES[1]} with {len(clean)} are not "
            "the same table cell by cell; delete both, so that they are fetched anew"
        )
    columns = dirty[0]  # the clean table names them differently
    return [
        [
            Cell(f"{column}: {value}", value != clean_value)
            for column, value, clean_value in zip(columns, row, clean_row)
            if column != ROW_NUMBER and value not in PLACEHOLDERS
        ]
        for row, clean_row in zip(dirty[1:], clean[1:])
    ]


def _read_table(path: Path, source: str) -> list[list[str]]:
    try:
        ensure_file_downloaded(source_url=source, target_path=str(path))
    except OSError as error:
        raise UsageError(
            f"{path} is not there and {source} cannot be read ({error}); put it there"
        ) from error
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read as a table: {error}; delete it, so that it is fetched anew"
        ) from error


def _instance(cell: Cell, split: str) -> Instance:
    answer = Output(LABELS[0] if cell.is_wrong else LABELS[1])
    return Instance(Input(cell.text), [Reference(answer, tags=[CORRECT_TAG])], split=split)
