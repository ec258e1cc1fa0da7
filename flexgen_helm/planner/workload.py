"""The workload to plan for: how many sequences of which lengths. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from flexgen_helm.errors import UsageError


@dataclass(frozen=True)
class Workload:
    """A histogram of lengths. All means are over sequences.

    groups: tokens of the prompt, tokens of the output, and the number of sequences with these.
    saved_tokens: prompt tokens over all sequences that are not computed because sequences share
        them.
    scored_tokens: prompt tokens over all sequences whose log-probabilities are asked for: all pass
        the head.
    """

    groups: tuple[tuple[int, int, int], ...]
    saved_tokens: int = 0
    scored_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise UsageError("a workload needs at least one sequence")
        for prompt, output, count in self.groups:
            if prompt < 1 or output < 1 or count < 1:
                raise UsageError(
                    f"a workload of {count} sequences with {prompt} prompt and {output} output "
                    "tokens cannot be planned; each must be at least 1"
                )

    @classmethod
    def uniform(cls, prompt: int, output: int, count: int) -> Workload:
        return cls(((prompt, output, count),))

    @classmethod
    def of(
        cls, lengths: Iterable[tuple[int, int]], saved_tokens: int = 0, scored_tokens: int = 0
    ) -> Workload:
        """Count the (prompt, output) lengths of all sequences."""
        counts = sorted(Counter(lengths).items())
        return cls(
            tuple((prompt, output, count) for (prompt, output), count in counts),
            saved_tokens,
            scored_tokens,
        )

    def part(self, share: float) -> Workload:
        """Return a share of the sequences, evenly of all lengths, and at least one."""
        ends = [
            math.ceil(share * end)
            for end in accumulate((count for _, _, count in self.groups), initial=0)
        ]
        groups = [
            (*group[:2], end - begin)
            for group, begin, end in zip(self.groups, ends, ends[1:])
            if end > begin
        ]
        # Of few sequences the share of the prompts' tokens may be a smaller one: the shortest are
        # first, and they do not save more than they have.
        prompts, kept = (
            sum(prompt * count for prompt, _, count in counted) for counted in (self.groups, groups)
        )
        saved, scored = (
            kept * number // max(1, prompts) for number in (self.saved_tokens, self.scored_tokens)
        )
        return Workload(tuple(groups), saved, scored)

    @property
    def num_sequences(self) -> int:
        return sum(count for _, _, count in self.groups)

    @property
    def output_tokens(self) -> int:
        return sum(count * output for _, output, count in self.groups)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return max(prompt + output for prompt, output, _ in self.groups)

    @property
    def longest_prompt(self) -> int:
        return max(prompt for prompt, _, _ in self.groups)

    @property
    def mean_prompt(self) -> float:
        """Mean prompt length."""
        return sum(count * prompt for prompt, _, count in self.groups) / self.num_sequences

    @property
    def mean_output(self) -> float:
        """Mean output length."""
        return self.output_tokens / self.num_sequences

    @property
    def mean_computed(self) -> float:
        """Mean number of prompt tokens that are computed."""
        return self.mean_prompt - self.saved_tokens / self.num_sequences

    @property
    def mean_scored(self) -> float:
        """Mean number of prompt tokens that pass the head."""
        return self.scored_tokens / self.num_sequences

    @property
    def mean_pairs(self) -> float:
        """Mean of computed prompt tokens x prompt length, which prefill attention grows with."""
        squares = sum(count * prompt**2 for prompt, _, count in self.groups) / self.num_sequences
        return squares * self.mean_computed / self.mean_prompt
