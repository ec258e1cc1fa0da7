"""What the precisions of the product are: the format of every tensor at rest, and of the KV cache. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.quant.formats import GroupFormat


@dataclass(frozen=True)
class CacheFormat:
    """How keys and values rest, and with it what every query sees, wherever the cache lies and even without one.

    Axis 'in' groups the elements of one token's head, 'out' one element of neighbouring tokens (per channel), whose
    groups begin at absolute positions. A query sees packed what is older than its `residual` newest tokens (its own
    included), as far as that fills whole groups of tokens, and the rest as it was computed.
    """

    keys: GroupFormat
    values: GroupFormat
    residual: int

    @property
    def token_group(self) -> int:
        """Neighbouring tokens that are packed together, 1 where each stands for itself."""
        return max(form.group if form.axis == "out" else 1 for form in (self.keys, self.values))

    def boundary(self, position: int) -> int:
        """The query at `position` sees the tokens before this one packed."""
        return max(0, position + 1 - self.residual) // self.token_group * self.token_group

    @property
    def stored_tokens(self) -> int:
        """Of a group that is stored: where each token is packed for itself, a run that is worth a transfer."""
        return self.token_group if self.token_group > 1 else 32

    @property
    def tail_tokens(self) -> int:
        """Newest tokens of a row whose group may not be stored, or not be seen packed yet."""
        return self.residual + self.stored_tokens - 1

    @property
    def tail_copies(self) -> int:
        """2 where newest tokens are kept as they are and as they are seen."""
        return 2 if self.token_group == 1 else 1

    @property
    def bytes_per_value(self) -> float:
        """Mean over keys and values, scales included."""
        return sum(1 / form.group * (form.code_bytes + form.scale_bytes) for form in (self.keys, self.values)) / 2


@dataclass(frozen=True)
class Precision:
    """weights: format of the layers' matrices, None for the checkpoint's 16 bits; tables: of tables and head; cache:
    None for the compute type.

    Tables and head keep their 16 bits in all of ours, because they are a small part of a large model and a table's
    rows are gathered one by one; so do the routers of experts, which decide, and average over nothing.
    """

    name: str
    weights: GroupFormat | None = None
    tables: GroupFormat | None = None
    cache: CacheFormat | None = None

    @property
    def label(self) -> str:
        """Name of the formats for files and fingerprints: another one for other formats."""
        return f"{self.name}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"

    def form(self, tensor: str) -> GroupFormat | None:
        """How the matrix `tensor` (its canonical name) is packed; None if it is not."""
        if tensor.startswith("layers."):
            return None if tensor.endswith(".router.weight") else self.weights
        return self.tables


PAPER_GROUPS = GroupFormat(4, 64, "out", "pair", "range")
_ALONG_HEAD = GroupFormat(4, 64, "in", "pair", "range")
FP16 = Precision("fp16")
PRECISIONS: Mapping[str, Precision] = {
    found.name: found
    for found in (
        FP16,
        Precision(
            "4bit",
            GroupFormat(4, 32, "out", "word", "error"),
            cache=CacheFormat(GroupFormat(4, 64, "out"), GroupFormat(4, 32, "in", "word"), residual=64),
        ),
        Precision("paper-4bit", PAPER_GROUPS, cache=CacheFormat(_ALONG_HEAD, _ALONG_HEAD, residual=1)),
    )
}
