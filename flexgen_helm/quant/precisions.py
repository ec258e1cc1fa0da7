"""What the precisions of the product are: the format of every tensor at rest, and of the KV cache. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexgen_helm.errors import UsageError
from flexgen_helm.identity import record_text, same_names, text_of
from flexgen_helm.quant.formats import GroupFormat

# Tokens of a plain cache that become old together where attention to the older ones is sparse: as of a packed one.
_PLAIN_GROUP = 64
# Raised when the same format is packed into other bytes: files of before are then not read, nor answers reused.
_PACKING = 1


@dataclass(frozen=True)
class CacheFormat:
    """How keys and values rest, and with it what every query sees, wherever the cache lies and even without one.

    keys, values: None where they rest as they were computed. Axis 'in' groups the elements of one token's head, 'out'
    one element of neighbouring tokens (per channel), whose groups begin at absolute positions. A query sees packed
    what is older than its `residual` newest tokens (its own included), as far as that fills whole groups of tokens,
    and the rest as it was computed. value_share: of those older tokens, the share whose values it takes, the ones
    with the largest weights (the paper's sparse attention, section 5); 1 takes all.
    """

    keys: GroupFormat | None
    values: GroupFormat | None
    residual_window: int
    value_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.value_share <= 1:
            raise UsageError(f"a share of {self.value_share:g} of the values is not in (0, 1]")
        if self.is_sparse and (self.group_tokens == 1 or (self.values is not None and self.values.axis == "out")):
            raise UsageError("sparse attention needs groups of tokens, whose values are packed one by one")

    def identity_text(self) -> str:
        return record_text(
            self,
            "CacheFormat",
            {**same_names("keys values"), "residual": "residual_window", "value_share": "value_share"},
        )

    @property
    def is_sparse(self) -> bool:
        return self.value_share < 1

    @property
    def is_quantized(self) -> bool:
        return bool(self._packed)

    @property
    def _packed(self) -> list[GroupFormat]:
        return [fmt for fmt in (self.keys, self.values) if fmt is not None]

    @property
    def group_tokens(self) -> int:
        """Neighbouring tokens that become old together: those that are packed together, 1 where each is by itself."""
        if not self._packed:
            return _PLAIN_GROUP
        return max(fmt.group_size if fmt.axis == "out" else 1 for fmt in self._packed)

    def num_quantized(self, position: int) -> int:
        """The query at `position` sees the tokens before this one packed."""
        return max(0, position + 1 - self.residual_window) // self.group_tokens * self.group_tokens

    @property
    def stored_group_tokens(self) -> int:
        """Of a group that is stored: where each token is packed for itself, a run that is worth a transfer."""
        return self.group_tokens if self.group_tokens > 1 else 32

    @property
    def prefix_multiple(self) -> int | None:
        """Beginnings that several rows share end at a multiple of so many tokens, because those that are packed
        together belong to one row. None where none can be shared: what sparse attention takes, it chooses of all older
        tokens together."""
        return None if self.is_sparse else self.stored_group_tokens

    @property
    def window_tokens(self) -> int:
        """Newest tokens of a row whose group may not be stored, or not be seen packed yet."""
        return self.residual_window + self.stored_group_tokens - 1

    @property
    def window_copies(self) -> int:
        """2 where newest tokens are kept as they are and as they are seen packed."""
        return 2 if self.group_tokens == 1 else 1

    def group_bytes(self, num_heads: int, head_dim: int, element_bytes: int) -> tuple[int, int]:
        """Bytes of the keys and of the values of one stored group of tokens, in one layer.

        element_bytes: of an element in the compute dtype.
        """
        tokens = self.stored_group_tokens

        def part(fmt: GroupFormat | None) -> int:
            if fmt is None:
                return tokens * num_heads * head_dim * element_bytes
            if fmt.axis == "in":  # a row is one head of one token
                return fmt.packed_bytes(tokens * num_heads, head_dim)
            return fmt.packed_bytes(tokens, num_heads * head_dim)

        return part(self.keys), part(self.values)

    def bytes_per_value(self, plain: int) -> float:
        """Mean over keys and values, scales included; plain: of one that is not packed."""
        return sum(_value_bytes(fmt, plain) for fmt in (self.keys, self.values)) / 2

    def fetched_bytes_per_value(self, plain: int) -> float:
        """The same of what a query brings of the older tokens: all keys, and its share of the values."""
        return (_value_bytes(self.keys, plain) + self.value_share * _value_bytes(self.values, plain)) / 2

    @property
    def fetched_share(self) -> float:
        """Elements that a query brings of the older tokens', as a share of keys and values."""
        return (1 + self.value_share) / 2


def _value_bytes(fmt: GroupFormat | None, plain: int) -> float:
    return plain if fmt is None else (fmt.code_bytes + fmt.scale_bytes) / fmt.group_size


@dataclass(frozen=True)
class Precision:
    """weights: format of the layers' matrices, None for the checkpoint's 16 bits; tables: of tables and head, for the
    cost model alone (the paper's figures have it); cache: None for the compute type.

    Tables and head keep their 16 bits in all of ours, because they are a small part of a large model and a table's
    rows are gathered one by one; so do the routers of experts, which decide, and average over nothing.
    """

    name: str
    weights: GroupFormat | None = None
    tables: GroupFormat | None = None
    cache: CacheFormat | None = None

    def identity_text(self) -> str:
        return record_text(self, "Precision", same_names("name weights tables cache"))

    @property
    def label(self) -> str:
        """Name of the formats for fingerprints: another one for other formats."""
        return f"{self.name}-{_digest(self)}"

    @property
    def weights_label(self) -> str:
        """The same of packed weights alone, for their files, whatever the cache is."""
        return f"packed-{_digest((self.weights, self.tables))}"

    def format_of(self, tensor: str) -> GroupFormat | None:
        """How the matrix `tensor` (its canonical name) is packed; None if it is not."""
        if tensor.startswith("layers."):
            return None if tensor.endswith(".router.weight") else self.weights
        return self.tables


def _digest(formats: object) -> str:
    return hashlib.sha256(text_of((_PACKING, formats)).encode()).hexdigest()[:8]


PAPER_GROUPS = GroupFormat(4, 64, "out", "pair", "range")
_ALONG_HEAD = GroupFormat(4, 64, "in", "pair", "range")
_OUR_WEIGHTS = GroupFormat(4, 32, "out", "word", "error")
_OUR_CACHE = CacheFormat(GroupFormat(4, 64, "out"), GroupFormat(4, 32, "in", "word"), residual_window=64)
_SPARSE_SHARE = 0.1  # the paper's
FP16 = Precision("fp16")
PRECISIONS: Mapping[str, Precision] = {
    found.name: found
    for found in (
        FP16,
        Precision("fp16-s", cache=CacheFormat(None, None, residual_window=64, value_share=_SPARSE_SHARE)),
        Precision("4bit", _OUR_WEIGHTS, cache=_OUR_CACHE),
        Precision("4bit-s", _OUR_WEIGHTS, cache=replace(_OUR_CACHE, value_share=_SPARSE_SHARE)),
        Precision("paper-4bit", PAPER_GROUPS, cache=CacheFormat(_ALONG_HEAD, _ALONG_HEAD, residual_window=1)),
    )
}


def precision_named(name: str) -> Precision:
    """Return one of `PRECISIONS`. Raises `UsageError`, with the names of all."""
    if name not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise UsageError(f"precision {name!r} is not available in this version; take one of {known}")
    return PRECISIONS[name]
