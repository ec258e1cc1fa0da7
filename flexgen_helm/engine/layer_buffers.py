"""What decode layers that were recorded read and write at fixed addresses (`cuda_graphs`, `layer_programs`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.decoder import Rotary
from flexgen_helm.models.decoder_config import RopeConfig


class LayerBuffers:
    """Hidden states, attention's outputs and rotations of one decode batch at a time.

    hidden: [rows, H]; attended: [rows, Hq, D].
    """

    def __init__(self, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """rows: of the largest batch."""
        self.hidden = torch.zeros((rows, config.hidden_size), dtype=dtype, device=device)
        self.attended = torch.zeros((rows, config.num_heads, config.head_dim), dtype=dtype, device=device)
        self._rotary: dict[RopeConfig, Rotary] = {}
        self._given: Tensor | None = None  # hidden states in the buffer that a batch has

    def take(self, hidden: Tensor, rotary: Mapping[RopeConfig, Rotary]) -> bool:
        """Copy a batch's hidden states and rotations here; false if it has those that `give` gave it last."""
        if hidden is self._given:
            return False
        self.hidden[: len(hidden)].copy_(hidden)
        for rope, values in rotary.items():
            if rope not in self._rotary:
                cos, sin = (x.new_zeros((len(self.hidden), *x.shape[1:])) for x in values)
                self._rotary[rope] = cos, sin
            for buffer, own in zip(self._rotary[rope], values):
                buffer[: len(own)].copy_(own)
        return True

    def rotary(self, size: int) -> dict[RopeConfig, Rotary]:
        """View the rotations of the first rows."""
        return {rope: (cos[:size], sin[:size]) for rope, (cos, sin) in self._rotary.items()}

    def give(self, rows: int) -> Tensor:
        """Return the first hidden states, which are valid until another batch's are taken."""
        self._given = self.hidden[:rows]
        return self._given

    def owned(self, hidden: Tensor) -> Tensor:
        """Return hidden states that no later batch overwrites."""
        return hidden.clone() if hidden is self._given else hidden
