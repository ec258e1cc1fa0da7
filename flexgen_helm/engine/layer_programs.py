"""Programs of decode layers on a host: compiled loops that threads run one behind the other (`kernels.program`).

    hidden ─> norm, q k v, rotation ─> attention and its cache ─> output product, MLP ─> hidden
              a program                called as usual            a program

A pass of few rows would spend half of its time in the interpreter, whose data products push out of the nearest caches.
As with CUDA graphs (`engine.cuda_graphs`) attention stays out, and the rest depends on the number of rows alone. Rows
are padded to a size, and what padding rows compute is dropped. A size's first use computes as usual and records its
calls. The first of each sequence of calls is run with other numbers, and compared with what the layer computes. If they
differ, something in it was no compiled loop, and this size and larger ones are computed as usual: norms and activations
of some models, and many rows where products are those of a library.

A program reads and writes fixed addresses. So hidden states, attention's outputs and rotations have buffers that all
programs share, and one memory has what their calls return: one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexgen_helm.kernels import layer_rows
from flexgen_helm.kernels.program import Program, is_whole, recorded
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
        config = decoder.config
        self._decoder = decoder
        self._programs: dict[_Key, tuple[Program, Sequence[Tensor]]] = {}
        self._whole: set[tuple[int, ...]] = set()  # sequences of calls that were compared
        self._rotary: dict[RopeConfig, Rotary] = {}
        self._given: Tensor | None = None  # hidden states in the buffer that a batch has
        self._below = _MOST_ROWS + 1  # sizes that programs can serve
        self._memory = pages(_MEMORY_BYTES)
        self._hidden = torch.zeros(_MOST_ROWS, config.hidden_size)
        self._attended = torch.zeros(_MOST_ROWS, config.num_heads, config.head_dim)

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
        if hidden is not self._given:
            self._fill(hidden, rotary, size)
        states, attended = self._hidden[:size], self._attended[:size]
        rotations = {rope: (cos[:size], sin[:size]) for rope, (cos, sin) in self._rotary.items()}

        def before() -> Sequence[Tensor]:
            return decoder.before_attention(weights, layer, states, rotations)

        def after() -> Sequence[Tensor]:
            layer_rows.copy(states, decoder.after_attention(weights, layer, states, attended))
            return [states]

        q, k, v = self._run(("before", layer, size, threads), before, [states])
        attended[:rows].copy_(attend(q[:rows], k[:rows], v[:rows]))
        self._run(("after", layer, size, threads), after, [states, attended])
        self._given = states[:rows]
        return self._given, self._given.sum(-1)

    def owned(self, hidden: Tensor) -> Tensor:
        """Return hidden states that no later batch overwrites."""
        return hidden.clone() if hidden is self._given else hidden

    def close(self) -> None:
        """Forget all programs, which read weights where they were."""
        self._programs.clear()

    def _fill(self, hidden: Tensor, rotary: Mapping[RopeConfig, Rotary], size: int) -> None:
        self._hidden[: len(hidden)].copy_(hidden)
        self._hidden[len(hidden) : size].zero_()
        for rope, values in rotary.items():
            if rope not in self._rotary:
                cos, sin = (x.new_zeros((_MOST_ROWS, *x.shape[1:])) for x in values)
                self._rotary[rope] = cos, sin
            for buffer, own in zip(self._rotary[rope], values):
                buffer[: len(own)].copy_(own)

    def _run(self, key: _Key, part: _Part, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a part of a layer by its program; at the first use compute it, and record it."""
        if (known := self._programs.get(key)) is not None:
            program, results = known
            program.run()
            return results
        size = key[2]
        if size >= self._below:
            return part()
        kept = [x.clone() for x in inputs]
        try:
            program, results = recorded(part, self._memory)
        except MemoryError:
            self._give_up(size, inputs, kept)
            return part()
        if program.functions not in self._whole:
            for x, values in zip(inputs, kept):
                x.copy_(values)
            if not is_whole(program, part, inputs, results):
                self._give_up(size, inputs, kept)
                return part()
            self._whole.add(program.functions)
            program.run()
        self._programs[key] = program, results
        return results

    def _give_up(self, size: int, inputs: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Serve this size and larger ones no longer; the inputs are as they were."""
        self._below = size
        for x, values in zip(inputs, kept):
            x.copy_(values)


def _size(rows: int) -> int:
    """Return the rows of the program that serves so many: the next size, of which some dozen exist."""
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16
    return -(-rows // step) * step
