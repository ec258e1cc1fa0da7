"""How keys and values of tokens are stored: as they are computed, or quantized in groups of tokens.

A codec turns whole groups of tokens into units. A unit is a slice of one or two planes, the tensors
that a storage keeps for each layer:

    plain       a unit is one token     planes: keys [slots, Hk, units, D] and values
    quantized   a unit is a group       planes: bytes of keys [slots, units, key_bytes], of values

The newest tokens of a quantized cache lie in its residual window: a storage of its own, on the same
tier, whose units are tokens as they were computed. It is a ring, which keeps the newest W tokens:
token p lies at unit p mod W. A group is encoded when its last token comes:

    tokens  0 … 31 | 32 … 63 | 64 …           W = residual window + group - 1
            stored    stored   window

Shapes: n groups or units, T tokens, B sequences, Hk key heads, D elements a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.layer_rows import put_rows
from flexgen_helm.offload.uploads import Uploaded
from flexgen_helm.quant.dequantization import dequantize_into
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.shared_sizes import QUANTIZED_TOKENS

KeysValues = tuple[Tensor, Tensor]
Planes = tuple[Tensor, ...]
# Allocates zeroed memory of a shape and dtype.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class Plane:
    """One tensor of a layer's cache.

    shape: of a unit.
    dtype: of its elements.
    unit_axis: axis of the units in memory; axis 0 are the slots.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    unit_axis: int = 1

    @property
    def unit_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def memory_shape(self, slots: int, units: int) -> tuple[int, ...]:
        """Return the shape in memory."""
        before = self.unit_axis - 1
        return (slots, *self.shape[:before], units, *self.shape[before:])

    def by_unit(self, data: Tensor) -> Tensor:
        """View a tensor in memory as [slots, units, *shape]."""
        return data.movedim(self.unit_axis, 1)


@dataclass(frozen=True, eq=False)
class SlotIndex:
    """One index in each of some slots, [n] both: of a unit in the storage, or of a token in the
    residual window.
    """

    slots: Uploaded
    index: Uploaded


class Codec(ABC):
    """One layer's keys and values of a cache block as units.

    group_tokens: tokens of a unit.
    planes: what a storage keeps.
    num_fetched_planes: leading planes that every query reads; of the others it reads what it
        selects.
    window_tokens: newest tokens that a residual window keeps as they were computed; 0: queries read
        all tokens from the storage.
    window_copies: of each of those tokens: 1, as it was computed; 2, also as quantizing leaves it.
    token_elements: elements of one token's keys in a layer.
    ring_units: units of a slot, of which a new one takes the oldest one's place; 0: a slot has
        units for all tokens.
    cache_format: how older tokens are quantized and selected; None where nothing is.
    """

    ring_units: int = 0
    group_tokens: int
    planes: tuple[Plane, ...]
    num_fetched_planes: int
    window_tokens: int
    window_copies: int
    token_elements: int
    cache_format: CacheFormat | None

    @property
    def unit_bytes(self) -> int:
        return sum(plane.unit_bytes for plane in self.planes)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of a unit that every query reads."""
        return sum(plane.unit_bytes for plane in self.planes[: self.num_fetched_planes])

    def num_units(self, tokens: int) -> int:
        """Return how many units the whole groups of a slot's first `tokens` tokens take."""
        units = tokens // self.group_tokens
        return min(units, self.ring_units) if self.ring_units else units

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> Planes:
        """Encode whole groups of tokens [n * group_tokens, Hk, D] as units [n, *shape] of each
        plane.
        """

    @abstractmethod
    def encode_prompts(
        self, k: Tensor, v: Tensor, prompts: Sequence[tuple[slice, bool]]
    ) -> Iterator[tuple[Planes, KeysValues]]:
        """Yield of each prompt the units of its whole groups, and its older tokens as the last one
        sees them quantized.

        k, v: [T, Hk, D], of all prompts.
        prompts: tokens of each, and whether it is stored; else its units are not used.
        """

    @abstractmethod
    def decode(self, half: int, data: Tensor) -> Tensor:
        """Decode units of B slots, as they lie in memory, to keys (half 0) or values (1) [B, Hk, T,
        D].
        """

    @abstractmethod
    def num_stored(self, position: int) -> int:
        """Return how many tokens the query at `position` reads from the storage; those behind are
        in the window.
        """

    def new_planes(self, slots: int, units: int, allocate: Allocate) -> Planes:
        """Allocate the planes of a layer."""
        return tuple(
            allocate(plane.memory_shape(slots, units), plane.dtype) for plane in self.planes
        )

    def put_units(self, stored: Planes, target: SlotIndex, planes: Planes) -> None:
        """Put one unit into each of n slots of the planes of a layer.

        planes: the new units [n, *shape].
        """
        device = stored[0].device
        slots, units = target.slots.on(device), target.index.on(device)
        for plane, data, new in zip(self.planes, stored, planes):
            put_rows(plane.by_unit(data), slots, units, new)

    def round_trip(self, k: Tensor, v: Tensor) -> KeysValues:
        """Return what encoding leaves of tokens [n * cache_format.group_tokens, Hk, D]."""
        return k, v


class PlainCodec(Codec):
    """Keys and values as they are computed; a unit is a token."""

    group_tokens, num_fetched_planes, window_tokens, window_copies, cache_format = 1, 2, 0, 0, None

    def __init__(self, heads: int, dim: int, dtype: torch.dtype) -> None:
        plane = Plane((heads, dim), dtype, unit_axis=2)
        self.planes, self.token_elements = (plane, plane), heads * dim

    def encode(self, k: Tensor, v: Tensor) -> Planes:
        return k, v

    def encode_prompts(
        self, k: Tensor, v: Tensor, prompts: Sequence[tuple[slice, bool]]
    ) -> Iterator[tuple[Planes, KeysValues]]:
        for tokens, _ in prompts:
            yield (k[tokens], v[tokens]), (k[:0], v[:0])

    def decode(self, half: int, data: Tensor) -> Tensor:
        return data

    def num_stored(self, position: int) -> int:
        return position + 1  # the query's own token is stored before it is read


class QuantizedCodec(Codec):
    """Keys and values quantized as a `CacheFormat` says; the newest tokens stay in a residual
    window.

    heads, dim, dtype: of keys and values.

    Tokens that are quantized one by one are stored in groups all the same: one is too short for a
    transfer.
    """

    def __init__(self, cache_format: CacheFormat, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.cache_format: CacheFormat = cache_format
        self._formats = cache_format.keys, cache_format.values
        self.heads, self.dim, self.dtype = heads, dim, dtype
        self.token_elements = heads * dim
        self.group_tokens = cache_format.stored_group_tokens
        self.window_tokens = cache_format.window_tokens
        self.window_copies = cache_format.window_copies
        sizes = cache_format.group_bytes(heads, dim, dtype.itemsize)
        self.planes = tuple(Plane((size,), torch.uint8) for size in sizes)
        # With sparse attention the scores of the keys name the values to read.
        self.num_fetched_planes = 1 if cache_format.is_sparse else 2

    def num_stored(self, position: int) -> int:
        return (
            max(0, position + 1 - self.cache_format.residual_window)
            // self.group_tokens
            * self.group_tokens
        )

    def encode(self, k: Tensor, v: Tensor) -> Planes:
        groups = k.shape[0] // self.group_tokens
        return tuple(
            self._quantize(x, fmt).view(groups, -1) for x, fmt in zip((k, v), self._formats)
        )

    def encode_prompts(
        self, k: Tensor, v: Tensor, prompts: Sequence[tuple[slice, bool]]
    ) -> Iterator[tuple[Planes, KeysValues]]:
        joined: list[tuple[slice, bool]] = []
        for prompt in prompts:
            if joined and prompt[0].stop - joined[0][0].start > QUANTIZED_TOKENS:
                yield from self._encode_together(k, v, joined)
                joined = []
            joined.append(prompt)
        if joined:
            yield from self._encode_together(k, v, joined)

    def _encode_together(
        self, k: Tensor, v: Tensor, prompts: Sequence[tuple[slice, bool]]
    ) -> Iterator[tuple[Planes, KeysValues]]:
        """Encode some prompts at once: quantizing takes a hundred launches, however many tokens."""
        size, fmt = self.group_tokens, self.cache_format
        starts, lengths = zip(
            *((tokens.start, tokens.stop - tokens.start) for tokens, _ in prompts)
        )
        num_older = [fmt.num_quantized(length - 1) for length in lengths]
        num_units = [
            length // size if is_stored else 0 for length, (_, is_stored) in zip(lengths, prompts)
        ]
        seen: KeysValues = (k[:0], v[:0])
        planes: Planes = tuple(
            k.new_empty((0, *plane.shape), dtype=torch.uint8) for plane in self.planes
        )
        num_seen = [0] * len(prompts)
        # Tokens that are quantized in the groups that a unit has are seen as their units decode;
        # others, as a round trip of their own leaves them.
        seen_from_units = fmt.group_tokens == size
        if seen_from_units:
            num_units = [max(count, older // size) for count, older in zip(num_units, num_older)]
        unit_tokens = [count * size for count in num_units]
        if any(num_units):
            planes = self.encode(*_first_tokens((k, v), starts, unit_tokens))
        if any(num_older) and seen_from_units:
            num_seen = unit_tokens
            keys, values = (
                self._dequantize(plane, part, *self._matrix_shape(part, sum(num_seen))).view(
                    -1, self.heads, self.dim
                )
                for plane, part in zip(planes, self._formats)
            )
            seen = keys, values
        elif any(num_older):
            num_seen, seen = num_older, self.round_trip(*_first_tokens((k, v), starts, num_older))
        units_by_prompt = zip(*(plane.split(num_units) for plane in planes))
        seen_by_prompt = zip(*(x.split(num_seen) for x in seen))
        for units, (keys, values), count in zip(units_by_prompt, seen_by_prompt, num_older):
            yield units, (keys[:count], values[:count])

    def decode(self, half: int, data: Tensor) -> Tensor:
        slots, tokens = data.shape[0], data.shape[1] * self.group_tokens
        fmt = self._formats[half]
        flat = self._dequantize(data, fmt, *self._matrix_shape(fmt, slots * tokens))
        return flat.view(slots, tokens, self.heads, self.dim).transpose(1, 2)

    def select_values(self, data: Tensor, tokens: Tensor) -> Tensor:
        """Select, of the values' plane [B, units, bytes], single tokens [B, Hk, k] -> [B, Hk, k,
        bytes].

        Formats of sparse attention quantize the values of every token and head by themselves.
        """
        slots, by_token = data.shape[0], data.unflatten(-1, (self.group_tokens, self.heads, -1))
        slot = torch.arange(slots, device=data.device)[:, None, None]
        head = torch.arange(self.heads, device=data.device)[None, :, None]
        return by_token[slot, tokens // self.group_tokens, tokens % self.group_tokens, head]

    def decode_selected(self, selected: Tensor) -> Tensor:
        """Decode bytes [B, Hk, k, bytes] of selected values to [B, Hk, k, D]."""
        count = selected.shape[:-1].numel()
        flat = self._dequantize(selected, self._formats[1], count, self.dim)
        return flat.view(*selected.shape[:-1], self.dim)

    def round_trip(self, k: Tensor, v: Tensor) -> KeysValues:
        keys, values = (
            x
            if fmt is None
            else self._dequantize(
                self._quantize(x, fmt), fmt, *self._matrix_shape(fmt, len(x))
            ).view(x.shape)
            for x, fmt in zip((k, v), self._formats)
        )
        return keys, values

    def _matrix_shape(self, fmt: GroupFormat | None, tokens: int) -> tuple[int, int]:
        """Rows and width of the matrix that is quantized: a row is a token's head, or a token with
        all its heads.
        """
        if fmt is None or fmt.axis == "in":
            return tokens * self.heads, self.dim
        return tokens, self.heads * self.dim

    def _quantize(self, x: Tensor, fmt: GroupFormat | None) -> Tensor:
        if fmt is None:
            return x.contiguous().view(torch.uint8)
        # A sequence with values that are not finite fails by its hidden states, which show them;
        # its neighbours go on.
        return quantize(x.reshape(self._matrix_shape(fmt, x.shape[0])), fmt, saturate=True)

    def _dequantize(self, data: Tensor, fmt: GroupFormat | None, rows: int, width: int) -> Tensor:
        if not rows:  # behind a window nothing is selected
            return torch.empty((0, width), dtype=self.dtype, device=data.device)
        if fmt is None:
            return data.reshape(rows, -1).view(self.dtype)
        stripes = data.reshape(fmt.num_stripes(rows), fmt.stripe_bytes(width))
        return dequantize_into(
            stripes, fmt, torch.empty((rows, width), dtype=self.dtype, device=data.device)
        )


def _first_tokens(
    keys_values: KeysValues, starts: Sequence[int], counts: Sequence[int]
) -> KeysValues:
    """Join the first `counts` tokens of prompts that begin at `starts`."""
    parts = [slice(start, start + count) for start, count in zip(starts, counts) if count] or [
        slice(0, 0)
    ]
    k, v = (
        x[parts[0]] if len(parts) == 1 else torch.cat([x[part] for part in parts])
        for x in keys_values
    )
    return k, v


class WindowCodec(PlainCodec):
    """Tokens of a residual window as they were computed.

    Where tokens are quantized one by one, those of a group that is not whole yet are seen quantized
    too: a unit has both versions.
    """

    def __init__(self, older: QuantizedCodec) -> None:
        """older: codec of the tokens before the window."""
        super().__init__(older.heads, older.dim, older.dtype)
        self._older, self.ring_units, self.num_fetched_planes = older, older.window_tokens, 1
        shape = 2 * older.window_copies, older.heads, older.dim
        # [slots, keys and values, W, Hk, D]
        self.planes = (Plane(shape, older.dtype, unit_axis=2),)

    def encode(self, k: Tensor, v: Tensor) -> Planes:
        versions = (
            (k, v) if self._older.window_copies == 1 else (k, v, *self._older.round_trip(k, v))
        )
        return (torch.stack(versions, 1),)

    def encode_ring(self, k: Tensor, v: Tensor) -> Planes:
        """Encode the last tokens of a prompt [S, Hk, D] in the order of the ring."""
        (newest,) = self.encode(k[-self.ring_units :], v[-self.ring_units :])
        return (newest.roll(len(k), 0),)

    def read(self, window: Tensor, seen_quantized: Tensor | None) -> KeysValues:
        """Return keys and values [B, Hk, W, D] of a window in memory.

        seen_quantized: [B, W], tokens whose round trip is seen; None where no token is quantized
            by itself.
        """
        newest = window[:, :2]
        if seen_quantized is not None:
            newest = torch.where(seen_quantized[:, None, :, None, None], window[:, 2:], newest)
        return newest[:, 0].transpose(1, 2), newest[:, 1].transpose(1, 2)

    def tokens(self, window: Tensor, slots: Tensor | int, index: Tensor) -> KeysValues:
        """Return keys and values [..., Hk, D] of tokens at `index` of some slots, as they were
        computed.
        """
        found = self.planes[0].by_unit(window)[slots, index]
        return found[..., 0, :, :], found[..., 1, :, :]


def make_codec(cache_format: CacheFormat | None, heads: int, dim: int, dtype: torch.dtype) -> Codec:
    """Return the codec for a format; None stores keys and values as they are computed."""
    return (
        PlainCodec(heads, dim, dtype)
        if cache_format is None
        else QuantizedCodec(cache_format, heads, dim, dtype)
    )


def total_bytes(planes: Sequence[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(plane.nbytes for plane in planes)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: masked positions are multiplied by 0 and must be finite.

    On the CPU they come from numpy, which leaves zeroing to the system: pages cost nothing until
    they are written, so a sequence that ends early never costs its whole slot. `torch.zeros` writes
    them all at once.
    """
    if device.type == "cpu":
        return (
            torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8))
            .view(dtype)
            .view(shape)
        )
    return torch.zeros(shape, device=device, dtype=dtype)
