"""Made-up data in the files that scenarios read, and the harness's definition of a page's score."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from helm.benchmark.scenarios.legalbench_scenario import SUBSETS

from flexgen_helm.scenarios import lambada, wikitext
from tests.helpers.helm_runs import MODEL

Score = Callable[[list[int]], list[float]]
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "as",
    "with",
    "by",
    "he",
]


def write_data(folder: Path, passages: Sequence[str], pages: Sequence[str]) -> Path:
    folder.mkdir()
    (folder / lambada.FILE).write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in passages)
    )
    (folder / wikitext.FILE).write_text("\n".join(pages))
    return folder


def invented_page(title: str, words: int) -> str:
    text = random.Random(title).choices(WORDS, k=words)
    return f" = {title} = \n \n " + " ".join(text) + " , 1 @,@ 000 . \n "


PAGES = [invented_page("One", 30), invented_page("Two", 90), invented_page("Three", 55)]


def rolling_logprob(ids: list[int], prefix: int, length: int, score: Score) -> float:
    """By the harness's definition: rolling windows of `length` inputs, whose last predictions
    count.

    score(ids) = log p(ids[i] | ids[:i]) for every i.
    """
    text, total, predicted = [prefix, *ids], 0.0, 0
    while predicted < len(ids):
        counted = min(length, len(ids) - predicted)
        predicted += counted
        inputs_and_last = text[max(0, predicted - length) : predicted + 1]
        total += sum(score(inputs_and_last)[-counted:])
    return total


FAKE_PASSAGES = [f"{' '.join(WORDS[i : i + 6])} word{i}" for i in range(6)]
FAKE_ENTRIES = [
    f"lambada:mode=accuracy,model={MODEL}",
    f"lambada:mode=perplexity,model={MODEL}",
    f"wikitext:model={MODEL}",
    f"wikitext:max_length=50,model={MODEL}",
]


def write_legalbench_settings(output_path: Path) -> None:
    """The file that HELM otherwise fetches to make a run spec of LegalBench: five lines, each a
    JSON object.
    """
    values: Sequence[object] = ([["Text", "text"]], "Is it so?", "answer", "Label", None)
    path = output_path / "scenarios" / "legalbench" / "prompt_construction_settings.json"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(json.dumps(dict.fromkeys(SUBSETS, value)) for value in values))


COLUMNS = ["index", "name", "city", "state", "note"]


def write_table(path: Path, rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def write_hospital(folder: Path, rows: int = 60) -> set[tuple[int, str]]:
    """Both tables; returns the places that differ."""
    draw, wrong = random.Random(3), set()
    clean = [[i, f"clinic {i % 7}, main", f"town {i % 5}", "al", "empty"] for i in range(rows)]
    dirty = [list(row) for row in clean]
    for i in range(0, rows, 4):
        column = draw.randrange(1, 4)
        dirty[i][column] = str(dirty[i][column]).replace("n" if column < 3 else "a", "x", 1)
        wrong.add((i, COLUMNS[column]))
    write_table(folder / "dirty.csv", [COLUMNS, *dirty])
    write_table(folder / "clean.csv", [["Index", "Name", "Town", "State", "Note"], *clean])
    return wrong
