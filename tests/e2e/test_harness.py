"""LAMBADA and WikiText-2 of a real model beside lm-evaluation-harness, passage by passage.

`data/lm_eval_reference.json` holds what lm_eval 0.4.13 answered for the first passages and pages
(`benchmarks/accuracy.py` says how it was called): numbers only. One number of each kind is computed
anew by `transformers` here, so that the file cannot be wrong unnoticed.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from flexgen_helm.scenarios import lambada, wikitext
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.data_sets import rolling_logprob, write_data
from tests.helpers.helm_runs import figures
from tests.helpers.paths import DATA
from tests.helpers.real_runs import run_suite
from tests.helpers.shares import IS_WHOLE, share_of

REFERENCE: dict[str, Any] = json.loads((DATA / "lm_eval_reference.json").read_text())
RUNS = {
    "accuracy": "lambada:mode=accuracy,model=flexgen/wheel",
    "perplexity": "lambada:mode=perplexity,model=flexgen/wheel",
    "wikitext": "wikitext:model=flexgen/wheel",
}
RELATIVE = 1e-3
PASSAGES = share_of(500, 5)
PAGES = (0, 1, 2) if IS_WHOLE else (0,)


@pytest.fixture(scope="module")
def data(shared_data):
    """Passages and pages that the file has numbers of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_HELM_DATA", str(shared_data))
        passages, pages = lambada.read_passages(), wikitext.read_pages()
    return passages[:PASSAGES], [pages[index] for index in PAGES]


@pytest.fixture(scope="module")
def runs(wheel_model, data, tmp_path_factory):
    """One `flexgen-helm run` over them, with a response cache of its own."""
    folder = tmp_path_factory.mktemp("accuracy")
    (folder / "models.yaml").write_text(json.dumps({"wheel": {"path": str(wheel_model)}}))
    write_data(folder / "data", *data)
    suite = run_suite(folder, *RUNS.values(), instances=len(data[0]))
    return {name: suite / run.replace("/", "_") for name, run in RUNS.items()}


def by_document(folder, name):
    found = {}
    for row in json.loads((folder / "per_instance_stats.json").read_text()):
        for stat in row["stats"]:
            if stat["name"]["name"] == name:
                found[int(row["instance_id"].removeprefix("id"))] = stat["sum"]
    return [found[index] for index in sorted(found)]


@pytest.mark.slow
def test_lambada_equals_the_harness(runs, data):
    num_passages = len(data[0])
    logprobs, hits = zip(*REFERENCE["lambada_openai"][:num_passages])
    assert by_document(runs["accuracy"], "exact_match") == list(hits)
    assert figures(runs["accuracy"])["exact_match"] == sum(hits) / num_passages
    assert by_document(runs["perplexity"], "logprob") == pytest.approx(list(logprobs), abs=1e-3)
    perplexity = figures(runs["perplexity"])["target_perplexity"]
    assert perplexity == pytest.approx(math.exp(-sum(logprobs) / num_passages), rel=RELATIVE)
    # Inverse: the numbers of other passages are not ours.
    other = [logprob for logprob, _ in REFERENCE["lambada_openai"][: num_passages // 2]]
    assert perplexity != pytest.approx(math.exp(-sum(other) / len(other)), rel=RELATIVE)


@pytest.mark.slow
def test_wikitext_equals_the_harness(runs, data):
    logprobs = [REFERENCE["wikitext"][index] for index in PAGES]
    assert by_document(runs["wikitext"], "logprob") == pytest.approx(logprobs, rel=1e-4)
    found, loss = figures(runs["wikitext"]), -sum(logprobs)
    sizes = [wikitext.page_size(page) for page in data[1]]
    words, size = (sum(one[name] for one in sizes) for name in ("words", "bytes"))
    assert found["word_perplexity"] == pytest.approx(math.exp(loss / words), rel=RELATIVE)
    assert found["byte_perplexity"] == pytest.approx(math.exp(loss / size), rel=RELATIVE)
    assert found["bits_per_byte"] == pytest.approx(loss / size / math.log(2), rel=RELATIVE)


@pytest.mark.slow
def test_the_numbers_of_the_harness_are_those_of_transformers(wheel_model, data, tmp_path):
    """Straight from the definitions, for the first passages and the first page."""
    import torch
    from transformers import AutoModelForCausalLM

    from flexgen_helm.benchmarks.reference import export
    from flexgen_helm.checkpoint.open import open_checkpoint

    export(open_checkpoint(wheel_model), tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_path(wheel_model)
    assert tokenizer is not None

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)

    def score(ids: list[int]) -> list[float]:
        found = logprobs(ids[:-1])
        return [0.0, *(found[i, token].item() for i, token in enumerate(ids[1:]))]

    for passage, (expected, hit) in zip(data[0][:12], REFERENCE["lambada_openai"]):
        ids = tokenizer.encode(passage, add_special_tokens=False)
        context = len(tokenizer.encode(passage.rpartition(" ")[0], add_special_tokens=False))
        found = logprobs(ids[:-1])[context - 1 :]
        assert sum(row[token].item() for row, token in zip(found, ids[context:])) == pytest.approx(
            expected, abs=1e-3
        )
        assert (found.argmax(-1).tolist() == ids[context:]) == bool(hit)
    ids = tokenizer.encode(wikitext.detokenize(data[1][0]), add_special_tokens=False)
    (prefix,) = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    page = rolling_logprob(ids, prefix, 2048, score)
    assert page == pytest.approx(REFERENCE["wikitext"][0], rel=1e-4)
