"""The cheapest equivalent precision: costs, and the column of `compare`."""

from __future__ import annotations

import numpy as np
import pytest

from flexgen_helm import cli
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.choice import costs
from flexgen_helm.report.comparison import compare_suite
from tests.helpers.suites import accuracies, write_run

COUNT = 500
SECONDS = {"fp16": 8.0, "fp16-s": 6.0, "4bit": 3.0, "4bit-s": 2.0, "paper-4bit": 4.0}


def write_suite(
    folder, wrong, count=COUNT, seconds=SECONDS, entries=("mc:mode=a", "boolq"), **more
):
    """wrong: precision -> wrong answers of each entry."""
    for precision in {"fp16": 0, **wrong}:
        for name in entries:
            right = np.ones(count)
            right[: wrong.get(precision, 0)] = 0
            texts = {f"id{i}": f"{name} {i}" for i in range(count)}
            scores = {"exact_match": right.mean()}
            write_run(
                folder,
                name,
                precision,
                scores,
                accuracies(right),
                latency=seconds[precision],
                texts=texts,
                **more,
            )
    return folder


def cheapest(folder):
    (model,) = compare_suite(folder)
    return {what: name for name, cost in costs(model).items() for what in cost.cheapest}


def test_the_cheapest_equivalent_one_is_marked(tmp_path, capsys):
    wrong = {"4bit": 0, "4bit-s": 200, "paper-4bit": 0, "fp16-s": 0}
    suite = write_suite(tmp_path / "runs" / "mine", wrong, seconds={**SECONDS, "4bit": 9.0})
    assert cheapest(suite) == {"time": "paper-4bit", "memory": "4bit"}
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "Next: take 4bit, the cheapest equivalent one by memory" in printed
    (row,) = [
        line for line in printed.splitlines() if line.startswith("paper-4bit") and "by time" in line
    ]
    assert "equivalent within 1 %" in row


def test_memory_is_that_of_packed_weights(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "paper-4bit": 0, "fp16-s": 0})
    (model,) = compare_suite(tmp_path)
    found = costs(model)
    weights = PRECISIONS["4bit"].weights
    assert (
        found["4bit"].weight_bytes
        == weights.packed_bytes(weights.group_size, 512) / weights.group_size / 512
    )
    assert (found["fp16"].weight_bytes, found["fp16"].cache_bytes) == (2, 2)
    assert found["4bit"].seconds_per_token == SECONDS["4bit"] / 1000


@pytest.mark.parametrize(
    "stored, size, by_memory",
    [
        ({"F16": 2000, "F32": 8}, 2, "4bit"),
        ({"Q4_1": 5000, "Q8_0": 1062.5}, 6062.5 / 9000, "4bit"),
        ({"Q2_K": 84000, "F32": 40}, 84040 / 256010, "fp16"),
        ({"GPTQ of 4 bits": 5000, "F16": 200}, None, None),
    ],
)
def test_published_weights_count_as_they_rest(tmp_path, stored, size, by_memory):
    write_suite(tmp_path, {"4bit": 0}, seconds={"fp16": 8.0, "4bit": 9.0}, checkpoint_bytes=stored)
    (model,) = compare_suite(tmp_path)
    assert costs(model)["fp16"].weight_bytes == (size if size is None else pytest.approx(size))
    assert cheapest(tmp_path) == {"time": "fp16", **({"memory": by_memory} if by_memory else {})}


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_an_unquantized_cache_has_the_compute_type_of_the_runs(tmp_path, dtype, size):
    write_suite(tmp_path, {"4bit-cache": 0}, seconds={"fp16": 8.0, "4bit-cache": 1.0},
                hardware={"device": "cpu", "compute_dtype": dtype})  # fmt: skip
    (model,) = compare_suite(tmp_path)
    assert [cost.cache_bytes for cost in costs(model).values()] == [size, 4.5 / 8]


def test_without_an_equivalent_one_it_is_the_baseline(tmp_path, capsys):
    suite = write_suite(tmp_path / "runs" / "mine", {"4bit": 0, "4bit-s": 50}, count=200)
    assert cheapest(suite) == {"time": "fp16", "memory": "fp16"}
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "the least that all of the data can show" not in printed
    assert "Next: run boolq with -m 620, mc:mode=a with -m 620; stored answers are not" in printed
    suite = write_suite(tmp_path / "runs" / "other", {"4bit-s": 50}, count=200)
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "other"]) == 0
    assert "Next: stay with fp16" in capsys.readouterr().out


def test_a_precision_that_lacks_runs_cannot_be_the_cheapest(tmp_path):
    write_suite(tmp_path, {"4bit": 0})
    write_run(tmp_path, "boolq", "4bit-s", {"exact_match": 1.0}, accuracies(np.ones(COUNT)), latency=1.0,
              texts={f"id{i}": f"boolq {i}" for i in range(COUNT)})  # fmt: skip
    assert cheapest(tmp_path) == {"time": "4bit", "memory": "4bit"}


def test_nor_can_one_with_an_entry_that_has_no_verdict(tmp_path):
    write_suite(tmp_path, {"4bit": 0})
    for precision in ("fp16", "4bit"):
        values = {f"id{i}": {"classification_macro_f1": 0.5} for i in range(4)}
        write_run(tmp_path, "judge", precision, {"classification_macro_f1": 0.7}, values)
    assert cheapest(tmp_path)["memory"] == "fp16"


def test_what_has_no_time_is_not_the_cheapest_by_it(tmp_path):
    write_suite(tmp_path / "a", {"4bit": 0}, seconds={"fp16": 2.0, "4bit": 0.0})
    assert cheapest(tmp_path / "a") == {"time": "fp16", "memory": "4bit"}
    write_suite(tmp_path / "b", {"4bit": 0}, seconds={"fp16": 0.0, "4bit": 1.0})
    assert cheapest(tmp_path / "b") == {"memory": "4bit"}
