"""Stored tensors that together are one matrix, as formats of other tools name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.checkpoint.quantized.config import Quantization
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError

FP8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class QuantizedMatrix:
    """Stored tensors that are one matrix of the model.

    first: the tensor whose name or type tells a reader that a matrix begins here; it has the codes.
    stored: all tensors of the files by name, among which the others of the matrix are found.
    """

    first: StoredTensor
    stored: Mapping[str, StoredTensor]
    quantization: Quantization

    def stem(self, ending: str) -> str | None:
        """Return the first tensor's name without its ending, or None if it has another."""
        return self.first.name.removesuffix(ending) if self.first.name.endswith(ending) else None

    def part(self, *names: str) -> StoredTensor:
        """Return the first tensor that exists of these; raises `CheckpointError` if none does."""
        part = self.optional(*names)
        if part is None:
            raise CheckpointError(
                f"{self.first.title} is quantized, but its {names[0]} is missing; fetch it again"
            )
        return part

    def optional(self, *names: str) -> StoredTensor | None:
        """Return the first tensor that exists of these, if any."""
        return next((self.stored[name] for name in names if name in self.stored), None)

    def zero_point(self, name: str) -> StoredTensor | None:
        """Return the zero points that compressed-tensors stores, which must be there if codes are
        not symmetric.
        """
        find = self.part if self.quantization.symmetric is False else self.optional
        return find(f"{name}_zero_point")

    def dtype(self, scale: StoredTensor) -> str:
        """Return the 16-bit type of values with this scale: its own, if it has 16 bits."""
        return scale.dtype if scale.dtype in ("F16", "BF16") else self.quantization.dtype
