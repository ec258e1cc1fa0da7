"""Programs of decode layers on a host: compiled loops that threads run one behind the other (`kernels.program`).

    hidden ─> norm, q k v, rotation ─> attention and its cache ─> output product, MLP, sum ─> hidden
              a program                recorded anew each pass    a program

A pass of few rows would spend half of its time in the interpreter, whose data products push out of the nearest caches.
What is before and behind attention depends on the number of rows alone, as with CUDA graphs (`engine.cuda_graphs`).
Rows are padded to a size, and what padding rows compute is dropped. A size's first use computes as usual and records
its calls. The first of a layer's sequences of calls is run with other numbers, and compared with what the layer
computes. If they differ, something in it was no compiled loop, and this size and larger ones are computed as usual:
norms and activations of some models, and many rows where products are those of a library.

What attention reads changes with every pass: caches grow and move, and sequences end. So its calls are recorded before
the pass computes any layer, and nothing of them is kept: for one layer of each kind, and for the others with their own
addresses. Then all layers are one program. A layer's first sequence of calls is compared with attention as usual. Where
attention is no compiled loop, it is called between two programs.

A program reads and writes fixed addresses. So hidden states, attention's outputs and rotations have buffers that all
programs share (`LayerBuffers`), and one memory has what their calls return: one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexgen_helm.engine.attention_metadata import LayerAttention
from flexgen_helm.engine.layer_buffers import LayerBuffers
from flexgen_helm.kernels import layer_rows
from flexgen_helm.kernels.program import Program, has_same_bits, is_whole, recorded, restore
from flexgen_helm.models.decoder import Attend, Decoder, Rotary, StageWeights
from flexgen_helm.models.decoder_config import RopeConfig
from flexgen_helm.offload.staging import pages

# Rows of the largest batch: more keep the processor busy behind the interpreter. Bytes for what calls return; pages
# that nothing is written to take no memory. Attention's are apart: it reads what is in the others.
_MOST_ROWS, _MEMORY_BYTES, _ATTENTION_BYTES = 128, 96 << 20, 16 << 20

_Part = Callable[[], Sequence[Tensor]]
_Key = tuple[str, int, int, int]
# Programs of attention and the places of their caches, by kind of layer and by where queries, keys and values are.
_Known = dict[tuple[object, ...], tuple[Program, list[int]]]


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
        self._memory, self._attention_memory = pages(_MEMORY_BYTES), pages(_ATTENTION_BYTES)
        self._buffers = LayerBuffers(decoder.config, _MOST_ROWS, torch.float32, torch.device("cpu"))
        self._sums = torch.zeros((decoder.config.num_layers, _MOST_ROWS))
        self._records_attention = True
        self._whole_attention: set[tuple[int, tuple[int, ...]]] = set()  # layers and calls that were compared

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
        decoder, buffers, rows = self._decoder, self._buffers, len(hidden)
        size, threads = self._take(hidden, rotary), torch.get_num_threads()
        states, attended, rotations = buffers.hidden[:size], buffers.attended[:size], buffers.rotary(size)
        sums = self._sums[layer, :size]

        def before() -> Sequence[Tensor]:
            return decoder.before_attention(weights, layer, states, rotations)

        def after() -> Sequence[Tensor]:
            layer_rows.copy(states, decoder.after_attention(weights, layer, states, attended))
            layer_rows.sum_rows(states, sums)
            return [states, sums]

        tables = [table for pair in rotations.values() for table in pair]
        q, k, v = self._run(("before", layer, size, threads), before, [states, *tables])
        attended[:rows].copy_(attend(q[:rows], k[:rows], v[:rows]))
        self._run(("after", layer, size, threads), after, [states, attended])
        return buffers.give(rows), sums[:rows].clone()

    def joins(self, layer: int, rows: int) -> bool:
        """Return whether `layers` takes a layer: its programs are known."""
        size, threads = _size(rows), torch.get_num_threads()
        return all((part, layer, size, threads) in self._programs for part in ("before", "after"))

    def layers(
        self, attends: Sequence[LayerAttention], hidden: Tensor, rotary: Mapping[RopeConfig, Rotary]
    ) -> tuple[Tensor, Tensor]:
        """Run neighbouring layers, by one program if their attention allows.

        attends: of each; all its caches are in memory.

        Returns hidden [T, H], and the sums of each token's elements [layers, T].
        """
        rows, waiting, known = len(hidden), list[Program](), _Known()
        size, threads = self._take(hidden, rotary), torch.get_num_threads()
        for attend in attends:
            before, operands = self._programs["before", attend.layer, size, threads]
            after, _ = self._programs["after", attend.layer, size, threads]
            waiting.append(before)
            own = self._attention(attend, operands, rows, known)
            if own is None or (attend.layer, own.functions) not in self._whole_attention:
                Program.joined(waiting).run()
                waiting.clear()
                self._attend(attend, operands, rows, own)
            else:
                waiting.append(own)
            waiting.append(after)
        Program.joined(waiting).run()
        first = attends[0].layer
        return self._buffers.give(rows), self._sums[first : first + len(attends), :rows].clone()

    def _attention(
        self, attend: LayerAttention, operands: Sequence[Tensor], rows: int, known: _Known
    ) -> Program | None:
        """Return a program that writes a layer's attention into its buffer; None if there is none.

        operands: queries, keys and values, of padding rows too.
        known: programs of the layers before, and what they read.
        """
        if not self._records_attention or not attend.is_recordable:
            return None
        key, places = (*attend.kind, *((x.data_ptr(), x.shape) for x in operands)), attend.places
        if key not in known:
            try:
                program, _ = recorded(
                    lambda: self._attended(attend, operands, rows), self._attention_memory, computes=False
                )
            except MemoryError:
                self._records_attention = False
                return None
            known[key] = program, places
        program, recorded_places = known[key]
        return program if places == recorded_places else program.moved(recorded_places, places)

    def _attend(self, attend: LayerAttention, operands: Sequence[Tensor], rows: int, program: Program | None) -> None:
        """Compute a layer's attention as usual, and compare a program's with it, if there is one."""
        attended = self._buffers.attended[:rows]
        if program is None:
            self._attended(attend, operands, rows)
            return
        attended.zero_()
        program.run()
        by_program = attended.clone()
        self._attended(attend, operands, rows)
        self._records_attention = has_same_bits(by_program, attended)
        self._whole_attention.add((attend.layer, program.functions))

    def _attended(self, attend: LayerAttention, operands: Sequence[Tensor], rows: int) -> None:
        q, k, v = (x[:rows] for x in operands)
        layer_rows.copy(self._buffers.attended[:rows], attend(q, k, v))

    def _take(self, hidden: Tensor, rotary: Mapping[RopeConfig, Rotary]) -> int:
        """Bring a batch's hidden states and rotations into the buffers; return the rows of its programs."""
        rows = len(hidden)
        size = _size(rows)
        if self._buffers.take(hidden, rotary):
            self._buffers.hidden[rows:size].zero_()  # else what padding rows had would grow from pass to pass
        return size

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
