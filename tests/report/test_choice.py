"""`compare --choose`: costs, sentences, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flexgen_helm import cli
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.choice import choose_precision
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.paired import LEVEL
from tests.helpers.suites import accuracies, write_run

COUNT = 500
SECONDS = {"fp16": 8.0, "fp16-s": 6.0, "4bit": 3.0, "4bit-s": 2.0, "paper-4bit": 4.0}


def write_suite(folder, wrong, count=COUNT, seconds=SECONDS, entries=("mc:mode=a", "boolq"), **more):
    """wrong: precision -> wrong answers of each entry."""
    for precision in {"fp16": 0, **wrong}:
        for name in entries:
            right = np.ones(count)
            right[: wrong.get(precision, 0)] = 0
            texts = {f"id{i}": f"{name} {i}" for i in range(count)}
            scores = {"exact_match": right.mean()}
            write_run(
                folder, name, precision, scores, accuracies(right), latency=seconds[precision], texts=texts, **more
            )
    return folder


def choose(folder, by="time", baseline="fp16"):
    (model,) = compare_suite(folder, baseline)
    return choose_precision(model, by)


def test_the_cheapest_equivalent_one_is_taken(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "4bit-s": 200, "paper-4bit": 0, "fp16-s": 0})
    found = choose(tmp_path)
    assert found.precision == "4bit" and found.level == LEVEL / 4
    assert [one.precision for one in found.candidates] == ["4bit-s", "4bit", "paper-4bit", "fp16-s", "fp16"]
    equal = "equivalent within 1 % or pp"
    assert [one.verdict for one in found.candidates] == ["worse in boolq, mc:mode=a", equal, equal, equal, ""]
    assert found.text.startswith(
        "take 4bit: it is the cheapest by time (0.38 of fp16's seconds per token) that is equivalent to fp16 within "
        "1 % or pp in 2 run entries, tested at 5 % divided by 4 cheaper precisions"
    )
    assert found.command == "flexgen-helm run -r ENTRY:model=flexgen/tiny -m N --precision 4bit"


def test_memory_has_its_own_order(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "paper-4bit": 0, "fp16-s": 0}, seconds={**SECONDS, "4bit": 9.0})
    assert choose(tmp_path).precision == "paper-4bit"
    found = choose(tmp_path, "memory")
    sizes = [(one.weight_bytes, one.cache_bytes) for one in found.candidates]
    assert sizes == sorted(sizes) and sizes[-1] == (2, 2)
    assert found.precision == found.candidates[0].precision
    weights = PRECISIONS[found.precision].weights
    assert found.candidates[0].weight_bytes == weights.packed_bytes(weights.group_size, 512) / weights.group_size / 512


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_an_unquantized_cache_has_the_compute_type_of_the_runs(tmp_path, dtype, size):
    hardware = {"device": "cpu", "compute_dtype": dtype}
    write_suite(tmp_path, {"8bit": 0, "4bit-cache": 0}, seconds={**SECONDS, "8bit": 1.0, "4bit-cache": 1.0},
                hardware=hardware)  # fmt: skip
    found = choose(tmp_path, "memory")
    assert {one.precision: one.cache_bytes for one in found.candidates} == {
        "fp16": size, "8bit": size, "4bit-cache": 4.5 / 8
    }  # fmt: skip
    assert f"and {size:.2f} per element of the KV cache, fp16 has 2.00 and {size:.2f}" in found.text


def test_too_few_instances_are_said_with_the_number_that_would_decide(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "4bit-s": 50}, count=200)
    found = choose(tmp_path)
    assert found.precision == "fp16" and "--precision fp16" in found.command
    assert "no cheaper precision is equivalent, tested at 5 % divided by 2 cheaper precisions" in found.text
    assert "4bit-s: worse in boolq, mc:mode=a; 4bit: not decided: about " in found.text


def test_a_precision_that_lacks_runs_cannot_be_chosen(tmp_path):
    write_suite(tmp_path, {"4bit": 0})
    right = np.ones(COUNT)
    write_run(tmp_path, "boolq", "4bit-s", {"exact_match": 1.0}, accuracies(right), latency=1.0,
              texts={f"id{i}": f"boolq {i}" for i in range(COUNT)})  # fmt: skip
    found = choose(tmp_path)
    assert found.precision == "4bit"
    assert found.text.endswith("; 4bit-s cannot be chosen, because not all 2 run entries were judged")


def test_what_has_no_time_cannot_be_chosen_by_it(tmp_path):
    write_suite(tmp_path / "a", {"4bit": 0}, seconds={"fp16": 2.0, "4bit": 0.0})
    found = choose(tmp_path / "a")
    assert found.precision == "fp16" and found.candidates[-1].seconds_per_token is None
    assert "; 4bit cannot be chosen by time, because it is not known" in found.text
    write_suite(tmp_path / "b", {"4bit": 0}, seconds={"fp16": 0.0, "4bit": 1.0})
    with pytest.raises(UsageError, match="the time of flexgen/tiny in fp16 is not known"):
        choose(tmp_path / "b")
    assert choose(tmp_path / "a", "memory").precision == choose(tmp_path / "b", "memory").precision == "4bit"


def test_a_model_that_cannot_be_judged_has_no_choice(command, tmp_path, capsys):
    for precision in ("fp16", "4bit"):
        write_run(tmp_path / "runs" / "mine", "one", precision, {"exact_match": 1.0}, accuracies([1]), model="other")
    assert cli.main([*command, "--json", "--choose"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert models["other"]["choice"] is None and models["tiny"]["choice"]["precision"] == "4bit"
    assert cli.main([*command, "--choose"]) == 0
    text = capsys.readouterr().out
    assert "flexgen/tiny: take 4bit" in text and "1 other model has no precision that can be judged" in text


@pytest.mark.parametrize(
    "device, shares, is_resident", [("cpu", {"cpu": 1.0}, True), ("cuda", {"gpu": 0.0, "cpu": 1.0}, False)]
)
def test_times_without_offloading_are_said(tmp_path, device, shares, is_resident):
    write_suite(tmp_path, {"4bit": 0}, achieved_placement={"weights": shares}, hardware={"device": device})
    said = "ran with all weights in the fastest memory" in choose(tmp_path).text
    assert said == is_resident and "fastest memory" not in choose(tmp_path, "memory").text


@pytest.fixture
def command(tmp_path):
    write_suite(tmp_path / "runs" / "mine", {"4bit": 0})
    return ["compare", "-o", str(tmp_path), "--suite", "mine"]


def test_the_command_prints_the_choice_when_asked(command, tmp_path, capsys):
    assert cli.main([*command]) == 0
    assert "take 4bit" not in capsys.readouterr().out
    page = tmp_path / "runs" / "mine" / "flexgen_compare.html"
    assert "take 4bit" not in page.read_text()
    assert cli.main([*command, "--choose"]) == 0
    assert "- choice: take 4bit: it is the cheapest by time" in (text := capsys.readouterr().out)
    assert "- next: flexgen-helm run -r ENTRY:model=flexgen/tiny -m N --precision 4bit" in text
    assert "take 4bit" in page.read_text() and "Which precision, by time" in page.read_text()
    assert cli.main([*command, "--choose", "--by", "memory"]) == 0
    assert "cheapest by memory" in capsys.readouterr().out


def test_json_gets_the_choice_and_no_other_key(command, capsys):
    assert cli.main([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--json", "--choose"]) == 0
    content = json.loads(capsys.readouterr().out)
    found = content["models"]["tiny"].pop("choice")
    assert content == plain
    assert (found["precision"], found["by"], found["level"], found["margin"]) == ("4bit", "time", 0.05, 0.01)
    assert [candidate["precision"] for candidate in found["candidates"]] == ["4bit", "fp16"]


def test_what_cannot_be_judged_is_refused(tmp_path, capsys):
    one = tmp_path / "runs" / "one"
    write_suite(one, {}, count=4)
    second = tmp_path / "runs" / "other"
    for precision in ("fp16", "4bit"):
        values = {f"id{i}": {"ratings": 3.0} for i in range(4)}
        write_run(second, "judge", precision, {"exact_match": 1.0}, values)
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "one", "--choose"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "other", "--choose"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
