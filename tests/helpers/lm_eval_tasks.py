"""Tasks of lm-evaluation-harness from local files: one of each kind of request, and one in turns of
a chat.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

WORDS = [
    "the",
    "of",
    "fox",
    "to",
    "in",
    "a",
    "is",
    "that",
    "dog",
    "was",
    "for",
    "on",
    "as",
    "with",
    "by",
    "he",
]
LAST_WORD, PAGES, CHOICES, SUMS, TURNS = NAMES = ["last_word", "pages", "choices", "sums", "turns"]
_MEAN = {"aggregation": "mean", "higher_is_better": True}
_SUMS = {
    "output_type": "generate_until",
    "doc_to_text": "{{a}} + {{b}} =",
    "doc_to_target": "{{a + b}}",
    "generation_kwargs": {"until": ["\n", " +"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match", **_MEAN}],
    "filter_list": [
        {
            "name": "number",
            "filter": [
                {"function": "regex", "regex_pattern": "(-?[0-9]+)"},
                {"function": "take_first"},
            ],
        }
    ],
}
_TASKS: dict[str, dict[str, Any]] = {
    LAST_WORD: {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
        "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", **_MEAN},
        ],
    },
    PAGES: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    },
    CHOICES: {
        "output_type": "multiple_choice",
        "num_fewshot": 5,
        "doc_to_text": "{{question}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", **_MEAN}, {"metric": "acc_norm", **_MEAN}],
    },
    SUMS: {**_SUMS, "num_fewshot": 2},
    # The answer is begun for the model.
    TURNS: {**_SUMS, "num_fewshot": 2, "gen_prefix": "It is"},
}


def leave_out_others(patch: pytest.MonkeyPatch) -> None:
    """Let the harness read no tasks of its own: all 14,000 files take 15 s of processor time at
    each start.
    """
    from lm_eval.tasks import TaskManager

    make = TaskManager.__init__
    patch.setattr(
        TaskManager,
        "__init__",
        lambda self, *a, **k: make(self, *a, **{**k, "include_defaults": False}),
    )
    # what pip has installed: seconds
    patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def invented_tasks(folder: Path, count: int, seed: int = 0) -> Path:
    """Write all tasks with made-up documents, some longer than a tiny model's window."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    def question(_: int) -> dict[str, Any]:
        return {
            "question": text(2),
            **{letter: text(1) for letter in "ABCD"},
            "answer": draw.randrange(4),
        }

    def numbers(_: int) -> dict[str, int]:
        return {"a": draw.randrange(10), "b": draw.randrange(10)}

    rows: dict[str, list[Any]] = {
        LAST_WORD: [{"text": text(draw.randint(2, 40))} for _ in range(count)],
        PAGES: [{"text": text(draw.randint(1, 120))} for _ in range(count)],
        CHOICES: [question(i) for i in range(count)],
        SUMS: [numbers(i) for i in range(count)],
        TURNS: [numbers(i) for i in range(count)],
    }
    examples = {
        CHOICES: [question(i) for i in range(5)],
        SUMS: [numbers(i) for i in range(2)],
        TURNS: [numbers(i) for i in range(2)],
    }
    folder.mkdir()

    def write(name: str, documents: list[Any]) -> str:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(document) + "\n" for document in documents))
        return str(path)

    for name, documents in rows.items():
        files = {"test": write(name, documents)}
        task = {"task": name, **_TASKS[name], "test_split": "test", "dataset_path": "json"}
        if name in examples:
            files["dev"] = write(f"{name}_dev", examples[name])
            task |= {"fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}
        task["dataset_kwargs"] = {"data_files": files, "cache_dir": str(folder / "cache")}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def close(found: Any, expected: Any) -> bool:
    """Whether results are the same but for the last digits of their numbers.

    What is computed behind an interruption is computed in other batches, whose products differ by a
    rounding.
    """
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(
            close(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    try:  # the harness writes log-probabilities as texts
        return math.isclose(float(found), float(expected), rel_tol=1e-5)
    except (TypeError, ValueError):
        return bool(found == expected)
