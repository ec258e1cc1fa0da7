"""Attention of a batch segment by segment; partial results merge exactly (`models.attention`).

This is how a device attends, and a host without the compiled loop. Shapes: see
`attention_metadata`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from flexgen_helm.engine.attention_metadata import (
    AttentionBackend,
    AttentionMetadata,
    BatchPrompt,
    Decoding,
    LayerAttention,
    SharedPrefix,
    store_prompts,
)
from flexgen_helm.kernels.attention import (
    Segment,
    SegmentTable,
    TokenGroup,
    attend_segments,
    can_attend_caches,
)
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.kv_cache.codec import Codec, KeysValues
from flexgen_helm.kv_cache.visibility import (
    DecodePart,
    Queries,
    decode_parts,
    prefix_parts,
    query_chunks,
    whole_part,
)
from flexgen_helm.models import attention
from flexgen_helm.models.attention import PartialAttention, mask_dtype, merge_partial
from flexgen_helm.models.config import Window

# From so many queries on, keys and values in host memory are copied to them: those of a few hundred
# positions cross the link faster than a processor attends to them. Fewer queries are sent to the
# host instead.
_COPY_KEYS_FROM = 8


class SegmentAttention(AttentionBackend):
    """One segment after the other."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        codec: Codec,
        windows: Iterable[Window | None],
        dtype: torch.dtype,
    ) -> None:
        """windows: those that occur among the layers; each has its own masks. dtype: of queries."""
        self.metadata = metadata
        kinds = set(windows) or {None}
        self._decodes = [_decode(one, codec, kinds, dtype) for one in metadata.decodes]
        self._prefixes = [PrefixAttention(shared, codec) for shared in metadata.prefixes]
        self._joined = JoinedPrompts.of(metadata, codec)

    def attend(self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        segments = self._attend_own(at, q, k, v)
        first, (out, lse) = next(segments)
        if first.stop - first.start < len(q):
            parts = chain([(first, (out, lse))], segments)
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
            for tokens, part in parts:
                out[tokens], lse[tokens] = part
        for prefix in self._prefixes:
            where = prefix.tokens
            joined = out[where], lse[where]
            for part in prefix.attend(at, q[where]):
                joined = merge_partial(joined, part)
            out[where], lse[where] = joined
        return out, lse

    def _attend_own(
        self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, PartialAttention]]:
        """Yield tokens and what they see of their own sequences; prompts are stored, and new
        tokens.
        """
        stored = store_prompts(self.metadata, at, k, v)
        if self._joined is not None and attention.joins_prompts(q, at.config, at.window):
            deque(stored, maxlen=0)
            tokens = self._joined.tokens
            yield tokens, self._joined.attend(at, q[tokens], k[tokens], v[tokens])
        else:
            for prompt, older in stored:
                tokens = prompt.tokens
                new = k[tokens], v[tokens]
                yield tokens, attend_prompt(at, prompt, q[tokens], new, older)
        for decoding in self._decodes:
            tokens = decoding.given.tokens
            yield tokens, decoding.attend(at, q[tokens], k[tokens], v[tokens])


def attend_prompt(
    at: LayerAttention, prompt: BatchPrompt, q: Tensor, new: KeysValues, older: KeysValues
) -> PartialAttention:
    """q [t, Hq, D], new k and v [t, Hk, D] -> output [t, Hq, D], log-sum-exp [t, Hq].

    older: the first tokens, as quantizing leaves them: the others see them so, as they would in a
        cache.
    """
    start, config, fmt = prompt.sequence.start, at.config, at.cache.codec.cache_format
    if fmt is None or not len(older[0]):
        return attention.attend_causal(q, new, config, at.window, start)
    chunks = query_chunks(q, start, at.window, fmt)
    if fmt.is_sparse:
        return attention.attend_top_k(q, older, new, config, chunks)
    return attention.attend_two_versions(q, older, new, config, chunks)


@dataclass(frozen=True, eq=False)
class JoinedPrompts:
    """Prompts whose tokens lie behind each other in the batch, for a kernel that attends to all of
    them.

    tokens: of the batch.
    borders: as `attention.attend_prompts` takes them.
    longest: tokens of the longest prompt.
    """

    tokens: slice
    borders: Tensor
    longest: int

    @classmethod
    def of(cls, metadata: AttentionMetadata, codec: Codec) -> JoinedPrompts | None:
        """None where a device may not attend to all of them at once."""
        ends, prompts = metadata.prompt_ends, metadata.prompts
        if codec.cache_format is not None or not ends.numbers:
            return None
        if ends.on_device.device.type != "cuda" or any(
            b.tokens.start != a.tokens.stop for a, b in pairwise(prompts)
        ):
            return None
        first, longest = ends.numbers[0], metadata.longest_prompt
        borders = (ends.on_device - first).int()
        return cls(slice(first, ends.numbers[-1]), borders, longest)

    def attend(self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """q [t, Hq, D], k and v [t, Hk, D] -> output [t, Hq, D], log-sum-exp [t, Hq]."""
        return attention.attend_prompts(q, k, v, at.config, at.window, self.borders, self.longest)


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """Sequences of one cache block over their own caches.

    parts: the cached keys that they see, in parts; the first has keys of all sequences.
    table: of the only part, for the compiled loop, which a host attends with where a device
        computes; None where it cannot be used.
    """

    given: Decoding
    parts: tuple[DecodePart, ...]
    table: SegmentTable | None = None

    def attend(self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """q [B, Hq, D], k and v [B, Hk, D] -> output [B, Hq, D], log-sum-exp [B, Hq]; stores k and
        v.
        """
        cache, given = at.cache, self.given
        if given.on_host:
            heads = q.shape[1], k.shape[1], v.shape[1]
            (joined,) = cache.copy_to_host("activations", torch.cat((q, k, v), 1))
            q, k, v = joined.split(heads, 1)
            at = replace(at, config=at.config.on_host)
        cache.append(given.block, at.layer, given.target, k, v)
        first, *more = self.parts
        out, lse = self._attend(first, at, q)
        for part in more:
            rows = part.sequences
            out[rows], lse[rows] = merge_partial((out[rows], lse[rows]), self._attend(part, at, q))
        cache.done(given.block, at.layer)
        return _to_device(cache, (out, lse)) if given.on_host else (out, lse)

    def _attend(self, part: DecodePart, at: LayerAttention, q: Tensor) -> PartialAttention:
        block, layer, config, cache = self.given.block, at.layer, at.config, at.cache
        if self.table is not None:
            segments = self.table.with_addresses([cache.read(block, layer, part)])
            out, lse = attend_segments(q.float().contiguous(), segments, at.score_options)
            return out.to(q.dtype), lse
        q, positions = q[part.sequences], self.given.positions[part.sequences]
        visible = part.visible[at.window]
        if part.is_sparse:
            keys = cache.read_keys(block, layer, part)
            top_k = attention.select_top_k(q, keys, config, positions, visible)
            return top_k.attend(cache.read_selected(block, layer, part, top_k))
        keys_values = cache.read(block, layer, part)
        return attention.attend_cached(q, keys_values, config, positions, visible)


def _decode(
    given: Decoding, codec: Codec, windows: set[Window | None], dtype: torch.dtype
) -> DecodeAttention:
    block, device = given.block, given.positions.device
    if codec.cache_format is None and can_attend_caches(device, dtype):
        groups = []
        for row, seq in enumerate(block.sequences):
            cached = Segment(block, seq.start, seq.num_computed + 1, row)
            groups.append(TokenGroup(row, 1, [cached]))
        last = [seq.start + seq.num_computed for seq in block.sequences]
        return DecodeAttention(given, (whole_part(block),), SegmentTable.of(groups, last))
    has_chunks = any(window is not None and window.is_chunked for window in windows)
    starts = given.absolute - given.positions if has_chunks else 0
    queries = Queries(given.positions, starts, mask_dtype(device, dtype))
    return DecodeAttention(given, decode_parts(block, queries, windows, codec))


class PrefixAttention:
    """Tokens of the batch over all of a shared prefix, or of the prompt that they continue.

    tokens: of the batch; a slice where they are neighbours, which spares copies.
    """

    def __init__(self, shared: SharedPrefix, codec: Codec) -> None:
        prefix, numbers = shared.prefix, shared.tokens.numbers
        first, last = numbers[0], numbers[-1]
        adjacent = last - first == len(numbers) - 1  # ascending, no token twice
        self.tokens = slice(first, last + 1) if adjacent else shared.tokens.on_device
        self._shared, positions = shared, shared.positions.numbers
        self._parts = prefix_parts(prefix.start, prefix.prompt_len, positions, codec)

    def attend(self, at: LayerAttention, q: Tensor) -> Iterator[PartialAttention]:
        """q [t, Hq, D] -> for each part output [t, Hq, D] and log-sum-exp [t, Hq]."""
        (block, slot), config, cache = self._shared.prefix.seat, at.config, at.cache
        positions, keys_on_host = self._shared.positions.on_device, cache.attends_on_host(block)
        on_host = keys_on_host and len(positions) < _COPY_KEYS_FROM
        if on_host:
            (q,) = cache.copy_to_host("activations", q)
            config, positions = config.on_host, self._shared.positions.on_host
        for part in self._parts:
            keys, values = cache.read_prefix(block, slot, at.layer, part)
            if keys.device != q.device or (keys_on_host and not on_host):
                keys, values = cache.copy_to_device("cache", keys, values)
            visible = part.visible(positions, at.window, mask_dtype(q.device, q.dtype))
            from_first = part.first and config.slopes is not None
            counted = positions - part.first if from_first else positions
            partial = attention.attend_prefix(q, (keys, values), config, counted, visible)
            yield _to_device(cache, partial) if on_host else partial
        cache.done(block, at.layer)


def _to_device(cache: KVCache, part: PartialAttention) -> PartialAttention:
    """Copy output [T, Hq, D] and log-sum-exp [T, Hq], which the host computed, to the device
    together.
    """
    out, lse = part
    (joined,) = cache.copy_to_device(
        "activations", torch.cat((out, lse[..., None].view(out.dtype)), -1)
    )
    dim = out.shape[-1]
    return joined[..., :dim], joined[..., dim:].view(lse.dtype)[..., 0]
