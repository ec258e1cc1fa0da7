"""The policy: what is placed where, and how many sequences form a block (the paper's 'Search
Space'). No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import ModelConfig

# Schedules: in which order the batches of a pass meet the stages of the model, and which sequences
# are in a pass.

# Numbers of stages and of batches -> stage and batch of each work item of a pass.
Order = Callable[[int, int], Iterator[tuple[int, int]]]


def by_batch(num_stages: int, num_batches: int) -> Iterator[tuple[int, int]]:
    """Yield batch by batch, each through the whole model."""
    return ((stage, batch) for batch in range(num_batches) for stage in range(num_stages))


def by_stage(num_stages: int, num_batches: int) -> Iterator[tuple[int, int]]:
    """Yield stage by stage, each for all batches (the paper's block schedule, Algorithm 1)."""
    return ((stage, batch) for stage in range(num_stages) for batch in range(num_batches))


@dataclass(frozen=True)
class Schedule:
    """Who is in a pass, and in which order.

    name: that flags and files have.
    order: of the work items of a pass.
    reads_once: a pass reads each weight once, for all batches, whose hidden states are alive
        meanwhile. Otherwise it reads each weight once a batch, and the hidden states of one batch
        are alive.
    is_single_pass: one pass takes the whole data set, of which no sequence needs a second token.
    """

    name: str
    order: Order
    reads_once: bool = True
    is_single_pass: bool = False

    def __str__(self) -> str:
        return self.name


ROW = Schedule("row", by_batch, reads_once=False)
ZIGZAG = Schedule("zigzag", by_stage)
PREFILL_ONLY = Schedule("prefill-only", by_stage, is_single_pass=True)

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule for schedule in (ROW, ZIGZAG, PREFILL_ONLY)
}
# Those that a search tries unless it is told others; 'row' is never better.
AUTOMATIC = (ZIGZAG, PREFILL_ONLY)


_ROUNDING = 1e-9


@dataclass(frozen=True)
class Policy:
    """Block shape and placement fractions in [0, 1]; the disk's fractions are the rest.

    gpu_batch_size: sequences of one batch.
    num_gpu_batches: batches of one block.
    wg, wc: fractions of the weights on gpu and cpu; cg, cc: of the KV cache; hg, hc: of the hidden
        states.
    """

    gpu_batch_size: int
    num_gpu_batches: int
    wg: float = 0.0
    wc: float = 1.0
    cg: float = 0.0
    cc: float = 1.0
    hg: float = 0.0
    hc: float = 1.0

    def __post_init__(self) -> None:
        if self.gpu_batch_size < 1 or self.num_gpu_batches < 1:
            raise UsageError(
                f"a block of {self.gpu_batch_size} x {self.num_gpu_batches} sequences is empty; "
                "both must be 1 or more"
            )
        # sums and differences of floats leave [0, 1]
        for name in ("wg", "wc", "cg", "cc", "hg", "hc"):
            share = getattr(self, name)
            if share != (whole := round(share)) and abs(share - whole) < _ROUNDING:
                object.__setattr__(self, name, float(whole))
        for kind, gpu, cpu in (
            ("w", self.wg, self.wc),
            ("c", self.cg, self.cc),
            ("h", self.hg, self.hc),
        ):
            if not (0.0 <= gpu <= 1.0 and 0.0 <= cpu <= 1.0 and gpu + cpu <= 1.0 + _ROUNDING):
                raise UsageError(
                    f"{kind}g={gpu} and {kind}c={cpu} must lie in [0, 1] and sum to at most 1"
                )

    @property
    def wd(self) -> float:
        return max(0.0, 1.0 - self.wg - self.wc)

    @property
    def cd(self) -> float:
        return max(0.0, 1.0 - self.cg - self.cc)

    @property
    def hd(self) -> float:
        return max(0.0, 1.0 - self.hg - self.hc)

    @property
    def fractions(self) -> dict[str, float]:
        """All nine fractions by name."""
        return {
            name: getattr(self, name)
            for name in ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")
        }

    @property
    def block_size(self) -> int:
        """Sequences of one block."""
        return self.gpu_batch_size * self.num_gpu_batches

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        shares = (self.wg, self.wc, self.cg, self.cc, self.hg, self.hc)
        percents = (f"{round(100 * share, 4):.10g}" for share in shares)
        return f"{self.gpu_batch_size}x{self.num_gpu_batches},{','.join(percents)}"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse 'GBSxNB,wg,wc,cg,cc,hg,hc' with percentages, as the paper writes policies."""
        try:
            block, *shares = text.split(",")
            batch_size, _, batches = block.partition("x")
            if len(shares) != 6:
                raise ValueError(f"{len(shares)} percentages instead of 6")
            return cls(int(batch_size), int(batches), *(float(share) / 100 for share in shares))
        except ValueError as error:
            raise UsageError(
                f"--policy {text!r} is not of the form GBSxNB,wg,wc,cg,cc,hg,hc with six "
                f"percentages ({error}); for example 48x3,20,80,0,100,0,100"
            ) from error


@dataclass(frozen=True)
class Choices:
    """What the user has decided; None for what the planner is to choose.

    max_latency: seconds that a block may take.
    """

    policy: Policy | None = None
    schedule: Schedule | None = None
    max_latency: float | None = None


# The workload to plan for: how many sequences of which lengths.


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
        return Workload(
            tuple(groups), round(share * self.saved_tokens), round(share * self.scored_tokens)
        )

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
    def prompt(self) -> float:
        """Mean prompt length."""
        return sum(count * prompt for prompt, _, count in self.groups) / self.num_sequences

    @property
    def output(self) -> float:
        """Mean output length."""
        return self.output_tokens / self.num_sequences

    @property
    def computed(self) -> float:
        """Mean number of prompt tokens that are computed."""
        return self.prompt - self.saved_tokens / self.num_sequences

    @property
    def scored(self) -> float:
        """Mean number of prompt tokens that pass the head."""
        return self.scored_tokens / self.num_sequences

    @property
    def pairs(self) -> float:
        """Mean of computed prompt tokens x prompt length, which prefill attention grows with."""
        squares = sum(count * prompt**2 for prompt, _, count in self.groups) / self.num_sequences
        return squares * self.computed / self.prompt


# Divide the layers of a model among the ranks of a pipeline.


def divide_layers(
    config: ModelConfig, num_ranks: int, counts: Sequence[int] | None = None
) -> list[range]:
    """Return the layers of each rank: those that `counts` gives, else shares that take about as
    long to decode.

    The head counts by its operations, so the last rank has fewer layers. Raises `UsageError` if a
    rank had no layer.
    """
    layers = config.num_layers
    if counts is None:
        if layers < num_ranks:
            raise UsageError(
                f"{layers} layers cannot be divided among {num_ranks} ranks; start fewer processes"
            )
        counts = _balanced(
            layers, num_ranks, config.head_flops_per_token * layers / config.linear_flops_per_token
        )
    elif len(counts) != num_ranks or sum(counts) != layers or min(counts) < 1:
        raise UsageError(
            f"--pipeline-layers {','.join(map(str, counts))} does not fit {layers} layers and "
            f"{num_ranks} ranks; give {num_ranks} numbers with the sum {layers}"
        )
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts))]


def _balanced(layers: int, num_ranks: int, head: float) -> list[int]:
    """Return layers by rank whose largest share is smallest; head: what the last rank has besides,
    in layers.
    """
    before = num_ranks - 1
    if not before:
        return [layers]
    last = min(
        range(1, layers - before + 1),
        key=lambda count: max(count + head, -(-(layers - count) // before)),
    )
    share, more = divmod(layers - last, before)
    return [share + (rank < more) for rank in range(before)] + [last]
