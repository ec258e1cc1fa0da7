"""Random samples that grow until a time: their order, the sizes of blocks, and scores without
bias.
"""

import math
import time
from collections import namedtuple
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from flexgen_helm.plugin.sample_blocks import (
    LOOKS,
    joining_shares,
    largest_block,
    largest_sample,
    possible_shares,
)
from flexgen_helm.plugin.suite_sample import ComputedPart, SuiteSample
from flexgen_helm.report.metrics import metric_named
from flexgen_helm.report.paired import PairedScores

INSTANCES = 600


def ids(count, split="test"):
    return [(f"id{number}", split) for number in range(count)]


def order(entry, instances, seed=0):
    shares = joining_shares(entry, instances, seed)
    return sorted(shares, key=lambda key: shares[key])


def test_an_order_is_of_entry_and_seed_alone():
    """So it is that of all models; a larger -m only puts further instances between."""
    assert (
        order("a", ids(50))
        == order("a", ids(50)[::-1])
        != order("b", ids(50))
        != order("a", ids(50), seed=1)
    )
    few = {key for key, _ in ids(50)}
    assert [key for key in order("a", ids(80)) if key in few] == order("a", ids(50))
    # Trials, references and perturbations of an instance join with it.
    assert joining_shares("a", ids(9) * 3, 0) == joining_shares("a", ids(9), 0)


def test_a_sample_has_the_same_share_of_each_split_and_at_least_one_instance():
    shares = joining_shares("a", [*ids(7, "valid"), *((f"t{n}", "test") for n in range(100))], 0)
    for share in possible_shares(100):
        joined = sum(key.startswith("t") for key, at in shares.items() if at < share)
        assert joined == np.ceil(100 * share - 1e-9)
        assert sum(at < share for at in shares.values()) - joined == np.ceil(7 * share - 1e-9) >= 1
    assert (
        possible_shares(100)[-1] == 1.0
        and possible_shares(1) == [1.0]
        and possible_shares(100)[0] <= 0.01
    )


WORK, BEGUN = [1, 10, 100, 1000, 10_000], [(1, 200.0), (1000, 91.0), (10_000, 100.0)]


@pytest.mark.parametrize(
    "work, measured, left_s, largest",
    [
        (WORK, [], 1.0, 0),
        (WORK, [(10, 1.0)], 1e9, 1),  # at most eight times as large
        (WORK, [(10_000, 1000.0)], 1e9, 4),
        (WORK, [(10_000, 1000.0)], 126.1, 3),
        (WORK, [(10_000, 1000.0)], 125.9, 2),
        ([9], [(9, 1.0)], 1.5, None),  # nine answers say less
        # Reading the weights takes 90 s of every block, so a smaller block takes hardly less.
        (WORK, BEGUN, 70.0, None),
        (WORK, BEGUN, 127.0, 4),
        (WORK, BEGUN[1:], 70.0, 3),  # the first block has compiled something besides
        (WORK, [(1000, 100.0)], 0.0, None),
        ([40, 50], [(2, 1.0)], 100.0, 0),  # the smallest is always allowed
    ],
)
def test_blocks_grow_with_what_was_measured(work, measured, left_s, largest):
    assert largest_block(work, measured, left_s) == largest


class Machine:
    """A simulated clock: a block takes a while, so long for each token, and a few percent more or
    less.
    """

    def __init__(self, lengths, begin_s, noise, until, seed):
        joining = joining_shares("entry", ids(len(lengths)), seed)
        self.joining = np.array([joining[f"id{number}"] for number in range(len(lengths))])
        self.lengths, self.begin_s, self.noise, self.until = lengths, begin_s, noise, until
        self.now, self.draw, self.blocks = 0.0, np.random.default_rng(seed), 0

    def compute(self, joined, share):
        part = (self.joining >= joined) & (self.joining < share)
        seconds = (self.begin_s + self.lengths[part].sum()) * np.exp(
            self.noise * self.draw.normal()
        )
        self.blocks += 1
        if joined == 0 and self.now + seconds > self.until:
            self.now = self.until
            raise TimeoutError
        self.now += seconds
        return seconds

    def sample(self):
        shares = possible_shares(len(self.lengths))
        return self.joining < largest_sample(
            self.joining, shares, lambda: self.until - self.now, self.compute
        )


@pytest.mark.parametrize("until", [None, 30.0])
def test_a_run_that_is_cut_has_unbiased_scores(until):
    """500 cuts, at random times and at one time. Long answers are wrong, and take long: the worst
    case.
    """
    draw = np.random.default_rng(1)
    lengths = draw.gamma(2.0, 0.05, INSTANCES)  # 60 s in all
    right = (draw.random(INSTANCES) < np.exp(-6 * lengths)).astype(float)
    assert np.corrcoef(lengths, right)[0, 1] < -0.3
    cuts = []
    for seed in range(500):
        machine = Machine(lengths, 0.5, 0.05, draw.uniform(5, 60) if until is None else until, seed)
        cuts.append(right[machine.sample()].mean())
    error = np.std(cuts, ddof=1) / np.sqrt(len(cuts))
    assert abs(np.mean(cuts) - right.mean()) < 2 * error


def test_a_block_that_has_begun_is_finished():
    """Only the first one, without which there is no sample, is given up at the end of the time."""
    asked = namedtuple("Asked", "requests instances")(range(40), ids(40))
    limits, until = [], time.time() + 1000
    block = SimpleNamespace(responses=lambda: {0: SimpleNamespace(is_cached=False)})

    def compute_part(part, until):
        limits.append(until)
        return ComputedPart(0.0, [block])

    SuiteSample(until, None).compute({"a": asked}, until, compute_part, lambda: False)
    assert limits[0] == until and len(limits) > 2 and set(limits[1:]) == {math.inf}


def test_what_is_finished_first_would_be_biased():
    """The guard's inverse: answers that are done by a time, with all at work at once, are the short
    ones.
    """
    lengths = np.random.default_rng(1).gamma(2.0, 0.05, INSTANCES)
    right = lengths < np.median(lengths)
    assert right[lengths < 0.15].mean() > right.mean() + 0.1


@pytest.mark.parametrize("begin_s, used", [(0.0, 0.8), (1.0, 0.8), (10.0, 0.4)])
def test_most_of_the_time_is_used_in_few_blocks(begin_s, used):
    """10 s of each block are its beginning: five blocks leave half of the time."""
    machines = [Machine(np.full(1000, 0.2), begin_s, 0.1, 100.0, seed) for seed in range(100)]
    samples = [machine.sample().sum() for machine in machines]
    assert all(machine.now <= 110.0 for machine in machines), "what has begun is finished"
    assert (
        np.median(samples) > used * (100 - begin_s) / 0.2 and max(m.blocks for m in machines) <= 7
    )


# Looks, until all pairs are decided

SEQUENCES, SIZE, MARGIN = 2000, 1000, 0.03


@cache
def p_values(lost, won, count):
    """Of 'not equivalent', and of 'no change' where it is worse."""
    scores = np.repeat([0.0, 1.0, 0.5], [lost, won, count - lost - won])
    paired = PairedScores(metric_named("exact_match"), 1 - scores, scores, np.ones(count))
    return paired.equivalence_p_value(MARGIN), paired.p_value() if lost > won else 1.0


def claims(difference, flips, level=lambda share, before: 0.05 * (share - before)):
    """Of 2,000 sequences of looks, how many claim 'equivalent', and how many 'worse', at a look of
    their own choice.
    """
    draw = np.random.default_rng(1)
    found = {"equivalent": 0, "worse": 0}
    for _ in range(SEQUENCES):
        outcomes = draw.random(SIZE)
        lost, won = outcomes < (flips + difference) / 2, outcomes > 1 - (flips - difference) / 2
        claimed = set()
        for share, before in zip(LOOKS, [0.0, *LOOKS]):
            number = int(np.ceil(SIZE * share))
            p = p_values(int(lost[:number].sum()), int(won[:number].sum()), number)
            claimed |= {claim for claim, value in zip(found, p) if value <= level(share, before)}
        for claim in claimed:
            found[claim] += 1 / SEQUENCES
    return found


@pytest.mark.parametrize(
    "difference, flips, wrong",
    [
        (MARGIN, 0.03, "equivalent"),  # at the margin; all flips are losses
        (MARGIN, 0.10, "equivalent"),
        (0.04, 0.08, "equivalent"),  # beyond it
        (0.0, 0.05, "worse"),
        (0.0, 0.20, "worse"),
        (-0.01, 0.05, "worse"),
    ],
)
def test_a_sequence_of_looks_is_wrong_in_at_most_5_percent(difference, flips, wrong):
    """Whatever the rule is that ends the sequence: also if a claim at any of the looks counts."""
    assert claims(difference, flips)[wrong] <= 0.05 + 1e-9


@pytest.mark.parametrize(
    "difference, flips, wrong", [(0.0, 0.2, "worse"), (MARGIN, 0.03, "equivalent")]
)
def test_looks_at_the_whole_level_would_be_wrong_more_often(difference, flips, wrong):
    assert claims(difference, flips, lambda share, before: 0.05)[wrong] > 0.05


def test_looks_decide_what_is_clear():
    assert claims(0.0, 0.02)["equivalent"] > 0.9 and claims(0.10, 0.12)["worse"] > 0.99
    assert LOOKS[-1] == 1.0 and sorted(LOOKS) == LOOKS
