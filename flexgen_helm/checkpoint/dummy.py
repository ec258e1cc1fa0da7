"""Seeded random weights of any architecture, one tensor at a time: throughput work needs shapes, not knowledge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path

import torch

from flexgen_helm.checkpoint.checkpoint import TILE_ELEMENTS, Checkpoint
from flexgen_helm.models.config import ModelConfig

_STD = 0.02


class DummyCheckpoint(Checkpoint):
    """Each tensor follows from (seed, name) alone, whatever was drawn before it.

    Matrices and tables are normal with a standard deviation of 0.02; those that write into the residual stream
    (`attn.o`, `down`) are smaller by the square root of their number, so that hidden states of deep models stay
    of order one, far inside float16. Norms multiply by 1, norm biases are 0, other biases a tenth of the matrices'.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        rest_dtype: torch.dtype = torch.float16,
        tokenizer_path: Path | None = None,
    ) -> None:
        self.config, self.storage_dtype, self.tokenizer_path = config, rest_dtype, tokenizer_path
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        # The spec's record spells every size; torch's version is in, for it decides the numbers drawn.
        text = f"dummy 1 {self._seed} {self.storage_dtype} {torch.__version__} {self.config.identity_text()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _where(self, name: str) -> str:
        return f"dummy weights: tensor {name}"

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        total = prod(self.shapes[name])
        mean, std = self._distribution(name)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        for start in range(0, total, TILE_ELEMENTS):
            piece = torch.empty(min(TILE_ELEMENTS, total - start))
            yield piece.normal_(mean, std, generator=generator) if std else piece.fill_(mean)

    def _distribution(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation."""
        owner, _, leaf = name.rpartition(".")
        if owner.endswith("norm"):
            return (1.0 if leaf == "weight" and not self.config.norm_plus_one else 0.0), 0.0
        if leaf == "bias":
            return 0.0, _STD / 10
        if owner.endswith(("attn.o", ".down")):
            return 0.0, _STD / sqrt(2 * self.config.num_layers)
        return 0.0, _STD
