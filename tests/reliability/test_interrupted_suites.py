"""SIGKILL anywhere in a suite, and the same command again: nothing is lost but the last few
answers.

The runs are real: HELM, the engine, a conversion, the response cache. Steps are counted, so every
phase is hit.
"""

from __future__ import annotations

import json
import random
import shutil
import signal

import pytest

from tests.helpers.killed_suites import MAX_PENDING, Outcome, Suites, pickled_model
from tests.helpers.shares import share
from tests.helpers.small_disks import read_only, small_disk

# the last two: of results too
PHASES = ("load", "convert", "compute", "draw", "cache", "write", "rename")


@pytest.fixture(scope="module")
def suites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    with Suites(folder, pickled_model(folder / "model")) as suites:
        yield suites


@pytest.fixture(scope="module")
def whole(suites):
    """The suite without an interruption."""
    outcome = suites.run("whole")
    assert outcome.code == 0, outcome.output
    assert {name.split("-")[0] for name in outcome.steps} == set(PHASES)
    assert len(outcome.computed) == len(set(outcome.computed))
    return outcome


def same(suites: Suites, name: str, other: str = "whole") -> bool:
    return json.dumps(suites.results(name), sort_keys=True) == json.dumps(
        suites.results(other), sort_keys=True
    )


def kill_and_go_on(suites: Suites, whole: Outcome, folder: str, points: list[int]) -> None:
    """Kill the suite at each point, counted in the steps of the whole one, then let it end."""
    computed: list[str] = []
    killed = 0
    for point in points:
        outcome = suites.run(folder, at=point)
        computed += outcome.computed
        if outcome.code == 0:  # a resumed suite has fewer steps
            break
        assert outcome.code == -signal.SIGKILL, outcome.output
        killed += 1
    last = suites.run(folder)
    assert last.code == 0, last.output
    computed += last.computed
    assert killed and set(computed) == set(whole.computed)
    assert len(computed) - len(set(computed)) <= MAX_PENDING * killed  # one transaction each time
    assert same(suites, folder)


def points_of(whole: Outcome, phase: str, draw: random.Random) -> int:
    return draw.choice([at for at, name in enumerate(whole.steps) if name.startswith(phase)])


def test_a_killed_suite_gives_the_scores_of_an_uninterrupted_one(suites, whole):
    """Where most of it is not yet in a transaction."""
    last = [at for at, name in enumerate(whole.steps) if name.startswith("cache")][-1]
    kill_and_go_on(suites, whole, "one", [last])


def test_without_transactions_a_killed_suite_loses_everything(suites, whole):
    """The guard's inverse: answers that are kept until the end are gone with the process."""
    first = suites.run("unguarded", name="cache", at=0, unguarded=True)
    assert first.code == -signal.SIGKILL, first.output
    second = suites.run("unguarded")
    assert second.code == 0, second.output
    assert MAX_PENDING < len(set(first.computed) & set(second.computed)) == len(whole.computed)
    assert same(suites, "unguarded")


# Signals that can be caught


@pytest.mark.fast(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_suite_soon_and_keeps_its_answers(suites, whole, number):
    folder = signal.Signals(number).name
    first = suites.run(folder, at=whole.steps.count("compute") // 2, name="compute", number=number)
    assert first.code == 130, first.output
    assert first.seconds_after_signal < 10
    assert "interrupted: " in first.output and "Go on with:\n  flexgen-helm" in first.output
    assert "Traceback" not in first.output
    second = suites.run(folder)
    assert second.code == 0, second.output
    assert set(first.computed) | set(second.computed) == set(whole.computed)
    assert not set(first.computed) & set(second.computed)  # nothing is lost at all
    assert same(suites, folder)


@pytest.mark.fast(1)
@pytest.mark.parametrize("phase", ["convert", "load"])
def test_a_signal_before_the_first_answer_is_no_traceback_either(suites, phase):
    folder = f"term-{phase}"
    first = suites.run(folder, at=0, name=phase, number=signal.SIGTERM)
    assert first.code == 130 and "Traceback" not in first.output, first.output
    assert first.seconds_after_signal < 10
    assert not list((suites.folder / folder).rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("part", share(range(10), 5))
def test_killed_at_fifty_random_points(suites, whole, part):
    """Of five suites each: four are killed at steps of any phase, one at any moment."""
    draw = random.Random(part)
    for number in range(5):
        folder = f"part{part}-{number}"
        if number:
            outcome = suites.run(folder, at=points_of(whole, draw.choice(PHASES), draw))
        else:
            outcome = suites.run(folder, after_s=draw.uniform(0.05, 2.0))
        assert outcome.code in (-signal.SIGKILL, 0), outcome.output
        last = suites.run(folder)
        assert last.code == 0, last.output
        assert set(outcome.computed) | set(last.computed) == set(whole.computed)
        assert len(set(outcome.computed) & set(last.computed)) <= MAX_PENDING
        assert same(suites, folder)


@pytest.fixture(scope="module")
def sampled(suites):
    """The suite with a sample of its instances, without an interruption."""
    outcome = suites.run("sampled", options=["--hours", "1"], blocks=2)
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.fast(1)
@pytest.mark.parametrize("number", range(5))
def test_a_sample_is_the_same_wherever_it_was_killed(suites, whole, sampled, number):
    """At five random points. Then the rest is computed, and only that."""
    folder, options = f"sampled{number}", ["--hours", "1"]
    point = points_of(
        sampled, ("load", "compute", "cache", "write", "rename")[number], random.Random(number)
    )
    killed = suites.run(folder, at=point, options=options, blocks=2)
    assert killed.code == -signal.SIGKILL, killed.output
    last = suites.run(folder, options=options, blocks=2)
    assert last.code == 0, last.output
    assert same(suites, folder, "sampled") and not same(suites, folder)
    rest = suites.run(folder)
    assert rest.code == 0 and same(suites, folder), rest.output
    assert {*killed.computed, *last.computed} == {*sampled.computed}
    assert {*rest.computed} == {*whole.computed} - {*sampled.computed}


@pytest.mark.slow
def test_looks_are_the_same_wherever_they_were_killed(suites):
    """Of two precisions; the suite is scored after each look, and killed while it computes, and
    while it writes.
    """
    options = ["--until-decided", "--precision", "fp16,4bit", "--margin", "45"]
    looked = suites.run("looked", options=options)
    assert looked.code == 0, looked.output
    for number, phase in enumerate(("compute", "rename")):
        killed = suites.run(
            "killed-look", at=points_of(looked, phase, random.Random(number)), options=options
        )
        assert killed.code in (-signal.SIGKILL, 0), killed.output
        assert number or killed.code
    last = suites.run("killed-look", options=options)
    assert last.code == 0 and same(suites, "killed-look", "looked"), last.output
    assert len(suites.results("looked")) == 4


# Disks and memory that do not suffice


@pytest.fixture(name="small_disk")
def small_disk_(suites):
    """A place for suites on a file system of 1.5 MB."""
    with small_disk(suites.folder / "small", 1_500 << 10) as folder:
        yield folder


@pytest.mark.fast(1)
@pytest.mark.parametrize("room", [60_000, 250_000, 450_000])
def test_a_full_disk_ends_a_suite_in_sentences(suites, whole, small_disk, room):
    """What fills up first differs: the conversion, the response cache, HELM's files. Then there is
    room again.
    """
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000 - room))
    first = suites.run("small")
    assert first.code in (1, 2), first.output
    assert "Traceback" not in first.output
    said = [line for line in first.output.splitlines() if line.startswith("flexgen-helm: ")]
    assert said and any("free" in line or "No space left" in line for line in said), first.output
    ballast.unlink()
    second = suites.run("small")
    assert second.code == 0, second.output
    assert same(suites, "small")


def test_a_home_that_cannot_be_written_costs_no_scores(suites, whole):
    """The model needs no conversion here, so nothing must be written: answers are computed and not
    stored.
    """
    path = suites.folder / "readonly"
    assert suites.run("readonly").code == 0
    for name in ("benchmark_output", "prod_env"):
        shutil.rmtree(path / name)
    with read_only(path / "home"):
        outcome = suites.run("readonly", converts=False, options=["--disable-cache"])
    assert outcome.code == 0, outcome.output
    assert same(suites, "readonly")


@pytest.mark.slow
def test_too_little_address_space_loses_nothing(suites, whole):
    """It is refused, because libraries may abort, and threads die, where an allocation fails."""
    outcome = suites.run("space", limits=[("RLIMIT_AS", 6 << 30)])
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("flexgen-helm: ")]
    assert (
        outcome.code == 2
        and "ulimit -v is 6 GiB" in line
        and line.endswith("run: ulimit -v unlimited")
    )
    last = suites.run("space")
    assert last.code == 0, last.output
    assert same(suites, "space")
