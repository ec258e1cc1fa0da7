"""Seeded random weights: measuring throughput needs only the shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.logical_tensor import TILE_ELEMENTS
from flexgen_helm.models.config import ModelConfig

_STD = 0.02


class DummyCheckpoint(Checkpoint):
    """Each tensor follows from (seed, name) alone, in whatever order tensors are read.

    Matrices and tables are normal with a standard deviation of 0.02. Those that write into the
    residual stream (`attn.o`, `down`) are smaller by the square root of their number, which keeps
    the hidden states of deep models of order one, far inside float16. Norms multiply by 1, norm
    biases are 0, other biases a tenth of the matrices'.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        storage_dtype: torch.dtype,
        tokenizer_path: Path | None = None,
    ) -> None:
        self.config, self.storage_dtype, self.tokenizer_path = config, storage_dtype, tokenizer_path
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        # The config's text has every size, and torch's version decides the numbers drawn.
        text = (
            f"dummy 1 {self._seed} {self.storage_dtype} {torch.__version__} "
            f"{self.config.identity_text()}"
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def _title(self, name: str) -> str:
        return f"dummy weights: tensor {name}"

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        total = prod(self.shapes[name])
        mean, std = self._distribution(name)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        for start in range(0, total, TILE_ELEMENTS):
            tile = torch.empty(min(TILE_ELEMENTS, total - start), dtype=torch.float32)
            yield tile.normal_(mean, std, generator=generator) if std else tile.fill_(mean)

    def _distribution(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation."""
        owner, _, leaf = name.rpartition(".")
        if owner.endswith("norm"):
            return (self.config.neutral_norm_weight if leaf == "weight" else 0.0), 0.0
        if leaf == "bias":
            return 0.0, _STD / 10
        if owner.endswith(("attn.o", ".down")):
            return 0.0, _STD / sqrt(2 * self.config.num_layers)
        return 0.0, _STD
