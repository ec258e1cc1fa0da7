"""A model and GGUF files of it as one suite: real runs in processes of their own, and `compare`
across the models.
"""

from __future__ import annotations

import json
import math

import gguf
import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.gguf_files import Kind, gguf_of
from tests.helpers.real_runs import flexgen_helm, run_suite
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

pytestmark = pytest.mark.slow

ENTRIES = ("simple_mcqa", "simple_mcqa_scored")
MODELS = ("original", "q8", "q4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    config = llama_config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, max_position_embeddings=600
    )
    save_random(folder / "Tiny", config, seed=3)
    save_tokenizer(folder / "Tiny")
    for kind in (Kind.Q8_0, Kind.Q4_0):
        gguf_of(folder / "Tiny", folder / f"Tiny-{kind.name}.gguf", kind)
    paths = {"original": "Tiny", "q8": "Tiny-Q8_0.gguf", "q4": "Tiny-Q4_0.gguf"}
    (folder / "models.yaml").write_text(json.dumps(paths))
    return folder


@pytest.fixture(scope="module")
def suite(folder):
    return run_suite(
        folder,
        *(f"{entry}:model=flexgen/{model}" for entry in ENTRIES for model in MODELS),
        instances=30,
    )


def compared(folder, baseline, *more):
    done = flexgen_helm(folder, "compare", "--suite", "s", "--baseline", baseline, "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["models"][baseline]


def right(suite, entry, model):
    """Whether each instance is right, from HELM's file."""
    stats = json.loads(
        (suite / f"{entry}:model=flexgen_{model}" / "per_instance_stats.json").read_text()
    )
    return {
        one["instance_id"]: stat["mean"]
        for one in stats
        for stat in one["stats"]
        if stat["name"]["name"] == "exact_match" and "perturbation" not in stat["name"]
    }


def test_records_say_what_the_files_have(suite, folder):
    for name, file in (("q8", "Tiny-Q8_0.gguf"), ("q4", "Tiny-Q4_0.gguf")):
        record = json.loads(
            (suite / f"simple_mcqa:model=flexgen_{name}" / "flexgen_run.json").read_text()
        )
        sizes: dict[str, int] = {}
        for tensor in gguf.GGUFReader(folder / file).tensors:
            sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(
                tensor.n_bytes
            )
        assert record["checkpoint_bytes"] == sizes and set(sizes) == {file[5:9], "F32"}
    record = json.loads(
        (suite / "simple_mcqa:model=flexgen_original" / "flexgen_run.json").read_text()
    )
    parameters = AutoModelForCausalLM.from_pretrained(folder / "Tiny").num_parameters()
    assert record["checkpoint_bytes"] == {"F16": 2 * parameters}


def test_the_original_bears_verdicts_and_flips(suite, folder):
    found = compared(folder, "original", "--flips", "flips.jsonl")
    assert found["full_precision"] and found["baseline"].startswith(
        "flexgen/original in fp16; at rest 100 % "
    )
    assert found["remedy"] == "" and not any(
        "inconclusive" in one["text"] for one in found["equivalence"].values()
    )
    flips = [json.loads(line) for line in (folder / "flips.jsonl").read_text().splitlines()]
    for one in found["comparisons"]:
        if one["metric"] != "exact_match":
            continue
        base, other = (
            right(suite, one["run"], "original"),
            right(suite, one["run"], one["precision"]),
        )
        lost = {key for key in base if base[key] > other[key]}
        assert one["instances"] == len(base) == 30 and one["flips"]["lost"] == len(lost)
        assert math.isclose(one["value"], sum(other.values()) / 30)
        assert lost == {
            flip["instance"]
            for flip in flips
            if (flip["run"], flip["model"], flip["direction"])
            == (one["run"], one["precision"], "lost")
        }
    assert {flip["model"] for flip in flips} >= {"q4"}  # of random weights 4 bits change answers
    page = (suite / "flexgen_compare.html").read_text()
    assert '<th scope="col">model</th>' in page and "Models against flexgen/original" in page


def test_a_quantized_baseline_is_inconclusive_and_names_the_original(suite, folder):
    found = compared(folder, "q8")
    assert "at rest 9" in found["baseline"] and "% Q8_0" in found["baseline"]
    assert {one["text"] for one in found["equivalence"].values()} == {
        "inconclusive: no full-precision baseline"
    }
    assert found["remedy"] == "flexgen-helm compare --suite s --baseline original"
    argv = found["remedy"].split()[1:]
    assert flexgen_helm(folder, *argv).returncode == 0
