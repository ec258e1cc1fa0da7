"""What the scenarios of the shipped run entries read, and whether it is on this machine. Imports no HELM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.checkpoint.paths import data_dir

LAMBADA, WIKITEXT = "lambada_openai_test.jsonl", "wikitext-2-raw-test.txt"
VARIABLE = "FLEXGEN_HELM_DATA"


@dataclass(frozen=True)
class DataSet:
    """Data that a scenario reads.

    title: for people.
    files: files or folders, relative to the folder, with the arguments of the run entry in braces.
    scenario: name of HELM's folder below `benchmark_output/scenarios`; None if `FLEXGEN_HELM_DATA` names the folder.
    hub: repository from which `datasets` reads it otherwise.
    """

    title: str
    files: tuple[str, ...]
    scenario: str | None = None
    hub: str | None = None

    def place(self, output_path: Path) -> str:
        """Return where the files belong, as a user writes it."""
        return VARIABLE if self.scenario is None else str(output_path / "scenarios" / self.scenario)

    def find(self, arguments: Mapping[str, str], output_path: Path) -> Path | None:
        """Return the folder that has all files, None if one is missing."""
        folder = data_dir() if self.scenario is None else output_path / "scenarios" / self.scenario
        if folder is not None and all((folder / file.format_map(arguments)).exists() for file in self.files):
            return folder
        if self.hub is not None:
            home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
            cached = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / self.hub.replace("/", "___")
            return cached if cached.is_dir() else None
        return None


# Run spec -> its data; None if the scenario generates it.
DATA: Mapping[str, DataSet | None] = {
    "simple_mcqa": None,
    "simple_mcqa_scored": None,
    "simple_classification": None,
    "synthetic_reasoning": None,
    "synthetic_reasoning_natural": None,
    "dyck_language": None,
    "lambada": DataSet("LAMBADA", (LAMBADA,), hub="EleutherAI/lambada_openai"),
    "wikitext": DataSet("WikiText-2", (WIKITEXT,), hub="EleutherAI/wikitext_document_level"),
    "mmlu": DataSet(
        "MMLU", tuple(f"data/{split}/{{subject}}_{split}.csv" for split in ("dev", "test")), scenario="mmlu"
    ),
    "wikifact": DataSet(
        "WikiFact", tuple(f"data/{split}.jsonl" for split in ("train", "dev", "test")), scenario="wikifact"
    ),
    "summarization_xsum": DataSet("XSum", ("data/xsum.pk",), scenario="summarization"),
    "entity_matching": DataSet(
        "{dataset}",
        tuple(f"data/{{dataset}}/{name}.csv" for name in ("tableA", "tableB", "train", "valid", "test")),
        scenario="entity_matching",
    ),
    "entity_data_imputation": DataSet("{dataset}", ("data/{dataset}",), scenario="entity_data_imputation"),
    "error_detection": DataSet(
        "{dataset}",
        ("data/{dataset}/dirty.csv", "data/{dataset}/clean.csv"),
        scenario="error_detection",
    ),
}

# Run entries of HELM that need no data and are in no shipped file.
HELM_ENTRIES = (
    "simple_mcqa",
    "simple_classification",
    "synthetic_reasoning:mode=induction",
    "synthetic_reasoning:mode=variable_substitution",
    "synthetic_reasoning_natural:difficulty=medium",
    "synthetic_reasoning_natural:difficulty=hard",
    "dyck_language:num_parenthesis_pairs=3",
)
