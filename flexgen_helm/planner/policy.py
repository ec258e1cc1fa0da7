"""The policy: what is placed where, and how many sequences form a block (the paper's 'Search
Space'). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_helm.errors import UsageError
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.tiers import Kind, Tier

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

    def tier_fractions(self, kind: Kind, has_gpu: bool) -> dict[Tier, float]:
        """Return the fractions of a kind by tier; without a gpu its share goes to the cpu."""
        gpu, cpu, disk = {
            "weights": (self.wg, self.wc, self.wd),
            "cache": (self.cg, self.cc, self.cd),
            "activations": (self.hg, self.hc, self.hd),
        }[kind]
        if not has_gpu:
            gpu, cpu = 0.0, gpu + cpu
        return {"gpu": gpu, "cpu": cpu, "disk": disk}

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
class BlockShape:
    """The shape of a block: sequences of a batch, batches, and the order of the work.

    count: sequences that the block really has; None where all batches are full.
    passes: into which the prompts are divided, evenly; of a single pass, the parts whose experts
        are computed in turn. 0: not chosen yet.
    """

    gpu_batch_size: int
    num_gpu_batches: int
    schedule: Schedule
    count: float | None = None
    passes: int = 1

    @property
    def num_sequences(self) -> float:
        return self.gpu_batch_size * self.num_gpu_batches if self.count is None else self.count


@dataclass(frozen=True)
class Choices:
    """What the user has decided; None for what the planner is to choose.

    max_latency: seconds that a block may take.
    """

    policy: Policy | None = None
    schedule: Schedule | None = None
    max_latency: float | None = None
