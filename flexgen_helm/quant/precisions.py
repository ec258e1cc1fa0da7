"""What the precisions of the product are: the format of every tensor at rest, and of the KV cache. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.quant.formats import GroupFormat


@dataclass(frozen=True)
class CacheFormat:
    """How keys and values rest. Axis 'in' groups the elements of one token's head, 'out' one element of neighbouring
    tokens (per channel). residual: newest tokens, its own included, that a query sees in full precision."""

    keys: GroupFormat
    values: GroupFormat
    residual: int

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
FP16 = Precision("fp16")
PRECISIONS: Mapping[str, Precision] = {
    found.name: found
    for found in (
        FP16,
        Precision("4bit", GroupFormat(4, 32, "out", "word", "error")),
        Precision("paper-4bit", PAPER_GROUPS),
    )
}
