"""The KV cache by itself: whatever the tier and the codec, a query reads what was written, in the
defined version.
"""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.kv_cache.codec import make_codec
from flexgen_helm.kv_cache.new_tokens import place_new_tokens
from flexgen_helm.kv_cache.visibility import Queries, decode_parts, prefix_parts
from flexgen_helm.offload.uploads import Uploads
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence, SequenceKind
from flexgen_helm.tiers import TIERS
from tests.helpers.offload import tiers_of
from tests.helpers.shares import share_of

HEADS, DIM, LAYERS = 2, 16, 2
CONFIG = replace(
    resolve("opt-125m").entry.config,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM,
)
FORMATS = {
    "plain": None,
    "channels": CacheFormat(GroupFormat(4, 16, "out"), GroupFormat(4, 8, "in", "word"), 5),
    "token by token": CacheFormat(GroupFormat(4, 8, "in"), GroupFormat(4, 8, "in"), 3),
    "sparse": CacheFormat(None, None, 4, value_share=0.5),
}
HOMES = {
    "device": ("gpu", True),
    "host": ("cpu", True),
    "disk": ("disk", True),
    "disk of a host": ("disk", False),
}


class Reference:
    """Keys and values of every sequence as they were computed, in plain lists."""

    def __init__(self, seed):
        self._draw = torch.Generator().manual_seed(seed)
        self.tokens = {}

    def new(self, tokens):
        k, v = (torch.randn(tokens, HEADS, DIM, generator=self._draw) for _ in range(2))
        return k, v

    def add(self, sequence, layer, k, v):
        old = self.tokens.get((sequence, layer))
        self.tokens[sequence, layer] = (
            (k, v) if old is None else (torch.cat((old[0], k)), torch.cat((old[1], v)))
        )

    def seen(self, cache, sequence, layer, position):
        """What the query at `position` sees by the definition: older groups after a round trip, the
        rest as it was.
        """
        k, v = self.tokens[sequence, layer]
        fmt = cache.codec.cache_format
        border = 0 if fmt is None else min(fmt.num_quantized(position), k.shape[0])
        whole = border if fmt is None else -(-border // fmt.group_tokens) * fmt.group_tokens
        if not whole:
            return k, v
        old_k, old_v = cache.codec.round_trip(k[:whole], v[:whole])
        return torch.cat((old_k[:border], k[border:])), torch.cat((old_v[:border], v[border:]))


def write(cache, sequence, layer, k, v):
    ((units, _),) = cache.codec.encode_prompts(k, v, [(slice(0, len(k)), True)])
    cache.write(sequence.seat, layer, (k, v), units)


def open_cache(folder, home, fmt, overlap):
    tier, has_gpu = HOMES[home]
    tiers = tiers_of(folder, overlap, has_gpu)
    fractions = {name: float(name == tier) for name in TIERS}
    return KVCache(CONFIG, tiers, torch.float32, fractions, cache_format=fmt), tiers


def placed(cache, block):
    uploads = Uploads()
    new = place_new_tokens(block, cache.codec, uploads)
    uploads.copy(torch.device("cpu"))
    return new


def visible(cache, block, layer):
    """For every sequence of a block, position -> (key, value) of all that its query reads, from all
    parts.
    """
    found = [{} for _ in block.sequences]
    positions = torch.tensor([sequence.num_computed for sequence in block.sequences])
    for part in decode_parts(block, Queries(positions, 0, torch.float32), {None}, cache.codec):
        if part.is_sparse:
            keys = cache.read_keys(block, layer, part)
            # of sparse formats values are selected: tested elsewhere
            values = torch.full_like(keys, float("nan"))
        else:
            keys, values = cache.read(block, layer, part)
        seen = part.visible[None]
        mask, columns = seen.mask, seen.key_positions
        for row, number in enumerate(range(part.sequences.start, part.sequences.stop)):
            for column in range(keys.shape[2]):
                if mask is None or mask[row, 0, 0, column] == 0:
                    position = column if columns is None else int(columns[row, column])
                    assert position not in found[number], "a key is seen once"
                    found[number][position] = keys[row, :, column], values[row, :, column]
    return found


@settings(max_examples=share_of(60, 3))
@given(
    name=st.sampled_from(list(FORMATS)),
    home=st.sampled_from(list(HOMES)),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    steps=st.integers(1, 40),
    page_tokens=st.sampled_from([0, 16]),
    joins=st.booleans(),
    prefetch=st.booleans(),
    overlap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_decoding_reads_what_was_written(
    tmp_path, name, home, prompts, steps, page_tokens, joins, prefetch, overlap, seed
):
    """A growing block is replaced before each step that needs it; two blocks may begin apart and be
    joined.
    """
    page_tokens = 0 if home.startswith("disk") else page_tokens
    cache, tiers = open_cache(tmp_path, home, FORMATS[name], overlap)
    reference, draw = Reference(seed), torch.Generator().manual_seed(seed)
    sequences = [
        Sequence(
            SequenceKind.PROMPT,
            (),
            [1] * n,
            n,
            max_new_tokens=steps + 1,
            num_draws=1,
            needs_cache=True,
        )
        for n in prompts
    ]
    halves = [sequences[::2], sequences[1::2]] if joins else [sequences]
    blocks = [new_block(half, page_tokens) for half in halves if half]
    try:
        for sequence in sequences:
            for layer in range(LAYERS):
                k, v = reference.new(sequence.prompt_len)
                write(cache, sequence, layer, k, v)
                reference.add(sequence, layer, k, v)
            sequence.num_computed = sequence.prompt_len
        for step in range(steps):
            if page_tokens:
                together = len(blocks) > 1 and step >= steps // 2
                full = (
                    blocks
                    if together
                    else [block for block in blocks if block.longest > block.capacity]
                )
                for group in [full] if together else [[block] for block in full]:
                    moved = [sequence for block in group for sequence in block.sequences]
                    sources = [(sequence.block, sequence.slot) for sequence in moved]
                    joined = new_block(moved, page_tokens)
                    cache.regroup(joined, sources)
                    blocks = [block for block in blocks if block not in group] + [joined]
            for block in blocks:
                decode_step(cache, block, reference, prefetch)
                # one ends, the last moves there
                if len(block.sequences) > 1 and torch.rand((), generator=draw) < 0.3:
                    slot = int(torch.randint(len(block.sequences), (), generator=draw))
                    last, gone = (
                        block.sequences.pop(),
                        block.sequences[slot] if slot < len(block.sequences) else None,
                    )
                    if gone is not None:
                        cache.move(block, last.slot, slot, last.num_computed, gone.num_computed)
                        block.sequences[slot], last.slot = last, slot
        for block in blocks:
            cache.free(block)
        for ledger in tiers.ledgers.values():
            ledger.check({})
    finally:
        cache.close()
        tiers.close()


def new_block(sequences, page_tokens):
    """Seat sequences in a block that is wide enough for the next token, or for all of them without
    pages.
    """
    width = max(sequence.cache_tokens for sequence in sequences)
    if page_tokens:
        longest = max(max(sequence.num_computed, sequence.prompt_len) + 1 for sequence in sequences)
        width = min(width, -(-longest // page_tokens) * page_tokens)
    block = CacheBlock(width, len(sequences), list(sequences))
    for slot, sequence in enumerate(sequences):
        sequence.block, sequence.slot = block, slot
    return block


def decode_step(cache, block, reference, prefetch):
    """Append a token to each sequence of a block, and compare all that its queries see."""
    for layer in range(LAYERS):
        if prefetch:
            cache.prefetch(block, layer)
        k, v = reference.new(len(block.sequences))
        for row, sequence in enumerate(block.sequences):
            reference.add(sequence, layer, k[row : row + 1], v[row : row + 1])
        cache.append(block, layer, placed(cache, block), k, v)
        for sequence, found in zip(block.sequences, visible(cache, block, layer)):
            keys, values = reference.seen(cache, sequence, layer, sequence.num_computed)
            assert sorted(found) == list(range(sequence.num_computed + 1))
            for position, (key, value) in found.items():
                assert torch.equal(key, keys[position])
                assert value.isnan().all() or torch.equal(value, values[position])
        cache.done(block, layer)
    for sequence in block.sequences:
        sequence.num_computed += 1


@settings(max_examples=40)
@given(
    name=st.sampled_from(["plain", "channels", "token by token"]),
    home=st.sampled_from(list(HOMES)),
    groups=st.integers(1, 4),
    behind=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    overlap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_readers_of_a_prefix_see_what_was_written(
    tmp_path, name, home, groups, behind, overlap, seed
):
    cache, tiers = open_cache(tmp_path, home, FORMATS[name], overlap)
    reference, length = Reference(seed), groups * (cache.prefix_multiple or 1)
    prefix = Sequence(
        SequenceKind.SHARED_PREFIX, (), [1] * length, length, max_new_tokens=1, needs_cache=True
    )
    prefix.block, prefix.slot = CacheBlock(length, 1, [prefix]), 0
    positions = [length + n for n in behind]
    try:
        for layer in range(LAYERS):
            k, v = reference.new(length)
            write(cache, prefix, layer, k, v)
            reference.add(prefix, layer, k, v)
        for layer in range(LAYERS):
            seen = [{} for _ in positions]
            for part in prefix_parts(prefix.start, length, positions, cache.codec):
                keys, values = cache.read_prefix(*prefix.seat, layer, part)
                assert keys.shape == (HEADS, part.last - part.first, DIM)
                mask = part.visible(torch.tensor(positions), None, torch.float32).mask
                for query in range(len(positions)):
                    for column in range(keys.shape[1]):
                        if mask is None or mask[query, column] == 0:
                            assert part.first + column not in seen[query]
                            seen[query][part.first + column] = keys[:, column], values[:, column]
            cache.done(prefix.block, layer)
            for query, position in enumerate(positions):
                keys, values = reference.seen(cache, prefix, layer, position)
                assert sorted(seen[query]) == list(range(length))
                assert all(
                    torch.equal(k, keys[at]) and torch.equal(v, values[at])
                    for at, (k, v) in seen[query].items()
                )
    finally:
        cache.close()
        tiers.close()


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_together_are_what_each_is_alone(name, monkeypatch):
    """Units that are stored, and older tokens as quantizing leaves them: by `encode` and
    `round_trip` of one prompt.
    """
    draw = random.Random(name)
    codec, reference = make_codec(FORMATS[name], HEADS, DIM, torch.float32), Reference(3)
    fmt, size = codec.cache_format, codec.group_tokens
    for most in (1, 100, 4096):
        monkeypatch.setattr("flexgen_helm.kv_cache.codec.QUANTIZED_TOKENS", most)
        lengths = [
            draw.choice([1, size - 1 or 1, size, draw.randrange(1, 5 * size + 9)]) for _ in range(6)
        ]
        k, v = reference.new(sum(lengths))
        ends = list(accumulate(lengths))
        prompts = [(slice(end - n, end), draw.random() < 0.7) for n, end in zip(lengths, ends)]
        for (tokens, is_stored), (units, older) in zip(
            prompts, codec.encode_prompts(k, v, prompts), strict=True
        ):
            alone_k, alone_v = k[tokens], v[tokens]
            whole = len(alone_k) // size * size
            if is_stored and whole:
                expected = codec.encode(alone_k[:whole], alone_v[:whole])
                assert all(map(torch.equal, units, expected))
            if is_stored and not whole:
                assert not len(units[0])
            seen = fmt.num_quantized(len(alone_k) - 1) if fmt else 0
            assert len(older[0]) == len(older[1]) == seen
            if seen:
                assert all(
                    map(torch.equal, older, codec.round_trip(alone_k[:seen], alone_v[:seen]))
                )
