"""Which segments of keys the tokens of one batch attend to, and the attention over them.

A token attends to up to three kinds of segments, whose partial results merge exactly
(`models.attention`): its own prompt in this batch, the cache of its own sequence, and the caches of
the shared prefixes before it.

Shapes: T tokens of a batch, t of them, B sequences of a cache block, Hq query heads, Hk key heads,
    D elements a head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, pairwise

import torch
from torch import Tensor

from flexgen_helm.engine.packed_attention import (
    PackedStep,
    block_step,
    has_packed_steps,
    prefix_step,
    prompt_step,
)
from flexgen_helm.kernels.attention import (
    BLOCK_KEYS,
    Begun,
    Segments,
    SegmentTable,
    TokenGroup,
    attend_segments,
    can_attend_caches,
)
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.kv_cache.codec import KeysValues, NewTokens, place_new_tokens
from flexgen_helm.kv_cache.visibility import (
    DecodePart,
    PrefixPart,
    Queries,
    decode_parts,
    prefix_parts,
    query_chunks,
    whole_part,
)
from flexgen_helm.models import attention
from flexgen_helm.models.attention import (
    AttentionConfig,
    PartialAttention,
    mask_dtype,
    merge_partial,
)
from flexgen_helm.models.config import Window
from flexgen_helm.models.decoder import Attend, StateGroup, TableRows
from flexgen_helm.offload.uploads import Uploads
from flexgen_helm.scheduling.sequence import Batch, CacheBlock, Sequence, SequenceKind

# From so many queries on, keys and values in host memory are copied to them: those of a few hundred
# positions cross the link faster than a processor attends to them. Fewer queries are sent to the
# host instead.
_COPY_KEYS_FROM = 8


@dataclass(frozen=True, eq=False)
class PromptAttention:
    """A sequence whose first tokens are computed in this batch: `tokens` of the batch attend to
    each other.
    """

    sequence: Sequence
    tokens: slice

    def attend(
        self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor, older: KeysValues
    ) -> PartialAttention:
        """q [t, Hq, D], k and v [t, Hk, D] -> output [t, Hq, D], log-sum-exp [t, Hq].

        older: the first tokens, as quantizing leaves them: the others see them so, as they would in
            a cache.
        """
        start, window, config, fmt = (
            self.sequence.start,
            at.window,
            at.config,
            at.cache.codec.cache_format,
        )
        if fmt is None or not len(older[0]):
            return attention.attend_causal(q, k, v, config, window, start)
        chunks = query_chunks(q, start, window, fmt)
        if fmt.is_sparse:
            return attention.attend_top_k(q, older, (k, v), config, chunks)
        return attention.attend_two_versions(q, older, (k, v), config, chunks)


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

    def attend(self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """q [t, Hq, D], k and v [t, Hk, D] -> output [t, Hq, D], log-sum-exp [t, Hq]."""
        return attention.attend_prompts(q, k, v, at.config, at.window, self.borders, self.longest)


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """The sequences of one cache block, which compute one token over their own caches.

    tokens: of the batch.
    on_host: the host computes attention.
    positions: [B], of the tokens among their sequences' own; on the host if it computes attention.
    new: where the tokens go.
    parts: the cached keys that they see, in parts; the first has keys of all sequences.
    table: for the compiled loop, the keys of shared prefixes behind the last whole block, and of
        the only part; None where it cannot be used.
    """

    tokens: slice
    block: CacheBlock
    on_host: bool
    positions: Tensor
    new: NewTokens
    parts: tuple[DecodePart, ...]
    table: SegmentTable | None = None

    def attend(
        self,
        at: LayerAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefixes: SequenceOf[KeysValues] = (),
        begun: Begun | None = None,
    ) -> PartialAttention:
        """q [B, Hq, D], k and v [B, Hk, D] -> output [B, Hq, D], log-sum-exp [B, Hq]; stores k and
        v.

        prefixes, begun: what the compiled loop reads beside the caches, and goes on from
            (`attend_segments`).
        """
        cache = at.cache
        if self.on_host:
            heads = q.shape[1], k.shape[1], v.shape[1]
            (joined,) = cache.copy_to_host("activations", torch.cat((q, k, v), 1))
            q, k, v = joined.split(heads, 1)
            at = replace(at, config=at.config.on_host)
        cache.append(self.block, at.layer, self.new, k, v)
        first, *more = self.parts
        if self.table is not None:
            segments = self.table.at(prefixes, caches=cache.read(self.block, at.layer, first))
            out, lse = _attend_segments(at, q.float().contiguous(), segments, begun)
            out = out.to(q.dtype)
        else:
            out, lse = self._attend(first, at, q)
        for part in more:
            rows = part.sequences
            out[rows], lse[rows] = merge_partial((out[rows], lse[rows]), self._attend(part, at, q))
        cache.done(self.block, at.layer)
        return _to_device(cache, (out, lse)) if self.on_host else (out, lse)

    def _attend(self, part: DecodePart, at: LayerAttention, q: Tensor) -> PartialAttention:
        layer, config, cache = at.layer, at.config, at.cache
        q, positions, visible = (
            q[part.sequences],
            self.positions[part.sequences],
            part.visible[at.window],
        )
        if part.is_sparse:
            keys, mask, counts = (
                cache.read_keys(self.block, layer, part),
                visible.mask,
                visible.num_selected,
            )
            assert mask is not None and counts is not None
            top_k = attention.select_top_k(
                q, keys, config, positions, mask, counts, visible.max_selected
            )
            return top_k.attend(cache.read_selected(self.block, layer, part, top_k))
        keys, values = cache.read(self.block, layer, part)
        return attention.attend_cached(
            q, keys, values, config, positions, visible.mask, part.key_positions, visible.sees_none
        )


@dataclass(frozen=True, eq=False)
class PrefixAttention:
    """Tokens of the batch that attend to all of a shared prefix, or of the prompt that they
    continue.

    tokens: a slice where they are neighbours, which spares copies.
    positions: [t], counted from the prefix's first token; host_positions: the same on the host.
    parts: the prefix's keys that they see, in parts.
    """

    prefix: Sequence
    tokens: Tensor | slice
    positions: Tensor
    host_positions: Tensor
    parts: tuple[PrefixPart, ...]

    def attend(self, at: LayerAttention, q: Tensor) -> Iterator[PartialAttention]:
        """q [t, Hq, D] -> for each part output [t, Hq, D] and log-sum-exp [t, Hq]."""
        (block, slot), config, cache = self.prefix.seat, at.config, at.cache
        positions, keys_on_host = self.positions, cache.attends_on_host(block)
        on_host = keys_on_host and len(positions) < _COPY_KEYS_FROM
        if on_host:
            (q,) = cache.copy_to_host("activations", q)
            config, positions = config.on_host, self.host_positions
        for part in self.parts:
            keys, values = cache.read_prefix(block, slot, at.layer, part)
            if keys.device != q.device or (keys_on_host and not on_host):
                keys, values = cache.copy_to_device("cache", keys, values)
            visible = part.visible(positions, at.window, mask_dtype(q.device, q.dtype))
            own_positions = (
                positions - part.first if part.first and config.slopes is not None else positions
            )
            partial = attention.attend_prefix(
                q, keys, values, config, own_positions, visible.mask, visible.sees_none
            )
            yield _to_device(cache, partial) if on_host else partial
        cache.done(block, at.layer)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Flat view of a batch; built once, used by every layer.

    token_ids, positions: [T], positions are absolute.
    table: for the compiled loop, what prompts see, and decoding tokens of the blocks of keys in
        shared prefixes; None where the segments are attended to one by one.
    packed: steps of the compiled loop over quantized caches; none where it does not take them.
    joined: all prompts, where a device may attend to them at once.
    """

    token_ids: TableRows
    positions: TableRows
    prompts: tuple[PromptAttention, ...]
    decodes: tuple[DecodeAttention, ...]
    prefixes: tuple[PrefixAttention, ...]
    table: SegmentTable | None
    packed: tuple[PackedStep, ...] = ()
    joined: JoinedPrompts | None = None

    def attend(self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """Attend over all segments; q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D] and log-sum-exp
        [T, Hq].
        """
        if self.table is not None:
            return self._attend_compiled(at, self.table, q, k, v)
        if self.packed:
            return self._attend_packed(at, q, k, v)
        segments = self._attend_own(at, q, k, v)
        first, (out, lse) = next(segments)
        if first.stop - first.start < len(q):
            parts = chain([(first, (out, lse))], segments)
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
            for tokens, part in parts:
                out[tokens], lse[tokens] = part
        for prefix in self.prefixes:
            joined = out[prefix.tokens], lse[prefix.tokens]
            for part in prefix.attend(at, q[prefix.tokens]):
                joined = merge_partial(joined, part)
            out[prefix.tokens], lse[prefix.tokens] = joined
        return out, lse

    def _attend_own(
        self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, PartialAttention]]:
        """Yield tokens and what they see of their own sequences; prompts are stored, and new
        tokens.
        """
        stored = self._store_prompts(at, k, v)
        if self.joined is not None and attention.joins_prompts(q, at.config, at.window):
            deque(stored, maxlen=0)
            yield (
                (tokens := self.joined.tokens),
                self.joined.attend(at, q[tokens], k[tokens], v[tokens]),
            )
        else:
            for prompt, older in stored:
                tokens = prompt.tokens
                yield tokens, prompt.attend(at, q[tokens], k[tokens], v[tokens], older)
        for decoding in self.decodes:
            tokens = decoding.tokens
            yield tokens, decoding.attend(at, q[tokens], k[tokens], v[tokens])

    def _store_prompts(
        self, at: LayerAttention, k: Tensor, v: Tensor
    ) -> Iterator[tuple[PromptAttention, KeysValues]]:
        """Store each prompt that anything reads later; yield it with its older tokens as quantizing
        leaves them.
        """
        asked = [(prompt.tokens, prompt.sequence.needs_cache) for prompt in self.prompts]
        for prompt, (units, older) in zip(self.prompts, at.cache.codec.encode_prompts(k, v, asked)):
            if prompt.sequence.needs_cache:
                at.cache.write(
                    *prompt.sequence.seat, at.layer, k[prompt.tokens], v[prompt.tokens], units
                )
            yield prompt, older

    def _attend_compiled(
        self, at: LayerAttention, table: SegmentTable, q: Tensor, k: Tensor, v: Tensor
    ) -> PartialAttention:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        cache, begun = at.cache, Begun.empty(q)
        # a prefix is read in the batch that computes it
        deque(self._store_prompts(at, k, v), maxlen=0)
        prefixes = [
            cache.read_prefix(*shared.prefix.seat, at.layer, *shared.parts)
            for shared in self.prefixes
        ]
        if len(table.jobs):
            _attend_segments(at, q, table.at(prefixes, (k, v) if self.prompts else None), begun)
        for decoding in self.decodes:
            part = decoding.tokens
            decoding.attend(
                at, q[part], k[part], v[part], prefixes, Begun(*(x[part] for x in begun))
            )
        for shared in self.prefixes:
            cache.done(shared.prefix.seat[0], at.layer)
        return begun.out, begun.lse

    def _attend_packed(
        self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor
    ) -> PartialAttention:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        cache, begun = at.cache, Begun.empty(q)
        older = [seen for _, seen in self._store_prompts(at, k, v)]
        decodes = {decoding.block: decoding for decoding in self.decodes}
        # one after the other is brought
        for block, steps in groupby(self.packed, lambda step: step.block):
            if (decoding := decodes.get(block)) is not None:
                cache.append(
                    decoding.block, at.layer, decoding.new, k[decoding.tokens], v[decoding.tokens]
                )
            for step in steps:
                part = step.tokens
                segments = step.table.at(step.read(cache, at.layer, (k, v), older))
                _attend_segments(at, q[part], segments, Begun(*(x[part] for x in begun)))
            if block is not None:
                cache.done(block, at.layer)
        return begun.out, begun.lse

    def state_groups(self, layer: int, cache: KVCache) -> Iterator[StateGroup]:
        """Divide the tokens for a layer that keeps states: prompts one by one, decoding sequences
        block by block.
        """
        for prompt in self.prompts:
            sequence = prompt.sequence
            before = (
                cache.state_behind(*sequence.prefixes[-1].seat, layer)
                if sequence.prefixes
                else None
            )
            keep = (
                partial(cache.write_state, *sequence.seat, layer)
                if sequence.needs_cache
                else _forget
            )
            yield StateGroup(
                prompt.tokens, False, before, keep, sequence.kind is SequenceKind.SHARED_PREFIX
            )
        for decoding in self.decodes:
            states = cache.read_states(decoding.block, layer)
            yield StateGroup(
                decoding.tokens, True, states, partial(cache.write_states, decoding.block, layer)
            )

    def prefetch(self, layer: int, cache: KVCache) -> None:
        """Begin to bring what this layer's attention reads, if it has been computed."""
        for block in self.blocks():
            # Not the prefix of a batch that has its turn before this one.
            if not any(sequence.is_prefill for sequence in block.sequences):
                cache.prefetch(block, layer)

    @property
    def longest_prompt(self) -> int:
        return max((prompt.tokens.stop - prompt.tokens.start for prompt in self.prompts), default=0)

    @property
    def cached_positions(self) -> int:
        """Positions of their own caches that tokens attend to, summed over the tokens."""
        return sum(
            len(decoding.block.sequences) * decoding.block.longest for decoding in self.decodes
        )

    @property
    def largest_prefix(self) -> tuple[int, int]:
        """Of the largest segment that several sequences attend to: its tokens here, and its
        positions.
        """
        sizes = [(len(shared.positions), shared.prefix.prompt_len) for shared in self.prefixes]
        return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))

    def blocks(self) -> Iterator[CacheBlock]:
        """Yield the cache blocks that the batch attends to."""
        for decoding in self.decodes:
            yield decoding.block
        for prefix in self.prefixes:
            yield prefix.prefix.seat[0]


@dataclass(frozen=True, eq=False)
class LayerAttention(Attend):
    """Attention of one layer over the segments of one batch.

    config: of queries that name no other.
    """

    metadata: AttentionMetadata
    layer: int
    window: Window | None
    config: AttentionConfig
    cache: KVCache

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: AttentionConfig | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out, lse = self.metadata.attend(
            self if config is None else replace(self, config=config), q, k, v
        )
        # [Hq], logits that take a share of each head's softmax and have no value
        if sinks is not None:
            # PyTorch's sigmoid follows an element's place in memory
            share = (torch.exp(sinks - lse) + 1).reciprocal()
            out = out * share.to(out.dtype)[..., None]
        return out

    def state_groups(self) -> Iterator[StateGroup]:
        return self.metadata.state_groups(self.layer, self.cache)


def _forget(states: Tensor) -> None:
    """Keep nothing of a sequence that nobody goes on from."""


def build_attention_metadata(
    batch: Batch,
    windows: Iterable[Window | None],
    device: torch.device,
    dtype: torch.dtype,
    cache: KVCache,
) -> AttentionMetadata:
    """Lay a batch out. The sequences of a block are adjacent and in slot order (the scheduler's
    promise).

    windows: those that occur among the layers; each has its own masks.
    dtype: of queries.
    """
    kinds = set(windows) or {None}
    has_chunks = any(window is not None and window.is_chunked for window in kinds)
    token_ids: list[int] = []
    positions: list[int] = []
    prompts: list[PromptAttention] = []
    blocks: dict[CacheBlock, int] = {}  # first token of the batch
    users: dict[Sequence, list[int]] = {}  # of a prefix: tokens of the batch
    for item in batch.scheduled:
        sequence, first = item.sequence, len(token_ids)
        begin, tokens = sequence.num_computed, slice(first, first + item.count)
        token_ids += sequence.tokens[begin : begin + item.count]
        positions += range(sequence.start + begin, sequence.start + begin + item.count)
        if sequence.is_prefill:
            prompts.append(PromptAttention(sequence, tokens))
        else:
            assert item.count == 1
            blocks.setdefault(sequence.seat[0], first)
        for prefix in sequence.prefixes:
            users.setdefault(prefix, []).extend(range(tokens.start, tokens.stop))

    uploads = Uploads()
    ids, at = uploads.add(token_ids), uploads.add(positions)
    appended = [
        (
            place_new_tokens(block, cache.codec, uploads),
            uploads.add([s.num_computed for s in block.sequences]),
        )
        for block in blocks
    ]
    in_prefixes = [
        (uploads.add(tokens), uploads.add([positions[token] - prefix.start for token in tokens]))
        for prefix, tokens in users.items()
    ]
    ends = (
        [prompts[0].tokens.start, *(prompt.tokens.stop for prompt in prompts)]
        if len(prompts) > 1
        else []
    )
    borders = uploads.add(ends)
    uploads.copy(device)

    # One loop attends to all segments. Where a device computes and the host attends, it takes
    # caches alone.
    fmt, can_attend = (
        cache.codec.cache_format,
        dtype == torch.float32 and can_attend_caches(device, dtype),
    )
    compiles, packs = (
        can_attend and fmt is None,
        can_attend and fmt is not None and has_packed_steps(fmt),
    )
    lengths = [(prefix.prompt_len, prefix.start) for prefix in users]
    numbers = {prefix: number for number, prefix in enumerate(users)}
    decodes = []
    for (block, first), (new, counts) in zip(blocks.items(), appended):
        on_host = cache.attends_on_host(block)
        cached, absolute = (x.on_host if on_host else x.on_device for x in (counts, at))
        tokens = slice(first, first + len(block.sequences))
        starts = absolute[tokens] - cached if has_chunks else 0
        table = None
        if fmt is None and can_attend_caches(cached.device, dtype):
            groups = []
            for row, sequence in enumerate(block.sequences):
                shared = [numbers[prefix] for prefix in sequence.prefixes] if compiles else []
                begin = _whole_blocks(sequence) if compiles else 0
                groups.append(TokenGroup(row, 1, shared, (row, sequence.start), begin=begin))
            table = SegmentTable.of(groups, positions[tokens], lengths)
            seen: tuple[DecodePart, ...] = (whole_part(block),)
        else:
            queries = Queries(cached, starts, mask_dtype(cached.device, dtype))
            seen = decode_parts(block, queries, () if packs else kinds, cache.codec)
        decodes.append(DecodeAttention(tokens, block, on_host, cached, new, seen, table))

    prefixes = []
    for prefix, (of_batch, seen_at) in zip(users, in_prefixes):
        first, last = of_batch.numbers[0], of_batch.numbers[-1]
        adjacent = last - first == len(of_batch.numbers) - 1  # ascending, no token twice
        where = slice(first, last + 1) if adjacent else of_batch.on_device
        parts = prefix_parts(prefix.start, prefix.prompt_len, seen_at.numbers, cache.codec)
        prefixes.append(PrefixAttention(prefix, where, seen_at.on_device, seen_at.on_host, parts))

    table = (
        SegmentTable.of([*_joined_groups(prompts, decodes, numbers)], positions, lengths)
        if compiles
        else None
    )
    packed: list[PackedStep] = []
    if packs:
        assert fmt is not None
        packed += [
            prefix_step(shared.prefix, part, tokens, positions)
            for shared, tokens in zip(prefixes, users.values())
            for part in shared.parts
        ]
        if prompts:
            packed.append(
                prompt_step(
                    [(prompt.sequence, prompt.tokens) for prompt in prompts], positions, fmt
                )
            )
        for decoding in decodes:
            window, *stored = decoding.parts
            packed += [
                block_step(
                    decoding.block, decoding.tokens.start, positions, (window, part), cache.codec
                )
                for part in stored or [window]
            ]
    joined = None
    if (
        device.type == "cuda"
        and fmt is None
        and ends
        and all(b.tokens.start == a.tokens.stop for a, b in pairwise(prompts))
    ):
        longest = max(end - begin for begin, end in pairwise(ends))
        joined = JoinedPrompts(
            slice(ends[0], ends[-1]), (borders.on_device - ends[0]).int(), longest
        )
    rows = TableRows(ids.on_device, ids.on_host), TableRows(at.on_device, at.on_host)
    return AttentionMetadata(
        *rows, tuple(prompts), tuple(decodes), tuple(prefixes), table, tuple(packed), joined
    )


def _whole_blocks(sequence: Sequence) -> int:
    """Return the positions of a sequence's shared prefixes that whole blocks of keys have."""
    return sequence.start // BLOCK_KEYS * BLOCK_KEYS


def _joined_groups(
    prompts: Iterable[PromptAttention],
    decodes: Iterable[DecodeAttention],
    numbers: Mapping[Sequence, int],
) -> Iterator[TokenGroup]:
    """Prompts, and decoding tokens over the blocks of keys that lie in shared prefixes; numbers: of
    prefixes.
    """
    for prompt in prompts:
        shared = [numbers[prefix] for prefix in prompt.sequence.prefixes]
        yield TokenGroup(
            prompt.tokens.start, prompt.tokens.stop - prompt.tokens.start, shared, is_prompt=True
        )
    for decoding in decodes:
        first = decoding.tokens.start
        for prefixes, sequences in groupby(
            decoding.block.sequences, lambda sequence: sequence.prefixes
        ):
            begun, *more = sequences
            if end := _whole_blocks(begun):
                yield TokenGroup(
                    first, 1 + len(more), [numbers[prefix] for prefix in prefixes], end=end
                )
            first += 1 + len(more)


def _attend_segments(
    at: LayerAttention, q: Tensor, segments: Segments, begun: Begun | None = None
) -> PartialAttention:
    window, config = at.window, at.config
    seen = None if window is None else (window.tokens, window.is_chunked)
    return attend_segments(q, segments, config.scale, seen, config.softcap, config.slopes, begun)


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
