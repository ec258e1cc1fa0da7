"""How far a model is from a baseline: log-probabilities, KL divergence and most probable tokens of
compared tokens, and hidden states layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.engine.baseline import Baseline
from flexgen_helm.engine.compared_prompts import score
from flexgen_helm.engine.engine import Engine
from flexgen_helm.engine.executor import Prediction
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.scheduling.sequence import Batch
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Rounding of a log-probability in nats.
_STORED_WITHIN = 1e-3
# Elements that are compared at once, in float64.
_COMPARED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Compared:
    """What a model computed beside the baseline for some prompts.

    values: [4, tokens] of their compared tokens, prompt by prompt: their log-probabilities by the
        baseline and by the model, KL(baseline ‖ model), and 1 where both have the same most
        probable token, else 0.
    layers: relative error of hidden states after the embedding and each layer; None if it was not
        wanted.
    """

    values: NDArray[np.float64]
    layers: tuple[float, ...] | None


def require_comparable(
    models: Sequence[tuple[Checkpoint, Tokenizer | None]], by_layer: bool
) -> None:
    """Raise `UsageError` where the models have no common vocabulary, or by_layer no layers that
    match.

    Rows of the vocabulary that are no token of the tokenizer are padding: models may have more or
    fewer of them.
    """
    configs = [checkpoint.config for checkpoint, _ in models]
    sizes = [config.vocab_size for config in configs]
    tokenizers = [tokenizer for _, tokenizer in models if tokenizer is not None]
    if len(tokenizers) < 2 and sizes[0] != sizes[1]:
        raise UsageError(
            f"the models have {sizes[0]:,} and {sizes[1]:,} tokens, and not both have tokenizer "
            "files"
        )
    if len(set(tokenizers)) == 2:
        for token in range(sizes[0]):
            texts = [tokenizer.token_bytes(token) for tokenizer in tokenizers]
            if texts[0] and (token >= sizes[1] or texts[1] not in (b"", texts[0])):
                shown = [repr(text.decode(errors="replace")) if text else "none" for text in texts]
                raise UsageError(
                    f"the models have different vocabularies: token {token} is {shown[0]} in the "
                    f"first and {shown[1]} in the second; compare their scores instead, with "
                    "flexgen-helm compare --baseline MODEL"
                )
    shapes = [(config.num_layers, config.hidden_elements) for config in configs]
    if by_layer and shapes[0] != shapes[1]:
        words = " and ".join(f"{layers} layers of {width}" for layers, width in shapes)
        raise UsageError(
            f"--by-layer compares layer with layer, and the models have {words}; leave it out"
        )


def compare(baseline: Baseline, engine: Engine) -> list[Compared]:
    """Let another model compute what the baseline has; return what it computed for each part of
    the prompts.

    Raises what `score` raises, and `FlexgenError` for a value that is not finite, and for a file
    that has other rows than were computed.
    """
    comparison = _Comparison(baseline)
    # a token is drawn so that the last one of a prompt has hidden states, too
    score(engine, baseline.prompts, comparison, num_drawn=int(baseline.by_layer))
    values = comparison.values
    if missing := int((~np.isfinite(values)).sum()):
        raise FlexgenError(f"{missing:,} of {values.size:,} compared values are not finite numbers")
    if not np.allclose(values[0], baseline.logprobs, atol=_STORED_WITHIN):
        baseline.remove()
        raise FlexgenError(
            "the stored logits are not those that were computed; check the disk and start again"
        )
    return [comparison.part(first, end) for first, end in pairwise(baseline.part_ends)]


class _Comparison:
    """An `Observer` that compares what it is shown with what is stored.

    values: [4, N] as of `Compared`; NaN where nothing was compared.
    squares: [2, stages, states], sums of squares of the changes of hidden states, and of the
        baseline's.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self.values = np.full((4, baseline.prompts.num_compared), np.nan)
        self.squares = np.zeros((2, *baseline.states.shape[:2]))

    def part(self, first: int, end: int) -> Compared:
        """Return what was computed for the prompts from number `first` to before `end`."""
        baseline, layers = self._baseline, None
        numbers = slice(*baseline.first_numbers[[first, end]])
        if baseline.by_layer:
            states = [*{*chain.from_iterable(baseline.state_numbers[first:end])}]
            layers = tuple(np.sqrt(np.divide(*self.squares[:, :, states].sum(-1))).tolist())
        return Compared(self.values[:, numbers], layers)

    def on_hidden(self, stage: int, batch: Batch, hidden: Tensor) -> None:
        if not self._baseline.by_layer:
            return
        numbers = self._baseline.states_of(batch)
        step = max(1, _COMPARED_ELEMENTS // hidden.shape[1])
        for first in range(0, len(numbers), step):
            part = numbers[first : first + step]
            base = torch.from_numpy(self._baseline.states[stage, part]).double()
            changed = hidden[first : first + step].cpu().double() - base
            self.squares[:, stage, part] = torch.stack(
                [changed.square().sum(1), base.square().sum(1)]
            )

    def on_logits(self, predictions: Sequence[Prediction], logits: Tensor) -> None:
        rows, numbers, targets = self._baseline.rows_of(predictions)
        step = max(1, _COMPARED_ELEMENTS // logits.shape[1])
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            base = torch.from_numpy(self._baseline.logits[numbers[part]]).to(logits.device)
            model = logits[rows[part]]
            same_top = base.argmax(-1) == model.argmax(-1)
            p, q = base.double().log_softmax(-1), model.double().log_softmax(-1)
            columns = torch.tensor(targets[part], device=p.device)[:, None]
            width = min(p.shape[1], q.shape[1])  # what is beyond pads the vocabulary
            kl = kl_divergence(p[:, :width], q[:, :width])
            values = p.gather(1, columns)[:, 0], q.gather(1, columns)[:, 0], kl, same_top
            self.values[:, numbers[part]] = torch.stack(values).cpu()


def kl_divergence(baseline: Tensor, compared: Tensor) -> Tensor:
    """Return KL(baseline ‖ compared) of each row, in nats; log-probabilities [R, C] in float64 ->
    [R].

    What has no chance in the baseline adds nothing (0 log 0 = 0).
    """
    terms = baseline.exp() * (baseline - compared)
    # rounding goes below 0
    return torch.where(baseline == -torch.inf, 0.0, terms).sum(-1).clamp_min(0.0)
