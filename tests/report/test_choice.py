"""`compare --choose`: halves, costs, the level at the margin by simulation, the stated power, and the command."""

from __future__ import annotations

import json
import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm import cli
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report import choice, verdicts
from flexgen_helm.report.choice import PairedEntry, choose_precision, judge_half, select
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.run_files import is_in_second_half, read_instances
from flexgen_helm.report.scores import read_finished_runs
from flexgen_helm.report.shares import equivalence_p_value, instances_needed
from tests.helpers.flips import claims, draw_flips
from tests.helpers.shares import share_of
from tests.helpers.suites import accuracies, request_state, write_run

# ---- halves ----


def write_states(folder, states):
    (folder / "scenario_state.json").write_text(json.dumps({"request_states": states}, indent=2))
    return {key: is_in_second_half(digest) for key, digest in read_instances(folder).items()}


@given(st.lists(st.text(max_size=8), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_halves_follow_the_text_alone(tmp_path_factory, texts, random):
    """In any order, under other ids, with other references and more trials, an instance stays in its half."""
    folder = tmp_path_factory.mktemp("run")
    texts = [text or "?" for text in texts]
    first = write_states(folder, [request_state(f"id{i}", text) for i, text in enumerate(texts)])
    half = {text: first[f"id{i}"] for i, text in enumerate(texts)}
    assert all(half[text] == first[f"id{i}"] for i, text in enumerate(texts))  # repeated texts go together
    states = [request_state(f"other{i}", text) for i, text in enumerate(texts)]
    for state in states:
        state["instance"]["references"] = random.sample(state["instance"]["references"], 1)
    trials = [{**state, "train_trial_index": 1} for state in states]
    random.shuffle(states)
    second = write_states(folder, [*states, *trials])
    assert second == {f"other{i}": half[text] for i, text in enumerate(texts)}


def test_halves_are_the_same_on_every_machine_and_about_equal(tmp_path):
    found = write_states(tmp_path, [request_state(f"id{i}", f"question {i}") for i in range(2000)])
    assert "".join(str(int(found[f"id{i}"])) for i in range(32)) == "00001010010100000110111111000001"
    assert abs(sum(found.values()) - 1000) < 3.3 * math.sqrt(500)


def test_minimal_pairs_have_no_text_and_are_halved_by_their_references(tmp_path):
    found = write_states(tmp_path, [request_state(f"id{i}", "") for i in range(200)])
    assert 60 < sum(found.values()) < 140


# ---- the level and the power, by simulation ----


@pytest.fixture
def quick(monkeypatch):
    """Few distinct counts of flips occur; each is judged once."""
    monkeypatch.setattr(verdicts, "equivalence_p_value", lru_cache(maxsize=None)(equivalence_p_value))
    monkeypatch.setattr(choice, "paired_test", lambda ours, theirs: None)


def entry(draw, count, lost, won, name="mc"):
    """A precision that loses and wins these shares of the instances, which are halved at random."""
    base, other = np.ones(count), np.ones(count)
    num_lost, num_won = draw_flips(draw, count, lost, won, 1)[0]
    places = draw.permutation(count)
    other[places[:num_lost]] = 0
    base[places[num_lost : num_lost + num_won]] = 0
    return PairedEntry(name, "exact_match", base, other, np.ones(count), draw.random(count) < 0.5)


def is_chosen(ordered, margin):
    """The precision that is chosen and confirmed, or None."""
    first, second = select(ordered, margin)
    return list(first)[-1] if second is not None and second.is_equivalent else None


SIZES = [
    (50, 0.15, 400),
    (500, 0.02, 300),
    pytest.param(50, 0.2, share_of(4000, 4), marks=pytest.mark.slow),
    pytest.param(500, 0.03, share_of(4000, 4), marks=pytest.mark.slow),
    pytest.param(5000, 0.01, share_of(2000, 8), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("count, margin, times", SIZES)
def test_a_precision_at_the_margin_is_taken_in_at_most_5_percent(quick, count, margin, times):
    """Five precisions, each worse by the margin, so every one that is taken is an error."""
    draw = np.random.default_rng(count)
    taken = sum(
        is_chosen({str(i): [entry(draw, count, margin + 0.002, 0.002)] for i in range(5)}, margin) is not None
        for _ in range(times)
    )
    assert taken / times <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / times)


def test_without_the_second_half_the_level_is_not_kept(quick):
    """The inverse: twenty precisions at the margin, chosen by all instances, and confirmed by the same or by others."""
    draw, margin, times, same, halved, chosen = np.random.default_rng(8), 0.03, 60, 0, 0, 0
    for _ in range(times):
        ordered = {str(i): [entry(draw, 1000, margin + 0.002, 0.002)] for i in range(20)}
        first, second = select(ordered, margin)
        chosen += second is not None
        halved += second is not None and second.is_equivalent
        all_instances = {
            name: [PairedEntry("mc", "exact_match", e.baseline, e.other, e.weights, np.zeros(1000, bool))]
            for name, (e,) in ordered.items()
        }
        same += any(judge_half(entries, False, margin).is_equivalent for entries in all_instances.values())
    assert same / times > 0.3 and chosen / times > 0.3
    assert halved / times <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / times)


def test_one_entry_at_the_margin_among_equal_ones_keeps_the_level(quick):
    draw, margin, times = np.random.default_rng(9), 0.03, 150
    taken = 0
    for _ in range(times):
        entries = [entry(draw, 2000, 0.001, 0.001, name) for name in "ab"] + [entry(draw, 1000, 0.032, 0.002, "c")]
        taken += is_chosen({"4bit": entries}, margin) is not None
    assert taken / times <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / times)


def test_perplexities_at_the_margin_keep_the_level_and_equal_ones_are_taken(quick):
    """Documents of unequal lengths, whose total has a standard error of a fifth of the margin in each half."""
    draw, margin, times = np.random.default_rng(13), 0.01, 40
    taken = {}
    for mean in (math.log1p(margin), 0.0):
        found = []
        for _ in range(times):
            weights = draw.integers(500, 5000, 100).astype(float)
            losses = 3 * weights, 3 * weights + weights * (mean + 0.002 * math.sqrt(50) * draw.normal(size=100))
            pair = PairedEntry("wiki", "word_perplexity", -losses[0], -losses[1], weights, np.arange(100) % 2 == 1)
            found.append(is_chosen({str(i): [pair] for i in range(2)}, margin) is not None)
        taken[mean] = np.mean(found)
    assert taken[0.0] >= 0.8 and taken[math.log1p(margin)] <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / times)


@pytest.mark.fast(2)
@pytest.mark.parametrize("num_entries", [1, 3])
@pytest.mark.parametrize("flips", [0.004, 0.02])
def test_an_equal_precision_is_taken_with_the_stated_power(quick, num_entries, flips):
    """The number that a small pilot states, for the same share of flips; over all entries and both halves."""
    draw, margin, times = np.random.default_rng(10), 0.02, 100
    needed = 2 * instances_needed(flips, margin, 0.8 ** (1 / (2 * num_entries)))
    taken = 0
    for _ in range(times):
        entries = [entry(draw, needed, flips / 2, flips / 2, str(i)) for i in range(num_entries)]
        taken += is_chosen({"4bit": entries}, margin) is not None
    assert taken / times >= 0.8 - 2 * math.sqrt(0.16 / times)


@pytest.mark.parametrize("power", [0.8**0.5, 0.97])
@pytest.mark.parametrize("flips", [0.001, 0.01, pytest.param(0.05, marks=pytest.mark.slow)])
def test_the_number_of_instances_has_any_power(power, flips):
    assert claims(instances_needed(flips, 0.02, power), 0.02, flips / 2, flips / 2) >= power


def test_the_text_states_the_number_for_both_halves():
    draw = np.random.default_rng(11)
    pilot = entry(draw, 400, 0.0, 0.0)
    taken = ~pilot.is_second
    verdict = judge_half([pilot], False, 0.01)
    needed = 2 * instances_needed(0.5 / (taken.sum() + 1), 0.01, 0.8**0.5)
    assert verdict.needed == needed and not verdict.is_equivalent
    assert verdict.text == f"not decided: about {verdicts.two_digits(needed):,} instances of a run entry would decide"
    limited = PairedEntry("mc", "exact_match", *(np.ones(400),) * 3, pilot.is_second, has_all=True)
    assert judge_half([limited], False, 0.01).text.endswith("would decide, and the data of mc has fewer")
    near = entry(np.random.default_rng(12), 20_000, 0.0084, 0.0)
    texts = {judge_half([near], False, 0.01).text, judge_half([near], False, 0.005).text}
    assert "worse in mc" in texts


def test_an_entry_without_two_instances_in_a_half_decides_nothing():
    right = np.ones(2000)
    whole = PairedEntry("a", "exact_match", right, right, right, np.arange(2000) % 2 == 1)
    tiny = PairedEntry("b", "exact_match", *(np.ones(3),) * 3, np.array([True, True, False]))
    assert judge_half([whole], False, 0.01).is_equivalent
    verdict = judge_half([whole, tiny], False, 0.01)
    assert not verdict.is_equivalent and verdict.text == "not decided: too few instances of b"


def test_the_second_half_decides_nothing_before_it_confirms():
    """The cheapest that is equivalent on the first half is taken or none: no second try on the second half."""
    right, is_second = np.ones(2000), np.arange(2000) % 2 == 1
    worse_later = np.where(is_second & (np.arange(2000) < 200), 0.0, 1.0)

    def pair(other):
        return [PairedEntry("a", "exact_match", right, other, right, is_second)]

    first, second = select({"4bit": pair(worse_later), "8bit": pair(right)}, 0.01)
    assert list(first) == ["4bit"] and second.text == "worse in a"
    first, second = select({"4bit": pair(worse_later[::-1]), "8bit": pair(right)}, 0.01)
    assert list(first) == ["4bit", "8bit"] and second.is_equivalent
    assert select({}, 0.01) == ({}, None)


# ---- costs, sentences and the command ----

COUNT = 1000
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
    return choose_precision(model, read_finished_runs(folder), baseline, 0.01, by)


def test_the_cheapest_equivalent_one_is_taken(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "4bit-s": 200, "paper-4bit": 0, "fp16-s": 0})
    found = choose(tmp_path)
    assert (found.precision, found.is_confirmed) == ("4bit", True)
    assert [each.precision for each in found.candidates] == ["4bit-s", "4bit", "paper-4bit", "fp16-s", "fp16"]
    sums = [each.first.instances + each.second.instances for each in found.candidates if each.second]
    assert sums == [2 * COUNT]
    assert [each.first.text if each.first else None for each in found.candidates] == [
        "worse in boolq, mc:mode=a", "equivalent within 1 % or pp", None, None, None
    ]  # fmt: skip
    assert found.text.startswith(
        "take 4bit: it is the cheapest by time (0.38 of fp16's seconds per token) that is equivalent to fp16 within "
        "1 % or pp in 2 run entries, chosen on "
    )
    assert found.command == "flexgen-helm run -r ENTRY:model=flexgen/tiny -m N --precision 4bit"


def test_memory_has_its_own_order(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "paper-4bit": 0, "fp16-s": 0}, seconds={**SECONDS, "4bit": 9.0})
    assert choose(tmp_path).precision == "paper-4bit"
    found = choose(tmp_path, "memory")
    sizes = [(each.weight_bytes, each.cache_bytes) for each in found.candidates]
    assert sizes == sorted(sizes) and sizes[-1] == (2, 2)
    smallest = min(("4bit", "paper-4bit"), key=lambda name: choice._costs([], set(), name).cost("memory"))
    assert found.precision == smallest
    weights = PRECISIONS[smallest].weights
    assert found.candidates[0].weight_bytes == weights.packed_bytes(weights.group_size, 512) / weights.group_size / 512


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_an_unquantized_cache_has_the_compute_type_of_the_runs(tmp_path, dtype, size):
    hardware = {"device": "cpu", "compute_dtype": dtype}
    write_suite(tmp_path, {"8bit": 0, "4bit-cache": 0}, seconds={**SECONDS, "8bit": 1.0, "4bit-cache": 1.0},
                hardware=hardware)  # fmt: skip
    found = choose(tmp_path, "memory")
    assert {each.precision: each.cache_bytes for each in found.candidates} == {
        "fp16": size, "8bit": size, "4bit-cache": 4.5 / 8
    }  # fmt: skip
    assert f"and {size:.2f} per element of the KV cache, fp16 has 2.00 and {size:.2f}" in found.text


def test_what_is_not_cheaper_is_not_taken(tmp_path):
    write_suite(tmp_path, {"4bit": 0}, seconds={"fp16": 2.0, "4bit": 2.0})
    found = choose(tmp_path)
    assert (found.precision, found.is_confirmed) == ("fp16", False)
    assert found.text == "stay with fp16: no other precision is cheaper by time"
    assert choose(tmp_path, "memory").precision == "4bit"


def test_too_few_instances_are_said_with_the_number_that_would_decide(tmp_path):
    write_suite(tmp_path, {"4bit": 0, "4bit-s": 50}, count=200)
    found = choose(tmp_path)
    assert found.precision == "fp16" and "--precision fp16" in found.command
    assert "no cheaper precision is equivalent on the half that chooses" in found.text
    assert "4bit-s: worse in boolq, mc:mode=a; 4bit: not decided: about " in found.text
    needed = {each.precision: each.first.needed for each in found.candidates if each.first}
    assert needed["4bit-s"] is None and needed["4bit"] > 1000


def test_a_confirmation_that_fails_is_said(tmp_path):
    """Instances of the second half alone are wrong."""
    write_suite(tmp_path, {"4bit": 0}, entries=("boolq",))
    folder = tmp_path / "boolq,model=flexgen_tiny-4bit"
    digests = read_instances(folder)
    right = {key: float(not is_in_second_half(digest)) for key, digest in digests.items()}
    lost = [key for key, value in right.items() if not value][:100]
    scores = {key: {"exact_match": float(key not in lost)} for key in digests}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    texts = {key: f"boolq {key.removeprefix('id')}" for key in digests}
    write_run(tmp_path, "boolq", "4bit", {"exact_match": 1 - 100 / COUNT}, scores, texts=texts)
    found = choose(tmp_path)
    assert (found.precision, found.is_confirmed) == ("fp16", False)
    assert "stay with fp16: 4bit was chosen on " in found.text and "do not confirm it (worse in boolq)" in found.text


def test_a_precision_that_lacks_runs_cannot_be_chosen(tmp_path):
    write_suite(tmp_path, {"4bit": 0})
    right = np.ones(COUNT)
    write_run(tmp_path, "boolq", "4bit-s", {"exact_match": 1.0}, accuracies(right), latency=1.0,
              texts={f"id{i}": f"boolq {i}" for i in range(COUNT)})  # fmt: skip
    found = choose(tmp_path)
    assert found.precision == "4bit"
    assert found.text.endswith("; 4bit-s cannot be chosen, because not all 2 run entries were judged")


def test_a_precision_without_a_time_cannot_be_chosen_by_it(tmp_path):
    write_suite(tmp_path, {"4bit": 0}, seconds={"fp16": 2.0, "4bit": 0.0})
    found = choose(tmp_path)
    assert found.precision == "fp16" and found.candidates[-1].seconds_per_token is None
    assert "; 4bit cannot be chosen by time, because it is not known" in found.text
    assert choose(tmp_path, "memory").precision == "4bit"


def test_a_model_that_cannot_be_judged_has_no_choice(command, tmp_path, capsys):
    for precision in ("fp16", "4bit"):
        write_run(tmp_path / "runs" / "mine", "one", precision, {"exact_match": 1.0}, accuracies([1]), model="other")
    assert cli.main([*command, "--json", "--choose"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert models["other"]["choice"] is None and models["tiny"]["choice"]["precision"] == "4bit"
    assert cli.main([*command, "--choose"]) == 0
    text = capsys.readouterr().out
    assert "flexgen/tiny: take 4bit" in text and "1 other model has no precision that can be judged" in text


def test_pools_are_chosen_by_all_their_instances(tmp_path):
    write_suite(tmp_path, {"4bit": 0}, count=400, entries=[f"mmlu:subject={i}" for i in range(6)])
    found = choose(tmp_path)
    assert found.precision == "4bit" and "in 1 run entry" in found.text


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "device, shares, is_resident",
    [("cpu", {"cpu": 1.0}, True), ("cpu", {"cpu": 0.4, "disk": 0.6}, False), ("cuda", {"gpu": 0.0, "cpu": 1.0}, False)],
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
    assert (found["precision"], found["by"], found["is_confirmed"], found["margin"]) == ("4bit", "time", True, 0.01)
    assert [each["precision"] for each in found["candidates"]] == ["4bit", "fp16"]
    assert found["candidates"][0]["second"]["is_equivalent"] is True


def test_what_cannot_be_judged_is_refused(tmp_path, capsys):
    one = tmp_path / "runs" / "one"
    write_suite(one, {}, count=4)
    other = tmp_path / "runs" / "other"
    for precision in ("fp16", "4bit"):
        values = {f"id{i}": {"ratings": 3.0} for i in range(4)}
        write_run(other, "judge", precision, {"exact_match": 1.0}, values)
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "one", "--choose"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "other", "--choose"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_runs_without_texts_or_times_are_refused(tmp_path, capsys):
    folder = write_suite(tmp_path / "runs" / "mine", {"4bit": 0}, count=400, seconds={"fp16": 0.0, "4bit": 1.0})
    command = ["compare", "-o", str(tmp_path), "--suite", "mine", "--choose"]
    assert cli.main(command) == 2
    assert "the time of flexgen/tiny in fp16 is not known" in capsys.readouterr().err
    assert cli.main([*command, "--by", "memory"]) == 0
    (folder / "boolq,model=flexgen_tiny" / "scenario_state.json").unlink()
    capsys.readouterr()
    assert cli.main([*command, "--by", "memory"]) == 2
    assert "boolq of flexgen/tiny in fp16 has no texts" in capsys.readouterr().err
