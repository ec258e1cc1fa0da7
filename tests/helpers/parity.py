"""Prompts, and what counts as the same answer: `transformers`' and another engine's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from torch import Tensor

from flexgen_helm.kernels.attention import LocatedSegments, attend_segments
from tests.helpers.tiny_models import VOCABULARY

TOLERANCE = 1e-4


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, longest))]
        for _ in range(count)
    ]


def assert_equals_reference(model, prompt, request, result):
    """Scores of the prompt, greedy tokens and their log-probabilities equal `transformers` on the
    same tokens.
    """
    assert all(difference < TOLERANCE for difference in differences(model.logprobs, prompt, result))
    if request.echo_logprobs:
        assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(prompt)
    ids = list(result.completions[0].token_ids)
    for row, token in zip(model.logprobs(prompt + ids)[len(prompt) - 1 :], ids):
        assert row.max().item() - row[token].item() < 1e-5  # the argmax, or its equal


def differences(logprobs, prompt, result):
    """How far scores of completions, and of the prompt if asked for, are from a model's.

    logprobs: of ids, a row for every token.
    """
    assert result.error is None and result.completions, result.error
    found = []
    for completion in result.completions:
        ids = [*prompt, *completion.token_ids]
        scores = [*(result.prompt_logprobs or ())[1:], *completion.logprobs]
        compared = zip(
            scores, ids[len(ids) - len(scores) :], logprobs(ids)[len(ids) - 1 - len(scores) :]
        )
        found += [abs(score - row[token].item()) for score, token, row in compared]
    return found


def assert_same(found, expected, tolerance=TOLERANCE):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.error is None) == (theirs.error is None), (ours.error, theirs.error)
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
            assert all(abs(x - y) <= tolerance for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for x, y in zip(
            (ours.prompt_logprobs or ())[1:], (theirs.prompt_logprobs or ())[1:], strict=True
        ):
            assert abs(x - y) <= tolerance
        for x, y in zip(
            (ours.prompt_top_logprobs or ())[1:],
            (theirs.prompt_top_logprobs or ())[1:],
            strict=True,
        ):
            assert all(abs(a - b) <= tolerance for (_, a), (_, b) in zip(x, y, strict=True))


def seeing_longer_neighbours(
    q: Tensor, segments: LocatedSegments, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Attend as `attend_segments`, but decoding tokens see the columns of the longest: what a leak
    would be.
    """
    table, records, _ = segments
    last = records[table.jobs["end_segment"] - 1]  # of each job, its sequence's cache
    if records["slot"].any():
        longest = last["length"].max()
        records["length"][table.jobs["end_segment"] - 1] = longest
        table = replace(table, positions=last["position"] + longest - 1)
    return attend_segments(q, segments._replace(table=table, records=records), *rest)
