"""Statistics that decide: against direct sums, other programs' formulas, and simulations from 50 instances on."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import multinomial, norm

from flexgen_helm import cli
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.paired import (
    PairedScores,
    RatioOfSums,
    inferiority_p_value,
    instances_needed,
    metric_named,
    score_interval,
    tango_score,
)
from flexgen_helm.report.verdicts import Comparison, equivalence, holm, suite_equivalence
from tests.helpers.flips import claims, draw_flips
from tests.helpers.shares import share_of
from tests.helpers.suites import accuracies, write_run

ACCURACY, PERPLEXITY = metric_named("exact_match"), metric_named("target_perplexity")


# ---- standard errors ----


def test_the_error_of_a_mean_is_the_samples():
    right = np.array([1.0, 0, 1, 1, 0, 1, 1])
    error = metric_named("exact_match").standard_error(right, np.ones(7))
    assert error == pytest.approx(scipy.stats.sem(right)) == pytest.approx(math.sqrt(5 / 7 * 2 / 7 / 6))


@pytest.mark.parametrize("name", ["target_perplexity", "bits_per_byte"])
def test_other_errors_are_those_of_a_bootstrap(name):
    draw = np.random.default_rng(0)
    weights = np.ones(800) if name == "target_perplexity" else draw.integers(50, 500, 800).astype(float)
    logprobs = -weights * draw.normal(2.0, 0.4, 800)
    metric = metric_named(name)
    bootstrap = scipy.stats.bootstrap(
        (logprobs, weights), metric.value, paired=True, vectorized=True, n_resamples=2000, random_state=draw
    )
    assert metric.standard_error(logprobs, weights) == pytest.approx(bootstrap.standard_error, rel=0.06)


def test_what_has_no_error():
    metric = metric_named("target_perplexity")
    assert metric.standard_error(np.array([-3.0]), np.ones(1)) is None
    assert metric.standard_error(np.array([-3.0, -math.inf]), np.ones(2)) is None
    assert metric.standard_error(np.array([-3.0, math.nan]), np.ones(2)) is None
    assert metric.value(np.array([-3.0, -5000.0]), np.ones(2)) == math.inf


# ---- shares ----


def direct_score(up: int, down: int, count: int, shift: float) -> float:
    """The score statistic with its likelihood maximized by search."""

    def loss(share: float) -> float:
        same = max(count - up - down, 0)
        return -float(
            up * math.log(share + shift) + down * math.log(share) + same * math.log(max(1 - 2 * share - shift, 1e-300))
        )

    best = minimize_scalar(loss, bounds=(1e-9, (1 - shift) / 2 - 1e-9), method="bounded", options={"xatol": 1e-12}).x
    return (up - down - count * shift) / math.sqrt(count * (2 * best + shift - shift**2))


@pytest.mark.parametrize("up, down, count, shift", [(3, 1, 44, 0.05), (5, 40, 400, 0.02)])
def test_the_score_is_that_of_the_largest_likelihood(up, down, count, shift):
    assert float(tango_score(up, down, count, shift)) == pytest.approx(direct_score(up, down, count, shift), rel=1e-4)


@pytest.mark.parametrize("lost, won, count", [(0, 0, 50), (1, 0, 50), (9, 2, 100), (2, 9, 100), (50, 0, 50), (0, 3, 3)])
def test_the_interval_has_what_the_score_test_does_not_reject(lost, won, count):
    low, high = score_interval(lost, won, count)
    assert -1 <= low < high <= 1 and low <= (won - lost) / count <= high
    assert score_interval(won, lost, count) == pytest.approx((-high, -low))
    for end, up, down in ((high, won, lost), (-low, lost, won)):
        if end < 1:
            assert float(tango_score(up, down, count, end)) == pytest.approx(-norm.ppf(0.975), abs=1e-6)


def test_no_flips_in_50_are_not_no_difference():
    """For no flips the score equation is n d = z^2 (1 - d)."""
    z = norm.ppf(0.975)
    assert score_interval(0, 0, 50) == pytest.approx((-(z**2) / (50 + z**2), z**2 / (50 + z**2)))
    right = np.ones(50)
    assert PairedScores(ACCURACY, right, right, right).interval() == score_interval(0, 0, 50)
    assert PairedScores(metric_named("f1_score"), right / 2, right / 2, right).interval() == score_interval(0, 0, 50)


@pytest.mark.parametrize("count, lost, won", [(50, 0.0, 0.0), (50, 0.02, 0.0), (500, 0.01, 0.01), (5000, 0.06, 0.03)])
def test_the_interval_covers(count, lost, won):
    """Steps of small counts make it cover more or, as every score interval, at times a little less."""
    found = draw_flips(np.random.default_rng(0), count, lost, won, 1500)
    flips, times = np.unique(found, axis=0, return_counts=True)
    ends = np.array([score_interval(int(a), int(b), count) for a, b in flips])
    covers = (ends[:, 0] <= won - lost) & (won - lost <= ends[:, 1])
    assert (covers * times).sum() / times.sum() > 0.93


def test_the_p_value_is_the_largest_of_all_shares_of_flips():
    """Against the sum over all outcomes, for a fine grid of the unknown share."""
    count, margin = 30, 0.15
    outcomes = np.array([(a, b) for a in range(count + 1) for b in range(count + 1 - a)])
    scores = tango_score(outcomes[:, 0], outcomes[:, 1], count, margin)
    shares = np.linspace(0, (1 - margin) / 2, 300)
    for lost, won in ((0, 0), (1, 0), (2, 3), (0, 5), (4, 4)):
        extreme = outcomes[scores <= float(tango_score(lost, won, count, margin)) + 1e-12]
        counts = np.column_stack([extreme, count - extreme.sum(1)])
        sums = [multinomial.pmf(counts, count, [q + margin, q, 1 - 2 * q - margin]).sum() for q in shares]
        found = inferiority_p_value(lost, won, count, margin)
        # Less only where the largest is for shares that the observed won rule out, which costs 0.0001.
        assert found <= max(sums) + 2e-4 and found >= max(sums[: len(sums) * 2 // 3]) - 2e-3
    assert inferiority_p_value(8, 0, count, margin) == 1.0
    # Without flips it is the chance to see none.
    assert inferiority_p_value(0, 0, 299, 0.01) == pytest.approx(0.99**299, abs=2e-4)
    assert inferiority_p_value(0, 0, 299, 0.01) < 0.05
    assert inferiority_p_value(0, 0, 298, 0.01) > 0.05


@pytest.mark.parametrize("count, won", [(50, 0.0), (50, 0.005), (500, 0.0005), (500, 0.002)])
def test_equivalence_is_claimed_in_at_most_5_percent_at_the_margin(count, won):
    """Discordances of 1 to 2 %: with fewer the difference cannot be the margin."""
    assert claims(count, 0.01, won + 0.01, won) <= 0.05


@pytest.mark.parametrize("flips, margin", [(0.001, 0.01), (0.01, 0.01), (0.01, 0.03)])
def test_as_many_instances_as_stated_decide(flips, margin):
    count = instances_needed(flips, margin)
    assert claims(count, margin, flips / 2, flips / 2) >= 0.8


def test_equivalence_of_partial_scores_keeps_the_level():
    """A tenth of the instances loses a tenth: at the margin; scores of F1 that hardly change."""
    draw = np.random.default_rng(3)
    claimed, count = 0, 50
    for _ in range(200):
        base = np.ones(count)
        scores = base - 0.1 * (draw.random(count) < 0.1)
        verdict = equivalence(PairedScores(metric_named("f1_score"), base, scores, base), None)
        claimed += verdict.decision == "equivalent"
    assert claimed / 200 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


# ---- perplexities ----


def loss_changes(draw, count, mean, error_share, kind="normal"):
    """Changes of the loss of documents of unequal lengths, whose total has a standard error of `error_share`."""
    weights = draw.integers(500, 5000, count).astype(float)
    noise = draw.normal(size=count) if kind == "normal" else draw.exponential(size=count) - 1
    return RatioOfSums(weights * (mean + error_share * math.sqrt(count) * noise), weights)


@pytest.mark.parametrize("count, times, kind", [(50, 300, "normal"), (500, 60, "skewed")])
def test_ratios_of_perplexities_cover_and_keep_the_level(count, times, kind):
    draw, margin = np.random.default_rng(4), math.log1p(0.01)
    covers = claimed = 0
    for _ in range(times):
        change = loss_changes(draw, count, margin, margin / 4, kind)
        low, high = change.interval()
        covers += low <= margin <= high
        claimed += change.equivalence_p_value(margin) <= 0.05
    noise = 2 * math.sqrt(0.05 * 0.95 / times)
    assert covers / times >= 0.95 - noise and claimed / times <= 0.05 + noise


def test_few_documents_have_students_t():
    d = np.array([0.5, -0.2, 0.1, 0.4])
    ones = np.ones(4)
    interval = PairedScores(PERPLEXITY, d, 0 * d, ones).interval()
    half = 3.182446 * d.std(ddof=1) / 2
    assert np.log(interval) == pytest.approx((d.mean() - half, d.mean() + half), rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 12])
def test_one_document_that_changes_by_thousands_of_nats_has_an_interval(count):
    """Most samples of a dozen have it once or not at all; its perplexity is beyond a float."""
    base, scores = np.full(count, -10.0), np.full(count, -10.0)
    scores[0] = -9000.0
    paired = PairedScores(PERPLEXITY, base, scores, np.ones(count))
    low, high = paired.interval()
    assert low < high == np.inf
    verdict = equivalence(paired, paired.test())
    assert verdict.decision == "not decided" and verdict.needed > 1000


# ---- verdicts ----


def answers(lost, won, count):
    base, scores = np.ones(count), np.ones(count)
    scores[:lost] = 0
    base[lost : lost + won] = 0
    return PairedScores(ACCURACY, base, scores, np.ones(count))


@pytest.mark.parametrize(
    "lost, won, count, more, text",
    [
        (0, 0, 50, {}, "not decided: about 1,300 instances would decide if there were no difference"),
        (0, 0, 50, {"has_all": True}, "this data set cannot decide: it has 50 instances, and about 1,300 would decide"),
        (0, 0, 500, {}, "equivalent within 1 pp"),
        (60, 60, 5153, {}, "equivalent within 1 pp"),
        (100, 60, 5153, {}, "worse"),
        (60, 100, 5153, {}, "better"),
        (5, 0, 5, {}, "not decided: 5 instances cannot show a difference; at least 6 can"),
        (6, 0, 6, {}, "worse"),
        (70, 50, 2400, {"margin": 0.015}, "not decided: the difference is too near to 1.5 pp for 2,400 instances"),
    ],
)
def test_verdicts_in_words(lost, won, count, more, text):
    paired = answers(lost, won, count)
    assert equivalence(paired, paired.test(), **more).text == text


@st.composite
def paired_samples(draw):
    """A metric, and what two precisions have: shifted by nothing, by less than the noise, or by far more."""
    metric = draw(st.sampled_from([ACCURACY, metric_named("f1_score"), PERPLEXITY]))
    count, noise = draw(st.integers(2, 40) | st.just(400)), np.random.default_rng(draw(st.integers(0, 10**6)))
    shift, spread = draw(st.sampled_from([0, 0.01, 0.1, 0.5])), draw(st.sampled_from([0.003, 0.05, 0.4]))
    changes = noise.normal(-shift, spread, count) * (noise.standard_t(2, count) if draw(st.booleans()) else 1)
    if metric is PERPLEXITY:
        weights = noise.integers(50, 900, count).astype(float)
        baseline = -3 * weights
        return metric, baseline, baseline + changes * weights, weights
    baseline = noise.random(count)
    scores = np.clip(baseline + changes, 0, 1)
    both = (baseline, scores) if metric is not ACCURACY else (np.round(baseline), np.round(scores))
    return metric, *both, np.ones(count)


@given(paired_samples())
@settings(max_examples=share_of(120, 3))
def test_interval_p_and_verdict_never_disagree(sample):
    metric, baseline, scores, weights = sample
    paired = PairedScores(*sample)
    interval, test = paired.interval_and_test()
    verdict = equivalence(paired, test)
    ours, theirs = (metric.value(values, weights) for values in (baseline, scores))
    change, none = (theirs / ours, 1) if metric.change == "ratio" else (theirs - ours, 0)
    low, high = interval
    assert low - 1e-9 * abs(low) <= change <= high + 1e-9 * abs(high)
    assert (test.p_value < 0.05) == (not low <= none <= high)
    if verdict.decision in ("worse", "better"):
        is_higher = (verdict.decision == "better") != (metric is PERPLEXITY)
        assert test.p_value < 0.05 and (low > none if is_higher else high < none)
    elif verdict.decision == "equivalent":
        assert abs(math.log(change) if none else change) <= math.log(1.01) + 1e-9
    else:
        assert test.p_value >= 0.05 and low <= none <= high
    if len(baseline) < 6 and verdict.decision != "equivalent":
        assert verdict.text == f"not decided: {len(baseline)} instances cannot show a difference; at least 6 can"
        assert verdict.needed >= 6
    if "too near" in verdict.text:
        assert abs(math.log(change) if none else change) < 3 * 0.01


def test_a_metric_without_a_margin_has_no_verdict():
    values = np.array([2.0, 3.0])
    assert equivalence(PairedScores(metric_named("ratings"), values, values, np.ones(2)), None) is None
    assert equivalence(PairedScores(ACCURACY, values[:1] / 4, values[:1] / 4, np.ones(1)), None) is None


def test_holm_is_that_of_its_paper():
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([]) == [] and holm([0.05]) == [True] and holm([0.03, 0.03]) == [False, False]


def test_the_suite_is_equivalent_only_if_every_entry_is():
    def judged(*entries):
        comparisons = []
        for number, (lost, won, count) in enumerate(entries):
            paired = answers(lost, won, count)
            test = paired.test()
            values = paired.baseline.mean(), paired.scores.mean()
            comparisons.append(
                Comparison("abc"[number], "exact_match", "4bit", count, *values, "difference", 0, None, test,
                           equivalence=equivalence(paired, test))
            )  # fmt: skip
        return suite_equivalence(comparisons, 0.01)

    assert judged((0, 0, 500), (0, 0, 500)).text == "equivalent everywhere, within 1 % or pp (2 run entries)"
    some = judged((0, 0, 500), (0, 0, 50))
    assert some.text == "not decided: 1 of 2 run entries are equivalent, and none is worse (Holm's correction)"
    worse = judged((0, 0, 500), (9, 0, 9))
    assert worse.text == "worse in 1 of 2 run entries (Holm's correction): b" and worse.worse == ["b"]
    assert judged((0, 9, 9)).text == "better in the only run entry: a"
    assert judged((0, 0, 500)).text == "equivalent within 1 % or pp in the only run entry: a"
    assert judged((9, 0, 9)).text == "worse in the only run entry: a"


# ---- the command ----


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "runs" / "mine"
    for precision, wrong in (("fp16", []), ("4bit", [0, 1, 2])):
        for name, count in (("mc:mode=a", 600), ("boolq", 40)):
            right = np.ones(count)
            right[wrong if count == 600 else []] = 0
            adapter = {"max_eval_instances": 100}
            write_run(folder, name, precision, {"exact_match": right.mean()}, accuracies(right), adapter=adapter)
    return folder


def test_json_has_flips_and_verdicts_and_keeps_its_keys(suite, tmp_path, capsys):
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "mine", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    boolq, mc = content["models"]["tiny"]["comparisons"]
    assert set(mc) >= {
        "run", "metric", "precision", "instances", "baseline", "value", "kind", "change", "interval", "test"
    }  # fmt: skip
    assert (mc["flips"]["lost"], mc["flips"]["won"]) == (3, 0)
    assert boolq["equivalence"]["decision"] == "cannot decide"  # 40 of the 100 that were asked for
    assert mc["equivalence"]["decision"] == "not decided" and mc["equivalence"]["needed"] > 600
    assert content["models"]["tiny"]["equivalence"]["4bit"]["entries"] == ["boolq", "mc:mode=a"]


def test_the_margin_is_an_option(suite, tmp_path, capsys):
    command = ["compare", "-o", str(tmp_path), "--suite", "mine"]
    assert cli.main([*command, "--margin", "3"]) == 0
    assert "equivalent within 3 pp" in capsys.readouterr().out
    assert cli.main([*command, "--csv", "--margin", "3"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert list(frame["equivalence.decision"]) == ["cannot decide", "equivalent"]
    assert list(frame["flips.lost"]) == [0, 3]
    assert cli.main([*command, "--margin", "0"]) == 2
    assert "--margin 0 is not between 0 and 50" in capsys.readouterr().err


def test_pools_are_judged_in_place_of_their_runs(tmp_path):
    """Each subject is too small; all of them together are not."""
    for subject in range(6):
        for precision in ("fp16", "4bit"):
            write_run(tmp_path, f"mmlu:subject={subject}", precision, {"exact_match": 1.0}, accuracies([1] * 100))
    (model,) = compare_suite(tmp_path)
    assert {one.equivalence.decision for one in model.comparisons} == {"not decided"}
    assert model.verdicts["4bit"].text.startswith("equivalent within 1 % or pp in the only run entry: mmlu")
