"""The workload to plan for: how many sequences of which lengths. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flexgen_helm.errors import UsageError


@dataclass(frozen=True)
class LengthGroup:
    """`count` sequences of `prompt` and `output` tokens each."""

    prompt: int
    output: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1 or self.count < 1:
            raise UsageError(
                f"a workload of {self.count} sequences with {self.prompt} prompt and {self.output} output tokens "
                "cannot be planned; each must be at least 1"
            )


@dataclass(frozen=True)
class Workload:
    """A histogram of lengths. All means are over sequences.

    saved_tokens: prompt tokens over all sequences that are not computed because sequences share them.
    """

    groups: tuple[LengthGroup, ...]
    saved_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise UsageError("a workload needs at least one sequence")

    @classmethod
    def uniform(cls, prompt: int, output: int, count: int) -> Workload:
        return cls((LengthGroup(prompt, output, count),))

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]], saved_tokens: int = 0) -> Workload:
        """Count the (prompt, output) lengths of all sequences."""
        counts = sorted(Counter(lengths).items())
        return cls(tuple(LengthGroup(prompt, output, count) for (prompt, output), count in counts), saved_tokens)

    @property
    def num_sequences(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def output_tokens(self) -> int:
        return sum(group.count * group.output for group in self.groups)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return max(group.prompt + group.output for group in self.groups)

    @property
    def longest_prompt(self) -> int:
        return max(group.prompt for group in self.groups)

    @property
    def prompt(self) -> float:
        """Mean prompt length."""
        return self._mean(lambda group: group.prompt)

    @property
    def output(self) -> float:
        """Mean output length."""
        return self._mean(lambda group: group.output)

    @property
    def computed(self) -> float:
        """Mean number of prompt tokens that are computed."""
        return self.prompt - self.saved_tokens / self.num_sequences

    @property
    def pairs(self) -> float:
        """Mean of computed prompt tokens x prompt length, which prefill attention grows with."""
        return self._mean(lambda group: group.prompt**2) * self.computed / self.prompt

    def _mean(self, of: Callable[[LengthGroup], float]) -> float:
        return float(sum(group.count * of(group) for group in self.groups) / self.num_sequences)
