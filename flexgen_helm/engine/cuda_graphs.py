"""CUDA graphs of decode layers: many kernels are launched by one call.

    hidden ─> norm, q k v, rotation ─> attention and its cache ─> output product, MLP, sum ─> hidden
              a graph                  launched one by one        a graph

Attention stays out, because its shapes change with every pass. The rest depends on the number of rows alone. Rows are
padded to a size of `GRAPH_ROWS`, and what padding rows compute is dropped. A size's first use computes as usual and
then records the same calls; later uses replay them.

A graph reads and writes fixed addresses. So hidden states, queries, keys, values, attention's outputs and rotations
have buffers that all graphs share, and one memory pool has the temporaries of all: a stream replays one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.models.decoder import Attend, Decoder, Rotary, StageWeights
from flexgen_helm.models.decoder_config import RopeConfig
from flexgen_helm.offload.staging import Ledger
from flexgen_helm.planner.placement import GRAPH_ROWS
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.progress import Message, report

_Part = Callable[[], object]


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all captures use: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


class LayerGraphs:
    """Runs the layers of decode batches by graphs. All weights must stay where they are on the device.

    One thread uses it at a time; the states that `layer` returns are valid until another batch's layer.
    """

    def __init__(self, decoder: Decoder, device: torch.device, ledger: Ledger, max_rows: int) -> None:
        """Allocate the buffers; nothing is captured yet.

        ledger: of the device; the memory of all graphs is claimed now, so that caches leave room for them.
        max_rows: rows of the largest batch, one of `GRAPH_ROWS`.

        Raises `MemoryLimitError` and `torch.OutOfMemoryError`, and then holds nothing.
        """
        config, dtype = decoder.config, decoder.dtype
        self._decoder, self._device, self._ledger, self._max_rows = decoder, device, ledger, max_rows
        self._graphs: dict[tuple[str, int, int], torch.cuda.CUDAGraph] = {}
        self._rotary: dict[RopeConfig, Rotary] = {}
        self._given: Tensor | None = None  # hidden states in the buffer that a batch has
        self._failed = False
        bound = Workspace(config, dtype.itemsize, "gpu").graphs(max_rows)
        self._pool, self._pool_bytes = torch.cuda.graph_pool_handle(), bound.pool_bytes
        self._claims = [ledger.claim("graphs", bound.num_bytes)]
        try:
            heads, dim = config.num_heads + 2 * config.num_kv_heads, config.head_dim
            self._hidden = torch.zeros((max_rows, config.hidden_size), dtype=dtype, device=device)
            self._qkv = torch.zeros((max_rows, heads, dim), dtype=dtype, device=device)
            self._attended = torch.zeros((max_rows, config.num_heads, dim), dtype=dtype, device=device)
            self._sums = torch.zeros((config.num_layers, max_rows), dtype=torch.float32, device=device)
        except BaseException:
            self.close()
            raise

    def takes(self, layer: int, rows: int) -> bool:
        """Return whether a layer can run here: the host chooses the experts of a mixture, which no graph can."""
        return rows <= self._max_rows and not self._failed and self._decoder.config.moe(layer) is None

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
        size = next(count for count in GRAPH_ROWS if count >= rows)
        if hidden is not self._given:
            self._fill(hidden, rotary)
        states, qkv, attended, sums = self._hidden[:size], self._qkv[:size], self._attended[:size], self._sums[layer]
        rotations = {rope: (cos[:size], sin[:size]) for rope, (cos, sin) in self._rotary.items()}

        def before() -> None:
            torch.cat(decoder.before_attention(weights, layer, states, rotations), 1, out=qkv)

        def after() -> None:
            states.copy_(decoder.after_attention(weights, layer, states, attended))
            torch.sum(states, -1, dtype=torch.float32, out=sums[:size])

        self._run(("before", layer, size), before)
        heads = decoder.config.num_heads, decoder.config.num_kv_heads, decoder.config.num_kv_heads
        attended[:rows].copy_(attend(*qkv[:rows].split(heads, 1)))
        self._run(("after", layer, size), after)
        self._given = states[:rows]
        return self._given, sums[:rows]

    def owned(self, hidden: Tensor) -> Tensor:
        """Return hidden states that no later batch overwrites."""
        return hidden.clone() if hidden is self._given else hidden

    def close(self) -> None:
        """Release all memory; harmless when called again."""
        self._graphs.clear()
        for claim in self._claims:
            self._ledger.release(claim)
        self._claims.clear()

    def _fill(self, hidden: Tensor, rotary: Mapping[RopeConfig, Rotary]) -> None:
        """Copy a batch's hidden states and rotations into the buffers."""
        self._hidden[: len(hidden)].copy_(hidden)
        for rope, values in rotary.items():
            if rope not in self._rotary:
                cos, sin = (x.new_zeros((self._max_rows, *x.shape[1:])) for x in values)
                self._rotary[rope] = cos, sin
            for buffer, rows in zip(self._rotary[rope], values):
                buffer[: len(rows)].copy_(rows)

    def _run(self, key: tuple[str, int, int], part: _Part) -> None:
        """Replay a part of a layer; at its first use compute it, which also compiles its kernels, and capture it."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        part()
        if self._failed:
            return
        try:
            self._graphs[key] = self._captured(part)
        except Exception as error:  # a driver or a kernel that cannot
            self._failed = True
            self._graphs.clear()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            report(Message(f"CUDA graphs do not work here, so decoding launches its kernels one by one ({reason})"))

    def _captured(self, part: _Part) -> torch.cuda.CUDAGraph:
        """Record what `part` launches; nothing is computed. Raises what capturing does, and `MemoryLimitError`."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._device)
        # Not `torch.cuda.graph`, which gives all cached memory back to the driver for every capture. Other threads may
        # copy and allocate meanwhile.
        with torch.cuda.stream(_capture_stream(self._device)):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                part()
            except BaseException:
                with suppress(RuntimeError):  # it only says that something failed before
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool_bytes -= torch.cuda.memory_reserved(self._device) - before
        if self._pool_bytes < 0:  # more than the bound: plain PyTorch in the place of a kernel of Triton
            self._claims.append(self._ledger.claim("graphs", -self._pool_bytes))
            self._pool_bytes = 0
        return graph
