"""Weights at rest and the operators that the decoder sees.

At rest a tensor keeps its 16-bit type; a product upcasts it by row tile into the compute type. Where the tier has
room, a tensor rests in the compute type instead and the product reads it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from flexgen_helm.checkpoint.source import Checkpoint
from flexgen_helm.hardware.rates import linear
from flexgen_helm.models.decoder import StageWeights
from flexgen_helm.models.spec import EMBED, HEAD, ModelSpec, stage_tensor_shapes, stages
from flexgen_helm.store.ledger import Ledger

# Elements of a weight that are upcast at once: 4 MiB in float32, so that a tile stays in a core's cache.
TILE_ELEMENTS = 1 << 20


class WeightStore(Protocol):
    """Hands out the weights of a stage; later stores bring them from other tiers while earlier stages compute."""

    def stage(self, name: str) -> AbstractContextManager[StageWeights]:
        """Context in which the stage's weights may be used."""
        ...


def upcast_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a weight in any type, brought to x's type by row tile (never as a whole)."""
    if weight.dtype == x.dtype:
        return linear(x, weight, bias)
    out_size, in_size = weight.shape
    step = max(1, TILE_ELEMENTS // in_size)
    y = x.new_empty((x.shape[0], out_size))
    for first in range(0, out_size, step):
        rows = slice(first, first + step)
        y[:, rows] = linear(x, weight[rows].to(x.dtype), None if bias is None else bias[rows])
    return y


class ResidentStage:
    """One stage whose tensors all lie on the compute device (`StageWeights`)."""

    def __init__(self, stage: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._prefix = stage + "."
        self._tensors = tensors
        self._dtype = dtype

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.vector(f"{name}.bias")
        return upcast_product(x, self._tensors[f"{self._prefix}{name}.weight"], bias)

    def vector(self, name: str) -> Tensor | None:
        return self._tensors.get(self._prefix + name)

    def lookup(self, name: str, rows: Tensor) -> Tensor:
        return self._tensors[f"{self._prefix}{name}.weight"].index_select(0, rows).to(self._dtype)


class ResidentWeights:
    """All weights of a model on one tier.

    Loading holds one tensor beside what is kept. `compute_copies`: rest in the compute type (exact: 16-bit values
    are representable in it) instead of 16 bits, for tensors that are multiplied.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ledger: Ledger,
        device: torch.device,
        dtype: torch.dtype,
        compute_copies: bool,
    ) -> None:
        spec = checkpoint.spec
        self._ledger = ledger
        self._claims = []
        self._stages: dict[str, ResidentStage] = {}
        shared: dict[str, Tensor] = {}
        try:
            for stage in stages(spec):
                tensors: dict[str, Tensor] = {}
                for name in stage_tensor_shapes(spec, stage):
                    source = checkpoint.tensor(name)
                    # Vectors are few and used whole, so they always rest in the compute type.
                    wanted = dtype if compute_copies or source.ndim == 1 else source.dtype
                    self._claims.append(ledger.claim("weights", source.numel() * wanted.itemsize))
                    tensors[name] = source.to(device=device, dtype=wanted)
                if stage == EMBED:
                    shared["head.lm.weight"] = tensors["embed.tokens.weight"]
                if stage == HEAD and spec.tied_head:
                    tensors |= shared
                self._stages[stage] = ResidentStage(stage, tensors, dtype)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def stage(self, name: str) -> Iterator[StageWeights]:
        yield self._stages[name]

    def close(self) -> None:
        self._stages.clear()
        for claim in self._claims:
            self._ledger.release(claim)
        self._claims = []


def weight_bytes(spec: ModelSpec, bytes_per_element: int, vector_bytes: int) -> int:
    """Bytes that `ResidentWeights` claims: matrices and tables at one size, vectors at another."""
    return sum(
        prod(shape) * (vector_bytes if len(shape) == 1 else bytes_per_element)
        for stage in stages(spec)
        for shape in stage_tensor_shapes(spec, stage).values()
    )
