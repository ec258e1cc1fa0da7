"""Prompts whose tokens are compared between models, and their log-probabilities by one model. No
torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.request import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.engine.executor import Observer


@dataclass(frozen=True)
class ComparedPrompts:
    """Prompts, some of whose tokens are compared.

    token_ids: of each prompt.
    compared: for each prompt, the indices of its tokens that are compared, from 1 on.
    documents: for each prompt, what it is a part of; intervals resample them.
    """

    token_ids: Sequence[Sequence[int]]
    compared: Sequence[range]
    documents: Sequence[Hashable]

    @property
    def num_compared(self) -> int:
        return sum(map(len, self.compared))

    @classmethod
    def joined(cls, parts: Sequence[ComparedPrompts]) -> ComparedPrompts:
        """Return the prompts of all parts, part by part."""
        return cls(
            *(
                list(chain.from_iterable(getattr(part, field) for part in parts))
                for field in cls.__annotations__
            )
        )

    def subset(self, numbers: Sequence[int]) -> ComparedPrompts:
        """Return the prompts with these numbers, in this order."""
        return ComparedPrompts(
            *([getattr(self, field)[i] for i in numbers] for field in self.__annotations__)
        )

    def state_numbers(self) -> list[list[int]]:
        """Return for each prompt the numbers of its tokens' hidden states.

        Prompts that begin alike have the same states there, which are stored once.
        """
        number_by_hash: dict[int, int] = {}
        beginnings = (
            accumulate(ids, lambda before, token: hash((before, token))) for ids in self.token_ids
        )
        return [
            [number_by_hash.setdefault(beginning, len(number_by_hash)) for beginning in hashes]
            for hashes in beginnings
        ]


def score(
    engine: Engine, prompts: ComparedPrompts, observer: Observer | None = None, num_drawn: int = 0
) -> NDArray[np.float64]:
    """Return the log-probabilities of the compared tokens, in nats, prompt by prompt.

    observer: is shown logits and hidden states meanwhile.
    num_drawn: 1 if the last token of a prompt must be computed, too: it predicts no compared one.

    Raises the first error of a prompt.
    """

    def raise_error(_: int, result: GenerationResult) -> None:
        if result.error is not None:
            raise result.error

    requests = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=num_drawn, echo_logprobs=True)
        for ids in prompts.token_ids
    ]
    if observer is None:
        results = engine.run(requests, on_result=raise_error)
    else:
        results = engine.observe(requests, observer, raise_error)
    by_prompt = (result.prompt_logprobs or () for result in results)
    return np.array(
        [logprobs[i] for logprobs, compared in zip(by_prompt, prompts.compared) for i in compared]
    )
