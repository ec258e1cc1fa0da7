"""Where units are in the file of a cache block: layer after layer, in one of two layouts.

    one token a unit        | slot 0: its prompt | slot 1 … | step 0: one token of all slots | step 1 … |
    a group of tokens       | slot 0: unit, unit, … (a page each) | slot 1 … |

Tokens of a step are written together, so that a step is one write. Shapes: n units; see `codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from math import prod

import torch

from flexgen_helm.kv_cache.codec import Codec, Planes, total_bytes, zeros
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.staging import aligned
from flexgen_helm.scheduling.sequence import CacheBlock

_HOST = torch.device("cpu")
# A slot of a file, and how many of its first units are read.
SlotCount = tuple[int, int]


class FileLayout(ABC):
    """Where units are in the file of a cache block. num_bytes: of the file."""

    num_bytes: int

    @abstractmethod
    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        """Write the first units [n, *shape] of a slot; return the bytes written."""

    @abstractmethod
    def append(
        self, file: DirectFile, layer: int, slots: SequenceOf[int], units: SequenceOf[int], planes: Planes
    ) -> int:
        """Write one unit for each of `slots`, planes [len(slots), *shape]; return the bytes written."""

    @abstractmethod
    def read(self, file: DirectFile, layer: int, counts: SequenceOf[SlotCount], planes: Planes) -> int:
        """Fill planes with the first units of slots; return the bytes read."""


class StepLayout(FileLayout):
    """For units of one token: every pass appends one token to all slots of a block, which are written as one piece."""

    def __init__(self, block: CacheBlock, codec: Codec, num_layers: int) -> None:
        self._planes, self._num_slots, unit = codec.planes, block.num_slots, codec.unit_bytes
        self._prompts = [sequence.prompt_len for sequence in block.sequences]
        steps = max(sequence.cache_tokens - sequence.prompt_len for sequence in block.sequences)
        self._step_bytes = aligned(block.num_slots * unit)
        self._offsets: list[int] = []  # of each slot's prompt within a layer
        end = 0
        for length in self._prompts:
            self._offsets.append(end)
            end += aligned(length * unit)
        self._steps_offset, self._layer_bytes = end, end + steps * self._step_bytes
        self.num_bytes = max(aligned(1), num_layers * self._layer_bytes)

    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        assert planes[0].shape[0] == self._prompts[slot], "a prompt is written whole"
        pieces = [new.movedim(0, plane.unit_axis - 1).reshape(-1) for plane, new in zip(self._planes, planes)]
        if not self._prompts[slot]:
            return 0
        joined = torch.cat(pieces)
        file.write_tensor(layer * self._layer_bytes + self._offsets[slot], joined)
        return total_bytes((joined,))

    def append(
        self, file: DirectFile, layer: int, slots: SequenceOf[int], units: SequenceOf[int], planes: Planes
    ) -> int:
        steps = {unit - self._prompts[slot] for slot, unit in zip(slots, units)}
        assert len(steps) == 1, "the sequences of a block decode together"
        piece = torch.zeros((len(planes), self._num_slots, *planes[0].shape[1:]), dtype=planes[0].dtype)
        for half, new in zip(piece, planes):
            half[list(slots)] = new
        offset = self._steps_offset + steps.pop() * self._step_bytes
        file.write_tensor(layer * self._layer_bytes + offset, piece)
        return total_bytes((piece,))

    def read(self, file: DirectFile, layer: int, counts: SequenceOf[SlotCount], planes: Planes) -> int:
        base, num_bytes, specs = layer * self._layer_bytes, 0, self._planes
        for row, (slot, count) in enumerate(counts):
            if prompt := min(count, self._prompts[slot]):
                shape = specs[0].memory_shape(len(specs), self._prompts[slot])
                stored = file.read_tensor(base + self._offsets[slot], shape, specs[0].dtype)
                num_bytes += total_bytes((stored,))
                for plane, target, data in zip(specs, planes, stored):
                    plane.by_unit(target)[row, :prompt] = plane.by_unit(data[None])[0, :prompt]
        steps = max(0, max(count - self._prompts[slot] for slot, count in counts))
        if steps:
            # Each step fills whole pages; what is behind its tokens is read and left out.
            dtype = specs[0].dtype
            width, used = self._step_bytes // dtype.itemsize, sum(prod(plane.shape) for plane in specs)
            data = file.read_tensor(base + self._steps_offset, (steps, width), dtype)
            num_bytes += total_bytes((data,))
            tokens = data[:, : used * self._num_slots].reshape(steps, len(specs), self._num_slots, *specs[0].shape)
            for row, (slot, _) in enumerate(counts):
                first = self._prompts[slot]
                for index, (plane, target) in enumerate(zip(specs, planes)):
                    plane.by_unit(target)[row, first : first + steps] = tokens[:, index, slot]
        return num_bytes


class PagedLayout(FileLayout):
    """For groups of tokens: every unit begins a page of its slot, because slots complete groups at different times."""

    def __init__(self, block: CacheBlock, codec: Codec, num_layers: int) -> None:
        self._planes, self._unit_bytes = codec.planes, codec.unit_bytes
        self._page_bytes = aligned(codec.unit_bytes)
        self._slot_bytes = block.capacity // codec.group_tokens * self._page_bytes
        self._layer_bytes = block.num_slots * self._slot_bytes
        self.num_bytes = num_layers * self._layer_bytes

    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        return self._write(file, self._offset(layer, slot, 0), planes)

    def append(
        self, file: DirectFile, layer: int, slots: SequenceOf[int], units: SequenceOf[int], planes: Planes
    ) -> int:
        return sum(
            self._write(file, self._offset(layer, slot, unit), tuple(plane[i : i + 1] for plane in planes))
            for i, (slot, unit) in enumerate(zip(slots, units))
        )

    def read(self, file: DirectFile, layer: int, counts: SequenceOf[SlotCount], planes: Planes) -> int:
        sizes = [plane.unit_bytes for plane in self._planes]
        for row, (slot, count) in enumerate(counts):
            if count:
                data = file.read_tensor(self._offset(layer, slot, 0), (count, self._page_bytes), torch.uint8)
                for target, part in zip(planes, data[:, : self._unit_bytes].split(sizes, 1)):
                    target[row, :count] = part
        return sum(count for _, count in counts) * self._unit_bytes

    def _write(self, file: DirectFile, offset: int, planes: Planes) -> int:
        joined = torch.cat(planes, 1)
        pages = zeros((joined.shape[0], self._page_bytes), _HOST, torch.uint8)
        pages[:, : self._unit_bytes] = joined
        file.write_tensor(offset, pages)
        return total_bytes((joined,))

    def _offset(self, layer: int, slot: int, unit: int) -> int:
        return layer * self._layer_bytes + slot * self._slot_bytes + unit * self._page_bytes


def file_layout(block: CacheBlock, codec: Codec, num_layers: int) -> FileLayout:
    """Return the layout that suits how a codec appends."""
    return (PagedLayout if codec.window_tokens else StepLayout)(block, codec, num_layers)
