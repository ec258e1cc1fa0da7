"""Positions of a batch to score or to sample, and the outputs of its sequences. No torch."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from flexgen_helm.models.config import HEAD, layer_stage
from flexgen_helm.request import TopLogprobs
from flexgen_helm.scheduling.sequence import Batch, DrawnToken, SamplingParams, Sequence

if TYPE_CHECKING:
    from torch import Tensor

# How each of a sequence's next tokens is drawn.


@dataclass(frozen=True)
class PromptToken:
    """A token of a prompt that a row of logits predicts.

    prompts: the requests with this prompt, by index in the caller's list; several if they share it, or a beginning.
    index: of the token in the prompt, from 1 on.
    """

    prompts: tuple[int, ...]
    index: int


# Is given tokens and the rows of logits that predict them, [tokens, vocabulary] in float32 on the compute device.
OnLogits = Callable[[abc.Sequence[PromptToken], "Tensor"], None]


@dataclass
class SequenceOutput:
    """What a pass computed for one sequence.

    prompt_logprobs: log-probabilities of the prompt's tokens 1, 2, ….
    prompt_greedy: whether each of them is the most probable token, where that is wanted.
    prompt_top: the most probable tokens instead of each, where they are wanted.
    drawn: the tokens that were drawn.
    nonfinite_stage: the first stage after which a value was not finite; None if all were.
    """

    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_greedy: list[bool] = field(default_factory=list)
    prompt_top: list[TopLogprobs] = field(default_factory=list)
    drawn: list[DrawnToken] = field(default_factory=list)
    nonfinite_stage: str | None = None


@dataclass(frozen=True, eq=False)
class ScoredPosition:
    """One prediction to make: the log-probability of `target` at a position of the batch, or a token drawn there.

    needs_argmax: the token that is filled in is the most probable one, also beside a target.
    num_top: the most probable tokens that are filled in.
    sequence, index: of the target: the sequence that scores it, and its index in the prompt.
    """

    output: SequenceOutput
    position: int
    target: int | None
    sampling: SamplingParams | None
    needs_argmax: bool = False
    num_top: int = 0
    sequence: Sequence | None = None
    index: int = 0

    @property
    def prompt_token(self) -> PromptToken:
        """What a target is to those who asked for it."""
        assert self.sequence is not None
        return PromptToken(tuple(index for request in self.sequence.requests for index in request.indices), self.index)

    def fill(self, token: int, logprob: float, top: TopLogprobs) -> None:
        output = self.output
        if not math.isfinite(logprob):
            output.nonfinite_stage = output.nonfinite_stage or HEAD
        elif output.nonfinite_stage is not None:
            return
        elif self.target is None:
            output.drawn.append(DrawnToken(token, logprob, top))
        else:
            output.prompt_logprobs.append(logprob)
            if self.needs_argmax:
                output.prompt_greedy.append(token == self.target)
            if self.num_top:
                output.prompt_top.append(top)


@dataclass(eq=False)
class HeadOutput:
    """What the head predicts for a batch.

    outputs: one for each sequence of the batch.
    predictions: those of all sequences, in order.
    values: for each token of the batch the first layer after which a value was not finite, or -1; then of each
        prediction the token, its log-probability, `num_top` most probable tokens, and their log-probabilities.
    """

    outputs: list[SequenceOutput]
    predictions: list[ScoredPosition]
    values: list[float] = field(default_factory=list)

    @property
    def num_top(self) -> int:
        """How many of the most probable tokens are found for each prediction."""
        return max((prediction.num_top for prediction in self.predictions), default=0)

    def num_values(self, batch: Batch) -> int:
        return batch.num_tokens + 2 * len(self.predictions) * (1 + self.num_top)

    def fill(self, batch: Batch) -> None:
        """Fill the values into the outputs."""
        first, num_top = 0, self.num_top
        for item, output in zip(batch.scheduled, self.outputs):
            bad = [layer for layer in self.values[first : first + item.count] if layer >= 0]
            output.nonfinite_stage = layer_stage(int(min(bad))) if bad else None
            first += item.count
        values = iter(self.values[first:])
        for prediction in self.predictions:
            token, logprob, *top = islice(values, 2 * (1 + num_top))
            ranked = zip(map(int, top[:num_top]), top[num_top:])
            prediction.fill(int(token), logprob, tuple(islice(ranked, prediction.num_top)))


def predictions_of(batch: Batch) -> HeadOutput:
    """Return what is to be predicted for a batch in this pass."""
    #  tokens computed   a b c      positions 0 and 1 score b and c; the last position is drawn from
    #  predict           b c ?
    outputs, predictions = [SequenceOutput() for _ in batch.scheduled], []
    first = 0
    for item, output in zip(batch.scheduled, outputs):
        sequence, last = item.sequence, first + item.count - 1
        next_index = sequence.start + sequence.num_computed + 1
        predictions += [
            ScoredPosition(
                output, first + i, target, None, sequence.needs_greedy, sequence.num_top, sequence, next_index + i
            )
            for i, target in enumerate(sequence.targets)
        ]
        predictions += [
            ScoredPosition(output, last, None, params, num_top=sequence.num_top) for params in sequence.sampling()
        ]
        first += item.count
    return HeadOutput(outputs, predictions)


def num_predictions(sequence: Sequence) -> int:
    return sequence.num_draws + len(sequence.targets)
