"""`bench accuracy` without its measurements: how the harness is found, called and read, and what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flexgen_helm.benchmarks import Options, accuracy
from flexgen_helm.benchmarks.accuracy import Harness, TaskResult
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.scenarios import lambada, wikitext
from tests.helpers.data_sets import PAGES

SETTINGS = {"model": "m", "max_length": 2048, "prefix_token_id": 0, "documents": 2}


def leave(folder: Path, task: str, rows: list[dict[str, Any]], **metrics: float) -> None:
    """Write results as lm_eval does, as far as they are read."""
    below = folder / "some__model"
    below.mkdir(parents=True)
    results = {f"{task}_local": {f"{name},none": value for name, value in metrics.items()}}
    (below / "results_2026.json").write_text(json.dumps({"results": results}))
    (below / f"samples_{task}_local_2026.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_lm_evals_results_are_read_in_the_datas_order(tmp_path):
    rows = [{"doc_id": 1, "filtered_resps": [["-2.5", "True"]]}, {"doc_id": 0, "filtered_resps": [["-5.0", "False"]]}]
    leave(tmp_path / "a", "lambada_openai", rows, acc=0.5, perplexity=42.5)
    found = accuracy.read_harness(tmp_path / "a", "lambada_openai", 2)
    assert found == TaskResult({"acc": 0.5, "perplexity": 42.5}, [(-5.0, False), (-2.5, True)])
    with pytest.raises(FlexgenError, match="2 documents of 3"):
        accuracy.read_harness(tmp_path / "a", "lambada_openai", 3)
    leave(tmp_path / "w", "wikitext", [{"doc_id": 0, "filtered_resps": ["-70.5"]}], word_perplexity=30.0)
    assert accuracy.read_harness(tmp_path / "w", "wikitext", 1).documents == [(-70.5, None)]
    with pytest.raises(FlexgenError, match="left no results"):
        accuracy.read_harness(tmp_path / "empty", "wikitext", 1)


def test_the_harness_gets_its_own_task_on_local_data(tmp_path):
    harness = Harness("/lmeval/bin/python", Path("/lmeval/lm_eval"), {})
    command = accuracy.harness_command(harness, "wikitext", tmp_path / "data", tmp_path, tmp_path / "out", 7)
    definition = yaml.safe_load((tmp_path / "tasks" / "wikitext_local.yaml").read_text())
    assert definition["include"] == "/lmeval/lm_eval/tasks/wikitext/wikitext.yaml"
    assert definition["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "data" / "pages.jsonl")
    assert not {"doc_to_text", "doc_to_target", "metric_list", "process_results"} & set(definition)
    assert command[:4] == ["/lmeval/bin/python", "-m", "lm_eval", "run"]
    model = command[command.index("--model_args") + 1]
    assert "dtype=float32" in model and "max_length=2048" in model and "prefix_token_id=7" in model


def test_both_sides_read_the_same_texts(tmp_path, monkeypatch):
    pages = wikitext.split_pages("\n".join(PAGES))
    folder = accuracy.write_data(tmp_path / "data", ["one passage", "déjà vu"], pages)
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(folder))
    assert lambada.read_passages() == ["one passage", "déjà vu"]
    assert wikitext.read_pages() == pages
    theirs = [json.loads(line)["page"] for line in (folder / "pages.jsonl").read_text().splitlines()]
    assert theirs == pages


@pytest.mark.parametrize("python, words", [(None, "needs a Python"), ("/no/such/python", "cannot be run")])
def test_a_missing_harness_is_refused_with_a_remedy(python, words, monkeypatch):
    monkeypatch.delenv(accuracy.PYTHON_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=f"{words}.*pip install 'lm_eval.*--python") as refused:
        accuracy.find_harness(python)
    assert accuracy.PYTHON_VARIABLE in str(refused.value)


def test_a_python_needs_lm_eval(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(UsageError, match="has no lm-evaluation-harness.*lm_eval"):
        accuracy.find_harness(str(python))
    found = {"versions": {"lm_eval": "0.4.13"}, "folder": "/x/lm_eval"}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    monkeypatch.setenv(accuracy.PYTHON_VARIABLE, str(python))
    assert accuracy.find_harness(None) == Harness(str(python), Path("/x/lm_eval"), {"lm_eval": "0.4.13"})


def test_a_folder_with_results_of_another_run_is_refused(tmp_path):
    accuracy.claim_folder(tmp_path / "kept", SETTINGS)
    accuracy.claim_folder(tmp_path / "kept", dict(SETTINGS))
    with pytest.raises(UsageError, match="1024.*name another folder"):
        accuracy.claim_folder(tmp_path / "kept", {**SETTINGS, "max_length": 1024})


@pytest.mark.parametrize("flags", [{"entry": "x"}, {"repeats": 2}])
def test_flags_that_would_be_ignored_are_refused(flags):
    with pytest.raises(UsageError, match=next(iter(flags))):
        accuracy.run(Options(**flags))


def sides(word_perplexity: float = 30.0) -> tuple[Any, Any, Any]:
    """Return our runs, their documents, and the harness's results; equal by default."""
    stats = {
        "exact_match": 0.5, "target_perplexity": 20.0, "word_perplexity": word_perplexity, "byte_perplexity": 1.9,
        "bits_per_byte": 0.93, "token_perplexity": 17.0,
    }  # fmt: skip
    run = SimpleNamespace(
        stats={f"{name} test": value for name, value in stats.items()},
        seconds=1.0,
        records=[{"hardware": {"cpu": "x"}}],
    )
    documents = {
        "accuracy": [{"exact_match": 0.0}, {"exact_match": 1.0}],
        "perplexity": [{"logprob": -5.0}, {"logprob": -2.5001}],
        "wikitext": [{"logprob": -70.5}],
    }
    theirs = {
        "lambada_openai": TaskResult({"acc": 0.5, "perplexity": 20.0}, [(-5.0, False), (-2.5, True)]),
        "wikitext": TaskResult(
            {"word_perplexity": 30.0, "byte_perplexity": 1.9, "bits_per_byte": 0.93}, [(-70.5, None)]
        ),
    }
    return dict.fromkeys(("accuracy", "perplexity", "wikitext"), run), documents, theirs


def test_the_result_says_whether_the_figures_are_equal():
    harness = Harness("python", Path("x"), {"lm_eval": "0.4.13"})
    result = accuracy._result(*sides(), harness)
    json.dumps(result, allow_nan=False)
    assert result["equal"] and len(result["rows"]) == len(accuracy.FIGURES)
    assert result["agreement"]["passages_with_the_same_verdict"] == 2
    assert result["agreement"]["largest_difference_of_target_logprob"] == pytest.approx(1e-4)
    assert result["versions"]["reference lm_eval"] == "0.4.13"
    assert "lm_eval" not in result["rows"][-1]  # the harness reports none by token
    # Inverse: a difference beyond the tolerance, a verdict that is another, a document that is missing.
    assert not accuracy._result(*sides(30.04), harness)["equal"]
    ours, documents, theirs = sides()
    documents["accuracy"].reverse()
    assert accuracy._result(ours, documents, theirs, harness)["agreement"]["passages_with_the_same_verdict"] == 0
    documents["wikitext"] = []
    with pytest.raises(FlexgenError, match="0 documents of wikitext, lm_eval 1"):
        accuracy._result(ours, documents, theirs, harness)
