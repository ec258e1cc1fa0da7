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
        kinds = {*windows} or {None}
        self._decodes = [
            _decode_attention(decoding, codec, kinds, dtype) for decoding in metadata.decodes
        ]
        self._prefixes = [PrefixAttention(shared, codec) for shared in metadata.prefixes]
        self._joined = JoinedPrompts.of(metadata, codec)

    def attend(self, context: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        segments = self._attend_own(context, q, k, v)
        first, (out, lse) = next(segments)
        if first.stop - first.start < len(q):  # else one segment has all tokens: nothing is copied
            parts = chain([(first, (out, lse))], segments)
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
            for tokens, part in parts:
                out[tokens], lse[tokens] = part
        for prefix in self._prefixes:
            seeing = prefix.tokens
            merged = out[seeing], lse[seeing]
            for part in prefix.attend(context, q[seeing]):
                merged = merge_partial(merged, part)
            out[seeing], lse[seeing] = merged
        return out, lse

    def _attend_own(
        self, context: LayerAttention, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, PartialAttention]]:
        """Store new keys and values; yield tokens of the batch, and their attention to their own
        sequences.
        """
        stored = store_prompts(self.metadata, context, k, v)
        joined = self._joined
        if joined is not None and attention.joins_prompts(q, context.config, context.window):
            deque(stored, maxlen=0)  # stores all prompts
            tokens = joined.tokens
            yield (
                tokens,
                attention.attend_prompts(
                    q[tokens],
                    k[tokens],
                    v[tokens],
                    context.config,
                    context.window,
                    joined.borders,
                    joined.longest,
                ),
            )
        else:
            for prompt, older in stored:
                tokens = prompt.tokens
                new = k[tokens], v[tokens]
                yield tokens, attend_prompt(context, prompt, q[tokens], new, older)
        for decode in self._decodes:
            tokens = decode.decoding.tokens
            yield tokens, decode.attend(context, q[tokens], k[tokens], v[tokens])


def attend_prompt(
    context: LayerAttention, prompt: BatchPrompt, q: Tensor, new: KeysValues, older: KeysValues
) -> PartialAttention:
    """Attend to a prompt's own tokens.

    q: [t, Hq, D].
    new: k and v [t, Hk, D].
    older: those of the first tokens as quantizing leaves them, which the other tokens see, as they
        would in a cache.

    Return output [t, Hq, D] and log-sum-exp [t, Hq].
    """
    start, config, fmt = prompt.sequence.start, context.config, context.cache.codec.cache_format
    if fmt is None or not len(older[0]):
        return attention.attend_causal(q, new, config, context.window, start)
    chunks = query_chunks(q, start, context.window, fmt)
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
        """Return the prompts of a batch; None where no kernel attends to all of them at once."""
        ends, prompts = metadata.prompt_ends, metadata.prompts
        if codec.cache_format is not None or not ends.numbers:
            return None
        has_gaps = any(b.tokens.start != a.tokens.stop for a, b in pairwise(prompts))
        if ends.on_device.device.type != "cuda" or has_gaps:
            return None
        first, longest = ends.numbers[0], metadata.longest_prompt
        borders = (ends.on_device - first).int()
        return cls(slice(first, ends.numbers[-1]), borders, longest)


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """Sequences of one cache block over their own caches.

    parts: the cached keys that they see, in parts; the first has keys of all sequences.
    table: of the only part, for the compiled loop, which a host attends with where a device
        computes; None where it cannot be used.
    """

    decoding: Decoding
    parts: tuple[DecodePart, ...]
    table: SegmentTable | None = None

    def attend(self, context: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """Store k and v [B, Hk, D], and attend with q [B, Hq, D]; return output [B, Hq, D] and
        log-sum-exp [B, Hq].
        """
        cache, decoding = context.cache, self.decoding
        if decoding.on_host:
            heads = q.shape[1], k.shape[1], v.shape[1]
            (joined,) = cache.copy_to_host("activations", torch.cat((q, k, v), 1))
            q, k, v = joined.split(heads, 1)
            context = replace(context, config=context.config.on_host)
        cache.append(decoding.block, context.layer, decoding.target, k, v)
        first, *more = self.parts
        out, lse = self._attend(first, context, q)
        for part in more:
            rows = part.sequences
            partial = self._attend(part, context, q)
            out[rows], lse[rows] = merge_partial((out[rows], lse[rows]), partial)
        cache.done(decoding.block, context.layer)
        return _to_device(cache, (out, lse)) if decoding.on_host else (out, lse)

    def _attend(self, part: DecodePart, context: LayerAttention, q: Tensor) -> PartialAttention:
        block, layer, cache = self.decoding.block, context.layer, context.cache
        if self.table is not None:
            segments = self.table.with_addresses([cache.read(block, layer, part)])
            out, lse = attend_segments(q.float().contiguous(), segments, context.score_options)
            return out.to(q.dtype), lse
        q, positions = q[part.sequences], self.decoding.positions[part.sequences]
        visible = part.visible[context.window]
        if part.is_sparse:
            keys = cache.read_keys(block, layer, part)
            top_k = attention.select_top_k(q, keys, context.config, positions, visible)
            return top_k.attend(cache.read_selected(block, layer, part, top_k))
        keys_values = cache.read(block, layer, part)
        return attention.attend_cached(q, keys_values, context.config, positions, visible)


def _decode_attention(
    decoding: Decoding, codec: Codec, windows: set[Window | None], dtype: torch.dtype
) -> DecodeAttention:
    """Prepare the sequences of a block: for the compiled loop where a host can attend with it."""
    block, device = decoding.block, decoding.positions.device
    if codec.cache_format is None and can_attend_caches(device, dtype):
        groups = []
        for row, sequence in enumerate(block.sequences):
            cached = Segment(block, sequence.start, sequence.num_computed + 1, row)
            groups.append(TokenGroup(row, 1, [cached]))
        last = [sequence.start + sequence.num_computed for sequence in block.sequences]
        return DecodeAttention(decoding, (whole_part(block),), SegmentTable.of(groups, last))
    has_chunks = any(window is not None and window.is_chunked for window in windows)
    starts = decoding.absolute - decoding.positions if has_chunks else 0
    queries = Queries(decoding.positions, starts, mask_dtype(device, dtype))
    return DecodeAttention(decoding, decode_parts(block, queries, windows, codec))


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

    def attend(self, context: LayerAttention, q: Tensor) -> Iterator[PartialAttention]:
        """Attend with q [t, Hq, D]; yield output [t, Hq, D] and log-sum-exp [t, Hq] of each
        part.
        """
        (block, slot), config, cache = self._shared.prefix.seat, context.config, context.cache
        positions, keys_on_host = self._shared.positions.on_device, cache.attends_on_host(block)
        on_host = keys_on_host and len(positions) < _COPY_KEYS_FROM
        if on_host:
            (q,) = cache.copy_to_host("activations", q)
            config, positions = config.on_host, self._shared.positions.on_host
        for part in self._parts:
            keys, values = cache.read_prefix(block, slot, context.layer, part)
            if keys.device != q.device or (keys_on_host and not on_host):
                keys, values = cache.copy_to_device("cache", keys, values)
            visible = part.visible(positions, context.window, mask_dtype(q.device, q.dtype))
            # ALiBi's slopes count distances from the first key of the part.
            is_shifted = part.first and config.slopes is not None
            distances = positions - part.first if is_shifted else positions
            partial = attention.attend_prefix(q, (keys, values), config, distances, visible)
            yield _to_device(cache, partial) if on_host else partial
        cache.done(block, context.layer)


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
