"""Programs of decode layers on a host: compiled loops that threads run one behind the other (`kernels.program`).

    hidden ─> norm, q k v, rotation ─> attention and its cache ─> output product, MLP ─> hidden
              a program                called as usual            a program

A pass of few rows would spend half of its time in the interpreter, whose data products push out of the nearest caches.
As with CUDA graphs (`engine.cuda_graphs`) attention stays out, and the rest depends on the number of rows alone. Rows
are padded to a size, and what padding rows compute is dropped. A size's first use computes as usual and records its
calls. The first of a layer's sequences of calls is run with other numbers, and compared with what the layer computes.
If they differ, something in it was no compiled loop, and this size and larger ones are computed as usual: norms and
activations of some models, and many rows where products are those of a library.

A program reads and writes fixed addresses. So hidden states, attention's outputs and rotations have buffers that all
programs share (`LayerBuffers`), and one memory has what their calls return: one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexgen_helm.engine.layer_buffers import LayerBuffers
from flexgen_helm.kernels import layer_rows
from flexgen_helm.kernels.program import Program, is_whole, recorded, restore
from flexgen_helm.models.decoder import Attend, Decoder, Rotary, StageWeights
from flexgen_helm.models.decoder_config import RopeConfig
from flexgen_helm.offload.staging import pages

# Rows of the largest batch: more keep the processor busy behind the interpreter. Bytes for what calls return; pages
# that nothing is written to take no memory.
_MOST_ROWS, _MEMORY_BYTES = 128, 96 << 20

_Part = Callable[[], Sequence[Tensor]]
_Key = tuple[str, int, int, int]


class LayerPrograms:
    """Runs the layers of decode batches by programs. All weights must stay where they are, unpacked.

    One thread uses it at a time; the states that `layer` returns are valid until another batch's layer.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Make the buffers; nothing is recorded yet."""
        self._decoder = decoder
        self._programs: dict[_Key, tuple[Program, Sequence[Tensor]]] = {}
        self._whole: set[tuple[str, int, tuple[int, ...]]] = set()  # sequences of a layer's calls that were compared
        self._below = _MOST_ROWS + 1  # sizes that programs can serve
        self._memory = pages(_MEMORY_BYTES)
        self._buffers = LayerBuffers(decoder.config, _MOST_ROWS, torch.float32, torch.device("cpu"))

    def takes(self, layer: int, rows: int) -> bool:
        """Return whether a layer can run here: tokens choose the experts of a mixture, which no program can."""
        return _size(rows) < self._below and self._decoder.config.moe(layer) is None

    def layer(
        self,
        weights: StageWeights,
        layer: int,
        hidden: Tensor,
        rotary: Mapping[RopeConfig, Rotary],
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """Run a layer as `Decoder.layer` does; return hidden [T, H], and the sum of each token's elements [T]."""
        decoder, rows = self._decoder, len(hidden)
        size, threads = _size(rows), torch.get_num_threads()
        buffers = self._buffers
        if buffers.take(hidden, rotary):
            buffers.hidden[rows:size].zero_()  # else what padding rows had would grow from pass to pass
        states, attended, rotations = buffers.hidden[:size], buffers.attended[:size], buffers.rotary(size)

        def before() -> Sequence[Tensor]:
            return decoder.before_attention(weights, layer, states, rotations)

        def after() -> Sequence[Tensor]:
            layer_rows.copy(states, decoder.after_attention(weights, layer, states, attended))
            return [states]

        tables = [table for pair in rotations.values() for table in pair]
        q, k, v = self._run(("before", layer, size, threads), before, [states, *tables])
        attended[:rows].copy_(attend(q[:rows], k[:rows], v[:rows]))
        self._run(("after", layer, size, threads), after, [states, attended])
        result = buffers.give(rows)
        return result, result.sum(-1)

    def owned(self, hidden: Tensor) -> Tensor:
        """Return hidden states that no later batch overwrites."""
        return self._buffers.owned(hidden)

    def close(self) -> None:
        """Forget all programs, which read weights where they were."""
        self._programs.clear()

    def _run(self, key: _Key, part: _Part, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a part of a layer by its program; at the first use compute it, and record it."""
        if (known := self._programs.get(key)) is not None:
            program, results = known
            program.run()
            return results
        name, layer, size, _ = key
        if size >= self._below:
            return part()
        kept = [x.clone() for x in inputs]
        try:
            program, results = recorded(part, self._memory)
        except MemoryError:
            self._below = size
            return part()
        calls = name, layer, program.functions
        if calls not in self._whole:
            restore(inputs, kept)
            if not is_whole(program, part, inputs, results):
                self._below = size
                return part()
            self._whole.add(calls)
            program.run()
        self._programs[key] = program, results
        return results


def _size(rows: int) -> int:
    """Return the rows of the program that serves so many: the next size, of which some dozen exist."""
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16
    return -(-rows // step) * step
