"""How far two models are apart on a text: perplexity, most probable token, KL divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.report.ratio_of_sums import Interval, RatioOfSums, Vector
from flexgen_helm.terminal import table_text
from flexgen_helm.units import count


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of one text, in order.

    documents: [tokens] number of the document that each token is in.
    baseline, logprobs: [tokens] log-probabilities of the tokens.
    kl: [tokens] KL divergence of the whole rows.
    same_top: [tokens] 1 where both have the same most probable token, else 0.
    """

    documents: NDArray[np.int64]
    baseline: Vector
    logprobs: Vector
    kl: Vector
    same_top: Vector


@dataclass(frozen=True)
class TokenStatistics:
    """A quantity over tokens, in nats.

    interval: of the mean, 95 %, resampled by document; None for a single document.
    """

    tokens: int
    mean: float
    interval: tuple[float, float] | None
    median: float
    p99: float
    largest: float


@dataclass(frozen=True)
class Divergence:
    """How far a precision, or another model, is from the baseline on a text.

    baseline_perplexity, perplexity, ratio, interval: ratio = perplexity / baseline_perplexity with
        its 95 % interval, resampled by document; None for a single document.
    same_top: share of the tokens at which both have the same most probable token.
    kl: KL(baseline ‖ precision).
    logprob: how far the log-probability of the text's token is from the baseline's, whichever is
        larger.
    layers: relative error of hidden states after the embedding and each layer; None if it was not
        measured.
    """

    baseline: str
    precision: str
    tokens: int
    documents: int
    baseline_perplexity: float
    perplexity: float
    ratio: float
    interval: tuple[float, float] | None
    same_top: float
    kl: TokenStatistics
    logprob: TokenStatistics
    layers: tuple[float, ...] | None = None


def perplexity_of(logprobs: Vector) -> float:
    """Return the perplexity of tokens; infinite where no float holds it."""
    mean_loss = -math.fsum(logprobs) / len(logprobs)
    return math.exp(mean_loss) if mean_loss < 709 else math.inf


def divergence_between(
    baseline: str, precision: str, scored: ScoredTokens, layers: tuple[float, ...] | None = None
) -> Divergence:
    """Summarize what was scored; baseline, precision: their names. layers: as of `Divergence`."""
    changes = scored.baseline - scored.logprobs
    loss = _by_document(changes, scored.documents)
    with np.errstate(over="ignore"):  # infinite where a float cannot hold it
        interval = (
            None
            if (ends := _interval(loss)) is None
            else (float(np.exp(ends[0])), float(np.exp(ends[1])))
        )
        return Divergence(
            baseline,
            precision,
            len(scored.documents),
            len(loss.numerators),
            perplexity_of(scored.baseline),
            perplexity_of(scored.logprobs),
            float(np.exp(loss.value)),
            interval,
            float(scored.same_top.mean()),
            _token_statistics(scored.kl, scored.documents),
            _token_statistics(np.abs(changes), scored.documents),
            layers,
        )


def _token_statistics(values: Vector, documents: NDArray[np.int64]) -> TokenStatistics:
    """Return the statistics of values that are never negative; documents: of each token."""
    mean = _by_document(values, documents)
    interval = (max(0.0, ends[0]), ends[1]) if (ends := _interval(mean)) else None
    return TokenStatistics(
        len(values), mean.value, interval, *np.quantile(values, [0.5, 0.99, 1.0]).tolist()
    )


def _by_document(values: Vector, documents: NDArray[np.int64]) -> RatioOfSums:
    """Return the mean of values over tokens, as a ratio of each document's sum and count."""
    counts = np.bincount(documents).astype(np.float64)
    sums = np.bincount(documents, weights=values).astype(np.float64)
    return RatioOfSums(sums[counts > 0], counts[counts > 0])


def _interval(mean: RatioOfSums) -> Interval | None:
    return mean.interval() if len(mean.numerators) > 1 else None


def divergence_text(divergence: Divergence, entry: str = "") -> str:
    """Return a divergence as text for people; entry: the run entry that was compared, "" for a
    text.
    """
    row = "  {:22}{:>9}  {:>21}{:>11}{:>11}{:>11}".format

    def statistics_row(title: str, stats: TokenStatistics) -> str:
        interval = (
            "" if stats.interval is None else f"{stats.interval[0]:.6f} … {stats.interval[1]:.6f}"
        )
        mean, *quantiles = (
            f"{value:.6f}" for value in (stats.mean, stats.median, stats.p99, stats.largest)
        )
        return row(title, mean, interval, *quantiles)

    lines = [
        f"{entry + ': ' if entry else ''}{divergence.precision} against {divergence.baseline}: "
        f"{count(divergence.tokens, 'token')} in "
        f"{count(divergence.documents, 'instance' if entry else 'window')}",
        f"  perplexity {divergence.perplexity:.4f}, {divergence.ratio:.4f} times "
        f"{divergence.baseline_perplexity:.4f}"
        + (
            ""
            if divergence.interval is None
            else f" (95 %: {divergence.interval[0]:.4f} to {divergence.interval[1]:.4f})"
        ),
        f"  same top token at {divergence.same_top:.2%}",
        row("nats", "mean", "95 % interval", "median", "99 %", "largest"),
        statistics_row("KL divergence", divergence.kl),
        statistics_row("|log-probability|", divergence.logprob),
    ]
    if divergence.layers is not None:
        names = ["embedding", *(f"layer {number}" for number in range(1, len(divergence.layers)))]
        largest = max(divergence.layers) or 1.0
        rows = [
            (name, f"{error:.6f}", "█" * round(20 * error / largest))
            for name, error in zip(names, divergence.layers)
        ]
        lines.append(table_text(["after", "error", "of the largest"], rows, 80))
    return "\n".join(lines)
