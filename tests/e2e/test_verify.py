"""`flexgen-helm verify` on real runs: it says equal of what is, and finds one changed answer if it is drawn."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.opening import fingerprint_elsewhere
from flexgen_helm.report.verification import read_bundle, write_bundle
from tests.helpers.chat_models import CHATML
from tests.helpers.data_sets import FAKE_PASSAGES, PAGES, write_data
from tests.helpers.real_runs import flexgen_helm, run_suite
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

ENTRIES = (
    "simple_classification:",
    "simple_mcqa_scored:",
    "lambada:mode=accuracy,",
    "lambada:mode=perplexity,",
    "wikitext:max_length=50,",
)
RUN = "lambada:mode=accuracy,model=flexgen_tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    # Every token has a text, as those have that models are trained with.
    save_random(folder / "model", llama_config(max_position_embeddings=3000, vocab_size=315), seed=5)
    save_tokenizer(folder / "model")
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    write_data(folder / "data", FAKE_PASSAGES, PAGES)
    (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(folder / "model")}}))
    return folder


@pytest.fixture(scope="module")
def suite(folder):
    entries = [f"{entry}model=flexgen/tiny" for entry in ENTRIES]
    return run_suite(
        folder,
        *entries,
        instances=5,
        more=("--precision", "fp16,8bit", "--system-prompt", "Be brief.", "--batch-invariant"),
    )


@pytest.fixture
def verify(folder, suite):
    return partial(flexgen_helm, folder, "verify")


def changed(suite, change, file="scenario_state.json"):
    """Name of a suite with one FP16 run, whose file is changed."""
    copy = suite.with_name("changed")
    shutil.rmtree(copy, ignore_errors=True)
    (run,) = (path for path in suite.glob(f"{RUN}*") if not path.name.endswith("8bit"))
    shutil.copytree(run, copy / run.name)
    content = json.loads((run / file).read_text())
    change(content)
    (copy / run.name / file).write_text(json.dumps(content, indent=2))
    return copy.name


def test_what_was_computed_in_company_is_equal_alone(verify):
    done = verify("s", "--sample", "100%")
    assert done.returncode == 0, done.stdout + done.stderr
    total = done.stdout.partition(" of ")[0]
    assert done.stdout == f"{total} of {total} answers equal to the bit; these are all of the {total} answers of 's'\n"
    done = verify("s", "--json")
    found = json.loads(done.stdout)
    assert (found["drawn"], found["different"]) == (20, 0) and found["population"] == int(total) > 25
    assert found["bound"] == pytest.approx(1 - 0.05 ** (1 / 20))
    assert all(answer["equal"] and answer["tolerance"] == 0 for answer in found["answers"])


def _text(completion):
    completion["text"] += "!"


def _last_bit(completion):
    completion["tokens"][2]["logprob"] = math.nextafter(completion["tokens"][2]["logprob"], 0)


def _sum(completion):
    completion["logprob"] += 1e-9


def _end(completion):
    completion["finish_reason"]["reason"] = "stop"


@pytest.mark.parametrize("change", [_text, _last_bit, _sum, _end])
def test_a_changed_answer_is_found_where_it_is_drawn(verify, suite, change):
    name = changed(suite, lambda content: change(content["request_states"][1]["result"]["completions"][0]))
    done = verify(name, "--sample", "100%", "--bundle", "b.jsonl.zst")
    assert done.returncode == 1 and "b.jsonl.zst is not written" in done.stderr, done.stdout + done.stderr
    assert (
        done.stdout.count(" differs at ") == 1 and "\n  prompt    '" in done.stdout and "\n  recorded  " in done.stdout
    )
    last = done.stdout.splitlines()[-1]
    assert last == "4 of 5 answers equal to the bit; these are all of the 5 answers of 'changed'"
    for seed in range(4) if change is _text else ():
        is_drawn = np.random.default_rng(seed).choice(5, 1, replace=False)[0] == 1
        assert verify(name, "--sample", "1", "--seed", str(seed)).returncode == is_drawn


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"hardware": {"name": "another"}}, "5 of 5 answers equal within 0.0001 (name: 'another' in the record, "),
        ({"versions": {"torch": "2.0.0"}}, "5 of 5 answers equal within 0.0001 (torch: '2.0.0' in the record, "),
        (
            {"hardware": {"device": "cuda:0", "compute_dtype": "float16"}, "batch_invariant": None, "fingerprint": ""},
            "5 of 5 answers equal within 0.0001 (the run had no --batch-invariant, ",
        ),
        (
            {"batch_invariant": ["z80", "0", "1"], "fingerprint": ""},
            "5 of 5 answers equal within 0.0001 (another kind of processor, ",
        ),
        ({"fingerprint": "0123456789abcdef"}, "has the fingerprint '0123456789ab' in the record and '"),
    ],
)  # fmt: skip
def test_records_of_other_machines(verify, suite, folder, change, sentence):
    def apply(record):
        for key, value in change.items():
            record[key] = {**record[key], **value} if isinstance(value, dict) else value
        if not record["fingerprint"]:
            options = EngineConfig(precision="fp16", system_prompt="Be brief.")
            device, dtype = (record["hardware"][key] for key in ("device", "compute_dtype"))
            bits = record["batch_invariant"] or ()
            record["fingerprint"] = fingerprint_elsewhere(str(folder / "model"), options, device, dtype, bits)

    done = verify(changed(suite, apply, "flexgen_run.json"), "--sample", "100%")
    assert sentence in done.stdout + done.stderr
    assert done.returncode == (2 if "has the" in sentence else 0)


def test_transformers_computes_the_same_and_finds_what_is_changed(verify, suite):
    def change(content):
        completion = content["request_states"][2]["result"]["completions"][0]
        completion["tokens"][-1]["text"] = "q"
        completion["text"] = "".join(token["text"] for token in completion["tokens"])

    done = verify("s", "--with", "transformers", "--sample", "100%")
    assert done.returncode == 2 and "8bit is another model; leave --with out" in done.stderr
    for path in list(suite.glob("*8bit")):
        shutil.move(path, suite.parent.parent / path.name)
    done = verify("s", "--with", "transformers", "--sample", "100%")
    for path in suite.parent.parent.glob("*8bit"):
        shutil.move(path, suite / path.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers equal within 0.001 (by transformers in float32; the largest difference is " in done.stdout
    done = verify(changed(suite, change), "--with", "transformers", "--sample", "100%")
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("4 of 5 answers equal within 0.001")
    assert "differs at '[0].text'" in done.stdout


def test_a_stranger_checks_a_bundle(verify, suite, folder, tmp_path):
    path = tmp_path / "s.jsonl.zst"
    done = verify("s", "--sample", "15", "--bundle", str(path))
    assert done.returncode == 0, done.stderr
    population = done.stdout.split(" of the ")[1].split()[0]
    bundle = str(path)
    done = verify(bundle)
    assert done.returncode == 0, done.stderr
    end = f"with 95 % confidence at most 19 % of the {population} answers of 's' differ\n"
    assert done.stdout == f"15 of 15 answers equal to the bit; {end}"
    named = verify(bundle, "--sample", "3", "--model", str(folder / "model"))
    assert named.returncode == 0 and named.stdout.startswith("3 of 3 answers equal to the bit; with 95 % confidence")
    manifest, drawn = read_bundle(path)
    for change, why in (
        ({"fingerprint": "0" * 64}, "has the fingerprint '000000000000' in the record"),
        ({"model": "nobody--nothing"}, "the bundle's model 'nobody--nothing' from "),
        ({"precision": "x"}, "precision 'x' is not available"),
        ({"model": "model"}, "the bundle's model 'model' from "),  # a folder where the command runs
    ):
        lies = replace(manifest, sources=[replace(source, **change) for source in manifest.sources])
        write_bundle(path, lies, drawn)
        done = verify(bundle)
        assert done.returncode == 2 and why in done.stderr and len(done.stderr.splitlines()) < 12, done.stderr
    odd = {
        "hardware": {"device": "cpu", "name": "x" * 9999, "loops": 3},
        "chat_template": {"kwargs": 5},
        "versions": {"torch": 1},
    }
    write_bundle(path, replace(manifest, sources=[replace(source, **odd) for source in manifest.sources]), drawn)
    done = verify(bundle)
    assert done.returncode == 0 and "equal within 0.0001 (name: 'xxx" in done.stdout and len(done.stdout) < 999, (
        done.stdout
    )
    requests = [replace(request, prompt_token_ids=[1 << 40]) for request in drawn[0].requests]
    write_bundle(path, manifest, [replace(drawn[0], requests=requests)])
    done = verify(bundle)
    assert done.returncode == 2 and "cannot be computed" in done.stderr


def test_a_gpu_compares_within_a_tolerance(verify):
    """It refuses --batch-invariant, so it computes without; here one that is simulated."""
    done = verify("s", "--device", "sim", "--gpu-memory", "1GiB", "--sample", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("4 of 4 answers equal within 0.0001 (another kind of processor, ")


def test_nothing_to_draw_from_is_refused(verify, suite):
    done = verify("nothing-there")
    assert done.returncode == 2 and "there is no suite in " in done.stderr
    done = verify(changed(suite, lambda content: content.pop("request_states")), "--json")
    assert done.returncode == 2 and "cannot be read ('request_states'); make it again with" in done.stderr
