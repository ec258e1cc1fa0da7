"""`flexgen-helm divergence --suite` on real runs: it compares the tokens whose log-probabilities
HELM's files have.
"""

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from functools import partial

import pytest

from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.chat_models import CHATML
from tests.helpers.data_sets import FAKE_PASSAGES, PAGES, write_data
from tests.helpers.real_runs import flexgen_helm, run_suite
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

GENERATED = ("simple_classification", "lambada:mode=accuracy")
SCORED = ("lambada:mode=perplexity", "simple_mcqa_scored", "wikitext:max_length=50")
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template, which some of its generated prompts go through and others do
    not.
    """
    folder = tmp_path_factory.mktemp("divergence")
    save_random(folder / "model", llama_config(max_position_embeddings=3000), seed=5)
    save_tokenizer(folder / "model")
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": CHATML})
    )
    write_data(folder / "data", FAKE_PASSAGES, PAGES)
    (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(folder / "model")}}))
    return folder


@pytest.fixture(scope="module")
def command(folder):
    return partial(flexgen_helm, folder)


@pytest.fixture(scope="module")
def suite(folder):
    entries = [
        f"{entry}{',' if ':' in entry else ':'}model=flexgen/tiny"
        for entry in (*GENERATED, *SCORED)
    ]
    return run_suite(folder, *entries, instances=5, more=("--precision", "fp16,8bit"))


@pytest.fixture(scope="module")
def found(suite, command, folder):
    """The divergence of each run entry."""
    done = command("divergence", "tiny", "--suite", "s", "--precision", "8bit", "--json")
    assert done.returncode == 0, done.stderr
    (folder / "kl.json").write_text(done.stdout)
    content = json.loads(done.stdout)
    assert (content["model"], content["suite"]) == ("tiny", "s")
    return {each["entry"]: each["precisions"][0] for each in content["entries"]}


def written(suite, entry, precision, tokenizer):
    """Log-probabilities of the tokens that make the scores, by request, from HELM's file."""
    suffix = "" if precision == "fp16" else f"-{precision}"
    run = suite / f"{entry}{',' if ':' in entry else ':'}model=flexgen_tiny{suffix}"
    logprobs = []
    for state in json.loads((run / "scenario_state.json").read_text())["request_states"]:
        own = [token["logprob"] for token in state["result"]["completions"][0]["tokens"]]
        if "reference_index" in state:
            text = state["instance"]["references"][state["reference_index"]]["output"]["text"]
            own = own[-len(tokenizer.encode(f" {text}", add_special_tokens=False)) :]
        logprobs.append(own[state["num_conditioning_tokens"] :])
    return logprobs


@pytest.mark.parametrize("entry", [*GENERATED, *SCORED])
def test_it_compares_the_tokens_that_the_scores_are_made_of(suite, found, folder, entry):
    tokenizer = Tokenizer.from_path(folder / "model")
    assert tokenizer is not None and set(found) == {*GENERATED, *SCORED}
    own = found[entry]
    base = [logprob for request in written(suite, entry, "fp16", tokenizer) for logprob in request]
    assert own["tokens"] == len(base) > 5 and own["documents"] >= 3
    assert own["baseline_perplexity"] == pytest.approx(math.exp(-sum(base) / len(base)), rel=1e-5)
    assert own["kl"]["tokens"] == len(base) and 0 < own["kl"]["mean"] < own["kl"]["largest"]
    if entry in SCORED:  # both precisions read the same tokens, so the other run has them too
        other = [
            logprob for request in written(suite, entry, "8bit", tokenizer) for logprob in request
        ]
        assert own["perplexity"] == pytest.approx(math.exp(-sum(other) / len(other)), rel=1e-5)
        assert own["perplexity"] != pytest.approx(own["baseline_perplexity"], rel=1e-5)


def test_what_cannot_be_found_is_refused_by_name(suite, folder, command):
    argv = ["--suite", "changed", "--precision", "8bit"]
    changed = suite.with_name("changed")
    shutil.copytree(suite, changed, dirs_exist_ok=True)
    refused = command("divergence", "opt-125m", *argv)
    assert (
        refused.returncode == 2
        and "has no run of opt-125m in fp16; in fp16 it has tiny" in refused.stderr
    )
    file = changed / "simple_classification:model=flexgen_tiny" / "scenario_state.json"
    content = json.loads(file.read_text())
    content["request_states"][1]["result"]["completions"][0]["logprob"] += 1e-6
    file.write_text(json.dumps(content, indent=2))
    refused = command("divergence", "tiny", *argv)
    assert refused.returncode == 2 and "1 answer of " in refused.stderr
    assert "is not in the response cache as the run has them" in refused.stderr
    (journal,) = (path for path in (folder / "home" / "journal").iterdir() if _has_run(suite, path))
    journal.rename(folder / "aside")
    refused = command("divergence", "tiny", *argv)
    (folder / "aside").rename(journal)
    assert refused.returncode == 2 and " are not in the response cache" in refused.stderr


def _has_run(suite, journal):
    """Whether the file has the answers of the FP16 runs."""
    run = json.loads(
        (suite / "simple_classification:model=flexgen_tiny" / "flexgen_run.json").read_text()
    )
    return journal.stem == run["fingerprint"]
