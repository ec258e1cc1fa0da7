"""LAMBADA and WikiText-2 through real `helm-run`: figures against a direct computation, and what is
refused.
"""

import json
import math
import random

import pytest

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.report.scores import read_scores
from flexgen_helm.scenarios import lambada, wikitext
from tests.helpers.data_sets import (
    FAKE_ENTRIES,
    FAKE_PASSAGES,
    PAGES,
    WORDS,
    rolling_logprob,
    write_data,
)
from tests.helpers.helm_runs import MODEL, Place, figures
from tests.helpers.paths import ROOT
from tests.helpers.real_runs import run_suite


def expected_wikitext(pages, encode, prefix, length, score):
    texts = [wikitext.detokenize(page) for page in pages]
    loss = -sum(rolling_logprob(encode(text), prefix, length, score) for text in texts)
    # White space at either end of a page separates an empty word.
    words = sum(len(page.split()) + page[0].isspace() + page[-1].isspace() for page in pages)
    size = sum(len(page.encode()) for page in pages)
    return {
        "word_perplexity": math.exp(loss / words),
        "byte_perplexity": math.exp(loss / size),
        "bits_per_byte": loss / size / math.log(2),
        "token_perplexity": math.exp(loss / sum(len(encode(text)) for text in texts)),
    }


# ---- on the fake engine ----


@pytest.fixture(scope="module")
def suite(fake_data, tmp_path_factory):
    """All entries in one `flexgen-helm run`."""
    place = Place(tmp_path_factory.mktemp("suite"))
    place.run("suite", entries=FAKE_ENTRIES)
    return place


def folder_of(place, entry):
    return place.folder / "benchmark_output" / "runs" / "s" / entry.replace("/", "_")


def test_every_instance_has_its_sums_for_paired_comparisons(suite):
    for entry, name in (
        (FAKE_ENTRIES[0], "exact_match"),
        (FAKE_ENTRIES[1], "logprob"),
        (FAKE_ENTRIES[2], "logprob"),
    ):
        rows = json.loads((folder_of(suite, entry) / "per_instance_stats.json").read_text())
        named = [row for row in rows if any(stat["name"]["name"] == name for stat in row["stats"])]
        instances = len(PAGES) if entry.startswith("wikitext") else len(FAKE_PASSAGES)
        assert len({row["instance_id"] for row in named}) == len(named) == instances


def test_the_summary_leads_with_the_precise_names(suite):
    shown = [list(read_scores(folder_of(suite, entry)).scores) for entry in FAKE_ENTRIES[:3]]
    assert shown == [
        ["exact_match"],
        ["target_perplexity"],
        ["word_perplexity", "token_perplexity", "bits_per_byte"],
    ]


def test_files_of_a_run_name_no_folder_of_this_machine(suite):
    for entry in FAKE_ENTRIES:
        assert str(ROOT) not in (folder_of(suite, entry) / "scenario.json").read_text()


def test_without_data_a_suite_refuses_in_one_sentence_and_other_runs_are_kept(
    suite, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    place = Place(tmp_path)
    entries = [f"simple_mcqa:model={MODEL}", FAKE_ENTRIES[0], FAKE_ENTRIES[2]]
    output = place.run("suite", entries=entries, expect=2)
    for line in output.splitlines()[-2:]:
        assert "the data of" in line and "FLEXGEN_HELM_DATA" in line and "from the hub" in line
    assert (place.run_folder("simple_mcqa") / "stats.json").is_file()
    assert place.events()["answer"] == 6


# ---- on a real engine ----


def tiny_passages(model, encode, decode):
    """Passages of which some end in what the model says, of one token and of two, and some do
    not.
    """
    rng, found, hits = random.Random(5), [], {1: 0, 2: 0}
    for _ in range(4000):
        context = " ".join(rng.choices(WORDS, k=6))
        ids = encode(context)
        for length in (1, 2):
            ids = [*ids, int(model.logprobs(ids)[-1].argmax())]
            target = decode(ids[-length:])
            word = target[:1] == " " and target[1:].isalpha() and encode(context + target) == ids
            if word and hits[length] < 3:
                hits[length] += 1
                found.append(context + target)
        if min(hits.values()) == 3:
            break
    assert hits[1], "no passage of the tiny model can be right"
    return found + [" ".join(rng.choices(WORDS, k=7)) for _ in range(6)]


def test_figures_of_a_real_engine_are_those_of_transformers(tiny, tmp_path):
    """The whole way: data, prompts, engine, metrics, with windows bounded by 96 positions."""
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

    model = tiny("llama")
    tokenizer = Tokenizer.from_path(model.path)
    assert tokenizer is not None

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def score(ids):
        logprobs = model.logprobs(ids)
        return [0.0, *(logprobs[i, token].item() for i, token in enumerate(ids[1:]))]

    passages = tiny_passages(model, encode, tokenizer.decode)
    write_data(tmp_path / "data", passages, PAGES)
    (tmp_path / "models.yaml").write_text(json.dumps({"tiny": {"path": str(model.path)}}))
    runs = ["lambada:mode=accuracy,model=flexgen/tiny", "lambada:mode=perplexity,model=flexgen/tiny",
            "wikitext:model=flexgen/tiny"]  # fmt: skip
    suite = run_suite(tmp_path, *runs, instances=100)
    accuracy, perplexity, pages = (figures(suite / run.replace("/", "_")) for run in runs)

    hits, losses = 0, []
    for passage in passages:
        context, target = (len(encode(part)) for part in lambada.split_passage(passage))
        ids = encode(passage)
        target = len(ids) - context
        hits += model.logprobs(ids)[context - 1 : -1].argmax(-1).tolist() == ids[context:]
        losses.append(-sum(score(ids)[-target:]))
    assert 0 < hits < len(passages)
    assert accuracy["exact_match"] == hits / len(passages)
    assert perplexity["target_perplexity"] == pytest.approx(
        math.exp(sum(losses) / len(losses)), rel=1e-4
    )
    expected = expected_wikitext(PAGES, encode, encode("<|endoftext|>")[0], 96, score)
    assert {name: pages[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    # Inverse: windows of another length give another figure.
    other = expected_wikitext(PAGES, encode, encode("<|endoftext|>")[0], 48, score)
    assert pages["word_perplexity"] != pytest.approx(other["word_perplexity"], rel=1e-4)
