"""What the scenarios of the shipped run entries read, and whether it is on this machine. Imports no
HELM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.paths import data_dir

LAMBADA, WIKITEXT = "lambada_openai_test.jsonl", "wikitext-2-raw-test.txt"
VARIABLE = "FLEXGEN_HELM_DATA"


@dataclass(frozen=True)
class DataSet:
    """Data that a scenario reads.

    title: for people.
    files: files or folders, relative to the folder, with the arguments of the run entry in braces;
        empty if only `datasets` reads it, into its own cache.
    scenario: name of HELM's folder below `benchmark_output/scenarios`; None if `FLEXGEN_HELM_DATA`
        names the folder.
    cached: its folder in the cache of `datasets`, which reads it from the hub otherwise.
    """

    title: str
    files: tuple[str, ...] = ()
    scenario: str | None = None
    cached: str | None = None

    def place(self, output_path: Path) -> str:
        """Return where the files belong, as a user writes it."""
        if self.scenario is not None:
            return str(output_path / "scenarios" / self.scenario)
        return VARIABLE if self.files else str(_datasets_cache())

    def find(self, arguments: Mapping[str, str], output_path: Path) -> Path | None:
        """Return the folder that has all files, None if one is missing."""
        folder = data_dir() if self.scenario is None else output_path / "scenarios" / self.scenario
        files = [file.format_map(arguments) for file in self.files]
        if files and folder is not None and all((folder / file).exists() for file in files):
            return folder
        if self.cached is not None:
            cached = _datasets_cache() / self.cached.format_map(arguments)
            return cached if cached.is_dir() else None
        return None


def _datasets_cache() -> Path:
    """Return the folder of `datasets`' cache."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")


# Run spec -> its data; None if the scenario generates it.
DATA: Mapping[str, DataSet | None] = {
    "simple_mcqa": None,
    "simple_mcqa_scored": None,
    "simple_classification": None,
    "synthetic_reasoning": None,
    "synthetic_reasoning_natural": None,
    "dyck_language": None,
    "lambada": DataSet("LAMBADA", (LAMBADA,), cached="EleutherAI___lambada_openai"),
    "wikitext": DataSet("WikiText-2", (WIKITEXT,), cached="EleutherAI___wikitext_document_level"),
    "mmlu": DataSet(
        "MMLU",
        tuple(f"data/{split}/{{subject}}_{split}.csv" for split in ("dev", "test")),
        scenario="mmlu",
    ),
    "wikifact": DataSet(
        "WikiFact",
        tuple(f"data/{split}.jsonl" for split in ("train", "dev", "test")),
        scenario="wikifact",
    ),
    "summarization_xsum": DataSet("XSum", ("data/xsum.pk",), scenario="summarization"),
    "entity_matching": DataSet(
        "{dataset}",
        tuple(
            f"data/{{dataset}}/{name}.csv"
            for name in ("tableA", "tableB", "train", "valid", "test")
        ),
        scenario="entity_matching",
    ),
    "entity_data_imputation": DataSet(
        "{dataset}", ("data/{dataset}",), scenario="entity_data_imputation"
    ),
    "error_detection": DataSet(
        "{dataset}",
        ("data/{dataset}/dirty.csv", "data/{dataset}/clean.csv"),
        scenario="error_detection",
    ),
    # HELM Lite
    "narrative_qa": DataSet(
        "NarrativeQA",
        tuple(
            f"data/narrativeqa-master/{name}"
            for name in ("qaps.csv", "third_party/wikipedia/summaries.csv")
        ),
        scenario="narrativeqa",
    ),
    "natural_qa": DataSet(
        "NaturalQuestions",
        tuple(f"data/nq-dev-0{part}.jsonl.gz" for part in range(5)),
        scenario="natural_qa",
    ),
    "commonsense": DataSet(
        "OpenbookQA",
        tuple(f"data/OpenBookQA-V1-Sep2018/Data/Main/{split}.jsonl" for split in ("train", "test")),
        scenario="openbookqa",
    ),
    "math": DataSet("MATH", ("data/hendrycks___competition_math",), scenario="MATH"),
    "gsm": DataSet("GSM8K", ("gsm_data_train", "gsm_data_test"), scenario="gsm"),
    "legalbench": DataSet(
        "LegalBench",
        (
            "prompt_construction_settings.json",
            "data/prompt_construction_settings.json",
            "data/nguha___legalbench/{subset}",
        ),
        scenario="legalbench",
    ),
    "med_qa": DataSet(
        "MedQA",
        tuple(
            f"data/data_clean/questions/US/4_options/phrases_no_exclude_{split}.jsonl"
            for split in ("train", "dev", "test")
        ),
        scenario="med_qa",
    ),
    "wmt_14": DataSet("WMT 2014, {language_pair}", cached="wmt14/{language_pair}"),
    # HELM Capabilities
    "mmlu_pro": DataSet("MMLU-Pro", cached="TIGER-Lab___mmlu-pro"),
    "gpqa": DataSet("GPQA", ("data/Idavidrein___gpqa/gpqa_{subset}",), scenario="gpqa"),
    "ifeval": DataSet("IFEval", ("data/google___if_eval",), scenario="ifeval"),
    # HELM Safety
    "bbq": DataSet("BBQ", ("data/Age", "data/SES", "data/Sexual_orientation"), scenario="bbq"),
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
