"""Statistics that decide: against other programs' formulas, draws of the definition, and
simulations.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats
from scipy.stats import binom, binomtest

from flexgen_helm import cli
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.metrics import metric_named
from flexgen_helm.report.paired import PairedScores
from flexgen_helm.report.ratio_of_sums import RatioOfSums, instances_needed, margin_shown
from flexgen_helm.report.verdicts import (
    Comparison,
    Flips,
    advice,
    decide,
    equivalence,
    hochberg,
    suite_equivalence,
)
from tests.helpers.shares import share_of
from tests.helpers.suites import accuracies, write_run

ACCURACY, F1, PERPLEXITY = map(metric_named, ("exact_match", "f1_score", "target_perplexity"))
LOSS = (1.0, math.inf)


# ---- standard errors ----


def test_the_error_of_a_mean_is_the_samples():
    right = np.array([1.0, 0, 1, 1, 0, 1, 1])
    error = metric_named("exact_match").standard_error(right, np.ones(7))
    assert (
        error
        == pytest.approx(scipy.stats.sem(right))
        == pytest.approx(math.sqrt(5 / 7 * 2 / 7 / 6))
    )


@pytest.mark.parametrize("name", ["target_perplexity", "bits_per_byte"])
def test_other_errors_are_those_of_a_bootstrap(name):
    draw = np.random.default_rng(0)
    weights = (
        np.ones(800) if name == "target_perplexity" else draw.integers(50, 500, 800).astype(float)
    )
    logprobs = -weights * draw.normal(2.0, 0.4, 800)
    metric = metric_named(name)
    bootstrap = scipy.stats.bootstrap(
        (logprobs, weights),
        metric.value,
        paired=True,
        vectorized=True,
        n_resamples=2000,
        random_state=draw,
    )
    assert metric.standard_error(logprobs, weights) == pytest.approx(
        bootstrap.standard_error, rel=0.06
    )


def test_what_has_no_error():
    metric = metric_named("target_perplexity")
    assert metric.standard_error(np.array([-3.0]), np.ones(1)) is None
    assert metric.standard_error(np.array([-3.0, -math.inf]), np.ones(2)) is None
    assert metric.standard_error(np.array([-3.0, math.nan]), np.ones(2)) is None
    assert metric.value(np.array([-3.0, -5000.0]), np.ones(2)) == math.inf


# ---- the interval ----


def shares(lost, won, count):
    return RatioOfSums(
        np.repeat([1.0, -1.0, 0.0], [lost, won, count - lost - won]), np.ones(count), (1.0, 1.0)
    )


@pytest.mark.parametrize("lost, won", [(6, 0), (5, 0), (7, 1), (9, 2), (30, 15), (150, 120)])
def test_of_right_and_wrong_answers_it_is_mcnemars_test(lost, won):
    """Whatever the number of answers that stay as they are."""
    exact = binomtest(lost, lost + won, alternative="greater").pvalue
    for count in (lost + won, 5000):
        assert exact <= shares(lost, won, count).negated.p_value(0.0) <= 1.025 * exact
    paired = answers(lost, won, 5000)
    assert paired.p_value() == pytest.approx(min(1.0, 2 * exact), rel=0.025)


@pytest.mark.parametrize(
    "lost, count, margin",
    [(0, 299, 0.01), (0, 59, 0.05), (1, 480, 0.01), (5, 1000, 0.02), (0, 5, 0.5)],
)
def test_of_losses_alone_it_is_the_binomial_test(lost, count, margin):
    """Clopper and Pearson's; so 299 answers without a flip show 1 pp, and 298 do not."""
    exact = binom.cdf(lost, count, margin)
    assert exact <= shares(lost, 0, count).p_value(margin) <= 1.025 * exact
    assert shares(0, 0, 299).p_value(0.01) < 0.05 < shares(0, 0, 298).p_value(0.01)


@pytest.mark.parametrize("unseen", [(-math.inf, math.inf), LOSS, (9.0, 9.0)])
def test_it_is_that_of_random_weights_and_one_document_more(unseen):
    """Against draws of the definition: unequal lengths, skewed changes."""
    draw = np.random.default_rng(0)
    weights = draw.integers(1, 9, 40).astype(float)
    change = RatioOfSums(weights * (draw.exponential(size=40) ** 2 - 1), weights, unseen)
    size = (
        change.value + 1.6 * abs(change.numerators - change.value * weights).max() / weights.mean()
    )
    size = min(max(size, unseen[0]), unseen[1])
    exponentials = draw.exponential(size=(200_000, 41))
    for limit in (change.value + 0.3, change.value + 1.0):
        excess = [*(change.numerators - limit * weights), (size - limit) * weights.mean()]
        drawn = (exponentials @ excess > 0).mean()
        assert change.p_value(limit) == pytest.approx(drawn, abs=0.003, rel=0.03)
    low, high = change.interval()
    assert change.p_value(high) == pytest.approx(0.025, rel=1e-3)
    assert change.negated.p_value(-low) == pytest.approx(0.025, rel=1e-3)


def test_no_change_among_few_is_not_no_change():
    ones = np.ones(50)
    for metric in (ACCURACY, F1):
        high = 1 - 0.025 ** (1 / 50)
        assert PairedScores(metric, ones, ones, ones).interval() == pytest.approx(
            (-high, high), rel=0.01
        )
    low, high = PairedScores(PERPLEXITY, -ones, -ones, ones).interval()
    assert low < 0.95 and high > 1.05
    assert RatioOfSums(0.1 * ones, ones).interval() == pytest.approx((0.1, 0.1)), (
        "of distributions alone"
    )
    assert RatioOfSums(np.zeros(3), np.ones(3)).interval() == (0.0, 0.0)


@pytest.mark.parametrize("count", [2, 3, 12, 60])
def test_one_document_that_changes_by_thousands_of_nats_has_an_interval(count):
    base, scores = np.full(count, -10.0), np.full(count, -10.0)
    scores[0] = -9000.0
    low, high = PairedScores(PERPLEXITY, base, scores, np.ones(count)).interval()
    assert low < 1 and high == np.inf


# ---- wrong verdicts ----

# Changes of a loss with a given mean. `tools` of the project's notes have more, and larger runs.
CHANGES = {
    "sparse": lambda draw, n, mean: (draw.random(n) < mean) * 1.0,
    "carried by 1 %": lambda draw, n, mean: (
        draw.normal(0, 0.005, n) + (draw.random(n) < 0.01) * mean / 0.01
    ),
    "5 % lose, others win": lambda draw, n, mean: (
        draw.normal(-0.05, 0.01, n) + (draw.random(n) < 0.05) + mean
    ),
    "skewed": lambda draw, n, mean: 0.1 * (draw.lognormal(0, 1, n) - math.exp(0.5)) + mean,
    "heavy tails": lambda draw, n, mean: 0.1 * draw.standard_t(2.5, n) + mean,
    "tied": lambda draw, n, mean: 0.25 * (draw.random(n) < 0.04 + 4 * mean) - 0.01,
}


def decided(metric, changes, weights=None, margin=0.01):
    """The decision on one comparison; changes: of losses, or what each score loses."""
    base = np.full(len(changes), -3.0) if metric is PERPLEXITY else np.where(changes < 0, 0.5, 1.0)
    paired = PairedScores(
        metric, base, base - changes, np.ones(len(changes)) if weights is None else weights
    )
    return judged(paired, margin).equivalence.decision


def judged(paired, margin=0.01, **more):
    """A comparison that is alone on its page."""
    verdict, p_value = (
        equivalence(paired, margin, **{"available": math.inf, **more}),
        paired.p_value(),
    )
    flips = None if paired.is_logprob else Flips(paired.lost, paired.won)
    values = paired.values
    one = Comparison(
        "a", paired.metric.numerator if not paired.is_logprob else "target_perplexity", "4bit",
        len(paired.baseline),
        *values, paired.metric.change, paired.metric.change_between(*values[::-1]), paired.interval(), p_value, flips,
        verdict,
    )  # fmt: skip
    return decide(one, verdict.p_value, 1.0 if p_value is None else p_value)


@pytest.mark.fast(12)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("count", [3, 20, 60, 300])
def test_verdicts_on_losses_are_wrong_in_at_most_5_percent(kind, count):
    draw, times, limit = np.random.default_rng(0), share_of(2000, 20), math.log1p(0.01)
    equal = sum(
        decided(PERPLEXITY, CHANGES[kind](draw, count, limit)) == "equivalent" for _ in range(times)
    )
    differ = sum(
        decided(PERPLEXITY, CHANGES[kind](draw, count, 0.0)) in ("worse", "better")
        for _ in range(times)
    )
    assert max(equal, differ) <= binom.ppf(0.999, times, 0.05)


@pytest.mark.parametrize("count", [20, 60, 300])
def test_verdicts_on_fractions_are_wrong_in_at_most_5_percent(count):
    """One in fifty loses all, many win a tenth: at the margin, and without a difference. Thirds are
    ties and trials.
    """
    draw, times, margin = np.random.default_rng(0), share_of(2000, 20), 0.05

    def skewed(mean):
        outcome, lost = draw.random(count), 0.02 + mean
        return np.where(outcome < lost, 1.0, np.where(outcome > 0.8, -0.1, 0.0))

    equal = sum(decided(F1, skewed(margin), margin=margin) == "equivalent" for _ in range(times))
    thirds = sum(
        decided(F1, draw.binomial(3, margin, count) / 3, margin=margin) == "equivalent"
        for _ in range(times)
    )
    differ = sum(
        decided(F1, skewed(0.0), margin=margin) in ("worse", "better") for _ in range(times)
    )
    assert max(equal, thirds, differ) <= binom.ppf(0.999, times, 0.05)


def test_what_is_clear_is_decided():
    draw = np.random.default_rng(0)
    assert decided(PERPLEXITY, draw.normal(0, 0.02, 400)) == "equivalent"
    assert decided(PERPLEXITY, draw.normal(0.4, 1.0, 150)) == "worse"
    assert decided(PERPLEXITY, draw.normal(-0.4, 1.0, 150)) == "better"


@pytest.mark.parametrize("flips, margin", [(0.001, 0.01), (0.01, 0.01), (0.01, 0.03), (0.1, 0.05)])
def test_as_many_instances_as_stated_decide(flips, margin):
    count, draw = instances_needed(flips, margin), np.random.default_rng(0)
    drawn, times = np.unique(
        draw.multinomial(count, [flips / 2, flips / 2, 1 - flips], 400)[:, :2],
        axis=0,
        return_counts=True,
    )
    decides = [answers(*pair, count).equivalence_p_value(margin) <= 0.05 for pair in drawn]
    assert (times * decides).sum() / 400 >= 0.77
    assert margin_shown(count, flips) == pytest.approx(margin, rel=0.01)


# ---- verdicts ----


def answers(lost, won, count):
    base, scores = np.ones(count), np.ones(count)
    scores[:lost] = 0
    base[lost : lost + won] = 0
    return PairedScores(ACCURACY, base, scores, np.ones(count))


@pytest.mark.parametrize(
    "lost, won, count, more, text, step",
    [
        (0, 0, 28, {}, "too few questions to tell: lost 0 and won 0 of 28; about 1,900 can show equivalence",
         "run a with -m 1900; stored answers are not computed again"),
        (0, 0, 79, {"available": 79},
         "too few questions to tell: lost 0 and won 0 of 79; about 940 can show equivalence",
         "take --margin 7 for a, the least that all of the data can show, or add other data"),
        (0, 0, 500, {}, "equivalent within 1 pp", None),
        (60, 60, 5153, {}, "equivalent within 1 pp", None),
        (100, 60, 5153, {}, "worse", None),
        (60, 100, 5153, {}, "better", None),
        (5, 0, 5, {"available": 50},
         "too few questions to tell: lost 5 and won 0 of 5; about 7,600 can show equivalence",
         "run a with -m 50; stored answers are not computed again"),
        (6, 0, 6, {}, "worse", None),
        (70, 50, 2400, {"margin": 0.015},
         (
             "not decided: of all questions like these 2,400, the difference may be 1.5 pp or more"
         ), None),
        (0, 0, 500, {"level_share": 0.1}, "not decided: of all questions like these 500, the difference may be 1 pp or more",
         None),
    ],
)  # fmt: skip
def test_verdicts_in_words(lost, won, count, more, text, step):
    one = judged(answers(lost, won, count), **more)
    assert one.equivalence.text == text and advice([one]) == ([] if step is None else [step])


def test_few_documents_say_nothing():
    ones = np.ones(58)
    one = judged(PairedScores(PERPLEXITY, -ones, -2 * ones, ones))
    assert one.p_value is None and one.equivalence.text.startswith(
        "too few documents to tell: ×2.7183 in 58; "
    )
    ones = np.ones(59)
    assert judged(PairedScores(PERPLEXITY, -ones, -2 * ones, ones)).equivalence.decision == "worse"


def test_a_metric_without_a_margin_has_no_verdict():
    values = np.array([2.0, 3.0])
    rated = PairedScores(metric_named("ratings"), values, values + [0.5, 1], np.ones(2))
    assert equivalence(rated, 0.01, math.inf) is None and rated.p_value() is None
    assert rated.interval()[0] < 0.75 < rated.interval()[1]
    assert (
        equivalence(
            PairedScores(ACCURACY, values[:1] / 4, values[:1] / 4, np.ones(1)), 0.01, math.inf
        )
        is None
    )


def test_corrected_p_values_are_hochbergs():
    """Worked by hand: the largest stays, the k-th largest is k times as large, and no larger than
    the one above.
    """
    assert hochberg([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])
    assert (
        hochberg([]) == []
        and hochberg([0.05]) == [0.05]
        and hochberg([0.04, 0.05]) == pytest.approx([0.05, 0.05])
    )
    assert hochberg([0.03, 0.9]) == pytest.approx([0.06, 0.9])


def test_the_suite_is_equivalent_only_if_every_entry_is():
    def text(*entries):
        ones = [judged(answers(*entry)) for entry in entries]
        ones = [Comparison(**{**vars(one), "run": name}) for name, one in zip("abc", ones)]
        return suite_equivalence(ones, 0.01).text

    assert text((0, 0, 500), (0, 0, 500)) == "equivalent within 1 % or pp in all 2 run entries"
    assert (
        text((0, 0, 500), (0, 0, 50))
        == "too few questions to tell in 1 of 2 run entries: b; equivalent in 1"
    )
    assert text((0, 0, 500), (9, 0, 9)) == "worse in 1 of 2 run entries: b"
    assert text((0, 0, 500), (0, 9, 9)) == "better in b, and equivalent elsewhere"
    assert text((0, 9, 9)) == "better (a)" and text((9, 0, 9)) == "worse (a)"
    assert text((0, 0, 500)) == "equivalent within 1 % or pp in a"


# ---- the command ----


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "runs" / "mine"
    for precision, wrong in (("fp16", []), ("4bit", [0, 1, 2])):
        for name, count in (("mc:mode=a", 600), ("boolq", 40)):
            right = np.ones(count)
            right[wrong if count == 600 else []] = 0
            adapter = {"max_eval_instances": 100}
            write_run(
                folder,
                name,
                precision,
                {"exact_match": right.mean()},
                accuracies(right),
                adapter=adapter,
            )
    return folder


def test_json_has_flips_and_verdicts_and_keeps_its_keys(suite, tmp_path, capsys):
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "mine", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    boolq, mc = content["models"]["tiny"]["comparisons"]
    assert set(mc) >= {
        "run", "metric", "precision", "instances", "baseline", "value", "kind", "change", "interval", "p_value"
    }  # fmt: skip
    assert (mc["flips"]["lost"], mc["flips"]["won"]) == (3, 0)
    # of 100 asked for
    assert boolq["equivalence"]["available"] == 40 and mc["equivalence"]["available"] is None
    assert mc["equivalence"]["decision"] == "not decided" and mc["equivalence"]["needed"] > 600
    assert content["models"]["tiny"]["equivalence"]["4bit"]["entries"] == ["boolq", "mc:mode=a"]


def test_the_margin_is_an_option(suite, tmp_path, capsys):
    command = ["compare", "-o", str(tmp_path), "--suite", "mine"]
    assert cli.main([*command, "--margin", "3"]) == 0
    printed = capsys.readouterr().out
    assert "equivalent within" in printed and " 3 pp\n" in printed  # in two lines of a cell
    assert cli.main([*command, "--json", "--margin", "3"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]["tiny"]["comparisons"]
    assert [one["equivalence"]["decision"] for one in found] == ["not decided", "equivalent"]
    assert [one["flips"]["lost"] for one in found] == [0, 3]
    assert cli.main([*command, "--margin", "0"]) == 2
    assert "--margin 0 is not between 0 and 50" in capsys.readouterr().err


def test_pools_are_judged_in_place_of_their_runs(tmp_path):
    """Each subject is too small; all of them together are not."""
    for subject in range(6):
        for precision in ("fp16", "4bit"):
            write_run(
                tmp_path,
                f"mmlu:subject={subject}",
                precision,
                {"exact_match": 1.0},
                accuracies([1] * 100),
            )
    (model,) = compare_suite(tmp_path)
    assert {one.equivalence for one in model.comparisons} == {None}
    assert model.verdicts["4bit"].text == "equivalent within 1 % or pp in mmlu (6 runs)"


def test_verdicts_are_corrected_for_all_that_a_page_compares(tmp_path):
    """Eight lost of eight are worse alone (p = 0.008), but not among twenty comparisons of two
    models.
    """
    for model in ("a", "b"):
        for entry in range(10):
            lost = 8 if (model, entry) == ("a", 0) else 0
            for precision in ("fp16", "4bit"):
                right = [float(precision == "fp16" or number >= lost) for number in range(40)]
                name = f"e{entry}"
                write_run(
                    tmp_path,
                    name,
                    precision,
                    {"exact_match": np.mean(right)},
                    accuracies(right),
                    model=model,
                )
    first, _ = compare_suite(tmp_path)
    assert first.comparisons[0].p_value == pytest.approx(20 * 2 * 0.5**8, rel=0.03)
    assert first.comparisons[0].equivalence.decision == "not decided"
