"""What a batch computes, laid out once and used by every layer, and what attends to it.

A token attends to up to three kinds of segments of keys: its own prompt in this batch, the cache of
its own sequence, and the caches of the shared prefixes before it. The executor chooses one of two
backends: where the host computes, one loop takes all segments (`loop_attention`); else they are
attended to one by one, and partial results are merged (`segment_attention`).

Shapes: T tokens of a batch, t of them, B sequences of a cache block, Hq query heads, Hk key heads,
    D elements a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from flexgen_helm.kernels.attention import ScoreOptions
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.kv_cache.codec import KeysValues
from flexgen_helm.kv_cache.new_tokens import NewTokens, place_new_tokens
from flexgen_helm.models.attention import AttentionConfig, PartialAttention
from flexgen_helm.models.config import Window
from flexgen_helm.models.decoder import Attend, StateGroup, TableRows
from flexgen_helm.offload.uploads import Uploaded, Uploads
from flexgen_helm.scheduling.sequence import Batch, CacheBlock, Sequence, SequenceKind


@dataclass(frozen=True, eq=False)
class BatchPrompt:
    """A sequence whose prompt is computed in this batch.

    tokens: of the batch, which attend to each other.
    """

    sequence: Sequence
    tokens: slice


@dataclass(frozen=True, eq=False)
class Decoding:
    """The sequences of one cache block, which compute one token over their own caches.

    tokens: of the batch.
    on_host: the host computes attention.
    positions: [B], of the tokens among their sequences' own tokens, on the device that attends.
    absolute: [B], the same counted from the first token of the text.
    target: where the cache takes their keys and values.
    """

    tokens: slice
    block: CacheBlock
    on_host: bool
    positions: Tensor
    absolute: Tensor
    target: NewTokens


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """A shared prefix, or a prompt that is continued, all of which some tokens attend to.

    tokens: [t], of the batch.
    positions: [t], counted from the prefix's first token.
    """

    prefix: Sequence
    tokens: Uploaded
    positions: Uploaded


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Flat view of a batch.

    token_ids, positions: [T], positions are absolute.
    prompt_ends: the first token of the batch that a prompt has, and the end of each prompt; none
        where there is one prompt at most.
    """

    token_ids: TableRows
    positions: TableRows
    prompts: tuple[BatchPrompt, ...]
    decodes: tuple[Decoding, ...]
    prefixes: tuple[SharedPrefix, ...]
    prompt_ends: Uploaded

    def state_groups(self, layer: int, cache: KVCache) -> Iterator[StateGroup]:
        """Divide the tokens for a layer that keeps states: prompts one by one, decoding sequences
        block by block.
        """
        for prompt in self.prompts:
            sequence = prompt.sequence
            before = (
                cache.read_prompt_state(*sequence.prefixes[-1].seat, layer)
                if sequence.prefixes
                else None
            )
            keep = (
                partial(cache.write_prompt_state, *sequence.seat, layer)
                if sequence.needs_cache
                else _forget
            )
            is_prefix = sequence.kind is SequenceKind.SHARED_PREFIX
            yield StateGroup(prompt.tokens, False, before, keep, is_prefix=is_prefix)
        for decoding in self.decodes:
            states = cache.read_states(decoding.block, layer)
            keep = partial(cache.write_states, decoding.block, layer)
            yield StateGroup(decoding.tokens, one_each=True, states=states, keep=keep)

    def prefetch(self, layer: int, cache: KVCache) -> None:
        """Begin to bring what this layer's attention reads, if it has been computed."""
        for block in self.blocks():
            # Not the prefix of a batch that has its turn before this one.
            if not any(sequence.is_prefill for sequence in block.sequences):
                cache.prefetch(block, layer)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; 0 without one."""
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
        sizes = [(len(shared.tokens.numbers), shared.prefix.prompt_len) for shared in self.prefixes]
        return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))

    def blocks(self) -> Iterator[CacheBlock]:
        """Yield the cache blocks that the batch attends to."""
        for decoding in self.decodes:
            yield decoding.block
        for prefix in self.prefixes:
            yield prefix.prefix.seat[0]


class AttentionBackend(ABC):
    """One way to attend, prepared for a batch."""

    metadata: AttentionMetadata

    @abstractmethod
    def attend(self, context: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """Store new keys and values, and attend over all segments.

        q: [T, Hq, D].
        k, v: [T, Hk, D].

        Return output [T, Hq, D] and log-sum-exp [T, Hq].
        """


@dataclass(frozen=True, eq=False)
class LayerAttention(Attend):
    """Attention of one layer over the segments of one batch; backends are given it as `context`.

    window: of the layer; None where tokens see all before them.
    config: of queries that name no other.
    """

    backend: AttentionBackend
    layer: int
    window: Window | None
    config: AttentionConfig
    cache: KVCache

    @cached_property
    def score_options(self) -> ScoreOptions:
        """How the compiled loop scores keys."""
        config, window = self.config, self.window
        seen = None if window is None else (window.tokens, window.is_chunked)
        return ScoreOptions(config.scale, seen, config.softcap, config.slopes)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: AttentionConfig | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        context = self if config is None else replace(self, config=config)
        out, lse = self.backend.attend(context, q, k, v)
        # [Hq], logits that take a share of each head's softmax and have no value
        if sinks is not None:
            # bits of PyTorch's sigmoid depend on an element's place in memory
            share = (torch.exp(sinks - lse) + 1).reciprocal()
            out = out * share.to(out.dtype)[..., None]
        return out

    def state_groups(self) -> Iterator[StateGroup]:
        """Divide the batch's tokens for a layer that keeps states."""
        return self.backend.metadata.state_groups(self.layer, self.cache)


def _forget(states: Tensor) -> None:
    """Keep nothing of a sequence that nobody goes on from."""


def store_prompts(
    metadata: AttentionMetadata, context: LayerAttention, k: Tensor, v: Tensor
) -> Iterator[tuple[BatchPrompt, KeysValues]]:
    """Store each prompt that anything reads later; yield it with its older tokens, which a residual
    window has left behind, as they are after quantization.
    """
    spans = [(prompt.tokens, prompt.sequence.needs_cache) for prompt in metadata.prompts]
    encoded = context.cache.codec.encode_prompts(k, v, spans)
    for prompt, (units, older) in zip(metadata.prompts, encoded):
        if prompt.sequence.needs_cache:
            keys_values = k[prompt.tokens], v[prompt.tokens]
            context.cache.write(prompt.sequence.seat, context.layer, keys_values, units)
        yield prompt, older


def build_attention_metadata(
    batch: Batch, device: torch.device, cache: KVCache
) -> AttentionMetadata:
    """Lay a batch out. The sequences of a block are adjacent and in slot order (the scheduler's
    promise).
    """
    token_ids: list[int] = []
    positions: list[int] = []
    prompts: list[BatchPrompt] = []
    blocks: dict[CacheBlock, int] = {}  # of a block: its first token in the batch
    prefix_tokens: dict[Sequence, list[int]] = {}  # of a prefix: tokens of the batch that see it
    for item in batch.scheduled:
        sequence, first = item.sequence, len(token_ids)
        begin, tokens = sequence.num_computed, slice(first, first + item.count)
        token_ids += sequence.tokens[begin : begin + item.count]
        positions += range(sequence.start + begin, sequence.start + begin + item.count)
        if sequence.is_prefill:
            prompts.append(BatchPrompt(sequence, tokens))
        else:
            assert item.count == 1
            blocks.setdefault(sequence.seat[0], first)
        for prefix in sequence.prefixes:
            prefix_tokens.setdefault(prefix, []).extend(range(tokens.start, tokens.stop))

    uploads = Uploads()
    uploaded_ids, uploaded_positions = uploads.add(token_ids), uploads.add(positions)
    new_tokens = [
        (
            place_new_tokens(block, cache.codec, uploads),
            uploads.add([s.num_computed for s in block.sequences]),
        )
        for block in blocks
    ]
    prefixes = [
        SharedPrefix(
            prefix,
            uploads.add(tokens),
            uploads.add([positions[token] - prefix.start for token in tokens]),
        )
        for prefix, tokens in prefix_tokens.items()
    ]
    ends = [prompt.tokens.stop for prompt in prompts]
    prompt_ends = uploads.add([prompts[0].tokens.start, *ends] if len(prompts) > 1 else [])
    uploads.copy(device)

    decodes = []
    for (block, first), (target, counts) in zip(blocks.items(), new_tokens):
        on_host = cache.attends_on_host(block)
        cached, absolute = (
            x.on_host if on_host else x.on_device for x in (counts, uploaded_positions)
        )
        tokens = slice(first, first + len(block.sequences))
        decodes.append(Decoding(tokens, block, on_host, cached, absolute[tokens], target))
    return AttentionMetadata(
        TableRows(uploaded_ids.on_device, uploaded_ids.on_host),
        TableRows(uploaded_positions.on_device, uploaded_positions.on_host),
        tuple(prompts),
        tuple(decodes),
        tuple(prefixes),
        prompt_ends,
    )
