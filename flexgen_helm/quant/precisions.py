"""The precisions a user names: the format of weights and of the KV cache. No torch."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from flexgen_helm.errors import UsageError
from flexgen_helm.files import listed
from flexgen_helm.identity import Identified, text_of
from flexgen_helm.quant.formats import BlockFormat, GroupFormat, StoredFormat

# Tokens of a group in a cache that is sparse but not quantized: the group size of `4bit-s`.
_PLAIN_GROUP = 64
# Tokens of a stored group where each token is quantized by itself: enough to be worth a transfer.
_TRANSFER_TOKENS = 32
# Version of the packed bytes. A higher one orphans packed files and cached answers.
_PACKING_VERSION = 1


@dataclass(frozen=True)
class CacheFormat(
    Identified, name="CacheFormat", first_version="keys values residual=residual_window value_share"
):
    """How keys and values are stored, and so which of their versions a query sees, wherever the
    cache is and even without one: the newest tokens in full precision and the older ones quantized.

    Groups of tokens begin at absolute positions, so what a query sees depends on positions alone.

    keys, values: formats; None keeps the compute type. Axis 'in' groups the elements of a token's
        head, axis 'out' one element of `group_size` neighbouring tokens (per channel).
    residual_window: newest tokens, the query's own included, that are seen in full precision
        (KIVI's residual length).
    value_share: sparse attention (the paper, section 5): of the older tokens a query takes the
        values of this share, those with the largest weights; 1 takes all.
    """

    keys: GroupFormat | None
    values: GroupFormat | None
    residual_window: int
    value_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.value_share <= 1:
            raise UsageError(f"a share of {self.value_share:g} of the values is not in (0, 1]")
        if self.is_sparse and (
            self.group_tokens == 1 or (self.values is not None and self.values.axis == "out")
        ):
            raise UsageError(
                "sparse attention needs groups of tokens, whose values are packed one by one"
            )

    @property
    def is_sparse(self) -> bool:
        return self.value_share < 1

    @property
    def is_quantized(self) -> bool:
        return bool(self._formats)

    @property
    def _formats(self) -> list[GroupFormat]:
        return [fmt for fmt in (self.keys, self.values) if fmt is not None]

    @property
    def group_tokens(self) -> int:
        """Tokens that are quantized together; 1 if every token is quantized by itself."""
        if not self._formats:
            return _PLAIN_GROUP
        return max(fmt.group_size if fmt.axis == "out" else 1 for fmt in self._formats)

    def num_quantized(self, position: int) -> int:
        """Return how many tokens, from the first on, the query at `position` sees quantized."""
        return max(0, position + 1 - self.residual_window) // self.group_tokens * self.group_tokens

    @property
    def stored_group_tokens(self) -> int:
        """Tokens that are stored and transferred together; a multiple of `group_tokens`."""
        return self.group_tokens if self.group_tokens > 1 else _TRANSFER_TOKENS

    @property
    def prefix_multiple(self) -> int | None:
        """Shared prefixes have a multiple of so many tokens, because a stored group belongs to one
        sequence.

        None if none can be shared: sparse attention selects among all older tokens of a sequence
        together.
        """
        return None if self.is_sparse else self.stored_group_tokens

    @property
    def window_tokens(self) -> int:
        """Capacity of the full-precision residual window, in tokens: it also holds a group that is
        not yet full.
        """
        return self.residual_window + self.stored_group_tokens - 1

    @property
    def window_copies(self) -> int:
        """Copies of the residual window: 2 if it also keeps its tokens as queries see them
        quantized.
        """
        return 2 if self.group_tokens == 1 else 1

    def group_bytes(self, num_heads: int, head_dim: int, element_bytes: int) -> tuple[int, int]:
        """Return the bytes of the keys and of the values of one stored group, in one layer.

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

    def bytes_per_value(self, plain: int, value_share: float = 1.0) -> float:
        """Return the mean bytes of an element, scales included, over all keys and a share of the
        values.

        plain: bytes of an element that is not quantized.
        """
        return (_value_bytes(self.keys, plain) + value_share * _value_bytes(self.values, plain)) / 2

    @property
    def fetched_share(self) -> float:
        """Share of the older tokens' elements that a query fetches."""
        return (1 + self.value_share) / 2


def _value_bytes(fmt: GroupFormat | None, plain: int) -> float:
    return plain if fmt is None else (fmt.code_bytes + fmt.scale_bytes) / fmt.group_size


@dataclass(frozen=True, eq=False)
class PublishedFormats(Identified, name="PublishedFormats"):
    """The formats of those matrices that rest as the checkpoint published them.

    They are left out of a precision's identity: the checkpoint's fingerprint covers them.

    by_name: canonical name of a matrix -> its format.
    are_gathered: a row is read from several places of the files: its codes, its scales.
    are_alike: layers with equal shapes have equal formats.
    """

    by_name: Mapping[str, BlockFormat]
    are_gathered: bool = False
    are_alike: bool = False

    def identity_text(self) -> str:
        return ""


@dataclass(frozen=True)
class Precision(Identified, name="Precision", first_version="name weights tables cache"):
    """What a precision that users can name quantizes, and how.

    In 4 bits the embedding table and the head keep 16 bits: they are a small part of a large model,
    and decide every token. Routers keep 16 bits in every precision: they select experts, and
    nothing averages out their errors.

    name: what users call it.
    weights: format of the layers' matrices; None for the checkpoint's 16 bits.
    tables: format of embedding tables and head, with axis 'in', because rows are looked up one by
        one; None for the checkpoint's 16 bits.
    cache: format of the KV cache; None for the compute dtype.
    published: the matrices that the precision does not quantize and that rest in the checkpoint's
        own format.
    """

    name: str
    weights: GroupFormat | None = None
    cache: CacheFormat | None = None
    tables: GroupFormat | None = None
    published: PublishedFormats = field(default=PublishedFormats(MappingProxyType({})), repr=False)

    def __post_init__(self) -> None:
        if self.tables is not None and self.tables.axis != "in":
            raise UsageError(
                "rows of a table are looked up one by one: its groups run along them, axis 'in'"
            )

    @property
    def label(self) -> str:
        """Name for fingerprints; it changes with the formats."""
        return f"{self.name}-{_digest(self)}"

    @property
    def weights_label(self) -> str:
        """Name of the packed weights' files; it changes with the formats of weights and tables
        alone.
        """
        return f"packed-{_digest((self.weights, self.tables))}"

    @property
    def packs(self) -> bool:
        """Whether matrices rest in less than 16 bits, packed here or as published."""
        return self.weights is not None or bool(self.published.by_name)

    def format_of(self, tensor: str) -> StoredFormat | None:
        """Return the format of the matrix `tensor` (its canonical name); None for 16 bits."""
        fmt = self.weights if tensor.startswith("layers.") else self.tables
        if fmt is None or tensor.endswith(".router.weight"):
            return self.published.by_name.get(tensor)
        return fmt


def _digest(formats: object) -> str:
    return hashlib.sha256(text_of((_PACKING_VERSION, formats)).encode()).hexdigest()[:8]


PAPER_GROUPS = GroupFormat(4, 64, "out", "pair", "range")
_ALONG_HEAD = GroupFormat(4, 64, "in", "pair", "range")
_OUR_WEIGHTS = GroupFormat(4, 32, "out", "word", "error")
_OUR_CACHE = CacheFormat(
    GroupFormat(4, 64, "out"), GroupFormat(4, 32, "in", "word"), residual_window=64
)
_EIGHT_BITS = GroupFormat(8, 32, "out", "word", "range")  # 8.5 bits a value
_SPARSE_SHARE = 0.1  # of the values, as in the paper
FP16 = Precision("fp16")
PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        FP16,
        Precision(
            "fp16-s", cache=CacheFormat(None, None, residual_window=64, value_share=_SPARSE_SHARE)
        ),
        Precision("8bit", _EIGHT_BITS, tables=replace(_EIGHT_BITS, axis="in")),
        Precision("4bit-weights", _OUR_WEIGHTS),
        Precision("4bit-cache", cache=_OUR_CACHE),
        Precision("4bit", _OUR_WEIGHTS, cache=_OUR_CACHE),
        Precision("4bit-s", _OUR_WEIGHTS, cache=replace(_OUR_CACHE, value_share=_SPARSE_SHARE)),
        Precision(
            "paper-4bit",
            PAPER_GROUPS,
            cache=CacheFormat(_ALONG_HEAD, _ALONG_HEAD, residual_window=1),
        ),
    )
}


def split_precisions(text: str) -> list[str]:
    """Return the precisions of a list with commas. Raises `UsageError` for one that is not
    known.
    """
    return [precision_named(name.strip()).name for name in text.split(",") if name.strip()]


def precision_named(name: str) -> Precision:
    """Return one of `PRECISIONS`. Raises `UsageError`, with the names of all."""
    if name not in PRECISIONS:
        singular = str(name).removesuffix("s")  # '4bits' is 4bit, and nearer to 4bit-s by letters
        close = [singular] * (singular in PRECISIONS)
        close = close or difflib.get_close_matches(str(name), PRECISIONS, n=2)
        meant = f"did you mean {listed(close)}? " if close else ""
        known = ", ".join(PRECISIONS)
        raise UsageError(
            f"precision {name!r} is not available in this version; {meant}take one of {known}"
        )
    return PRECISIONS[name]
