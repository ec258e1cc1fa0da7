"""The decoder: token embedding, layers and head as equations over a flat list of real tokens (no padding).

It receives plain tensors and operators and returns tensors; where weights lie, in which precision they rest, and in
which order stages run is not known here. Shapes: T tokens of any number of sequences side by side, H hidden size,
Hq query heads, Hk key heads, D elements a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.models.spec import ModelSpec, RopeSpec

# Attention of one layer: q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D]. The executor binds caches and segments.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, D]

# Tokens whose feed-forward activations exist at once: bounds the workspace of long prompts, exact either way.
_MLP_TOKENS = 4096


class StageWeights(Protocol):
    """The weights of one stage, by canonical name without the stage's prefix; values in the compute type."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [T, in] -> x W' + bias [T, out], for the matrix `name`.weight."""
        ...

    def vector(self, name: str) -> Tensor | None:
        """A norm's weight or bias, or None where the model has none."""
        ...

    def lookup(self, name: str, rows: Tensor) -> Tensor:
        """Rows [T] of a table -> [T, width]."""
        ...


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Decoder:
    """The equations of one model."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.scale = spec.head_dim**-0.5
        self._dtype = dtype
        self._activation = _ACTIVATIONS[spec.activation]
        self._inverse_frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(device) if spec.rope else None

    def rotary(self, positions: Tensor) -> Rotary | None:
        """Rotation of each token by its absolute position [T]; None for learned positions."""
        if self._inverse_frequencies is None:
            return None
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def embed(self, weights: StageWeights, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids and positions [T] -> hidden [T, H]."""
        hidden = weights.lookup("tokens", token_ids)
        if self.spec.embed_size != self.spec.hidden_size:
            hidden = weights.linear("project_in", hidden)
        if self.spec.rope is None:
            hidden = hidden + weights.lookup("positions", positions + self.spec.position_offset)
        return hidden

    def layer(self, weights: StageWeights, hidden: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        """One decoder layer; hidden [T, H] -> [T, H]."""
        after = self.spec.norm_after
        x = hidden if after else self._norm(weights, "attn_norm", hidden)
        hidden = hidden + self._attention(weights, x, rotary, attend)
        if after:
            hidden = self._norm(weights, "attn_norm", hidden)
        x = hidden if after else self._norm(weights, "mlp_norm", hidden)
        hidden = hidden + self._mlp(weights, x)
        return self._norm(weights, "mlp_norm", hidden) if after else hidden

    def head(self, weights: StageWeights, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] of the positions that are asked for -> logits [T, V] in float32."""
        if self.spec.final_norm:
            hidden = self._norm(weights, "norm", hidden)
        if self.spec.embed_size != self.spec.hidden_size:
            hidden = weights.linear("project_out", hidden)
        return weights.linear("lm", hidden).float()

    def _attention(self, weights: StageWeights, x: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        spec = self.spec
        q = weights.linear("attn.q", x).view(-1, spec.num_heads, spec.head_dim)
        k = weights.linear("attn.k", x).view(-1, spec.num_kv_heads, spec.head_dim)
        v = weights.linear("attn.v", x).view(-1, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q = F.rms_norm(q, (spec.head_dim,), weights.vector("attn.q_norm.weight"), spec.norm_eps)
            k = F.rms_norm(k, (spec.head_dim,), weights.vector("attn.k_norm.weight"), spec.norm_eps)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return weights.linear("attn.o", attend(q, k, v).reshape(-1, spec.q_size))

    def _mlp(self, weights: StageWeights, x: Tensor) -> Tensor:
        if x.shape[0] > _MLP_TOKENS:
            return torch.cat([self._mlp(weights, part) for part in x.split(_MLP_TOKENS)])
        if self.spec.gated_mlp:
            inner = self._activation(weights.linear("mlp.gate", x)).mul_(weights.linear("mlp.up", x))
        else:
            inner = self._activation(weights.linear("mlp.up", x))
        return weights.linear("mlp.down", inner)

    def _norm(self, weights: StageWeights, name: str, x: Tensor) -> Tensor:
        weight = weights.vector(f"{name}.weight")
        size = (self.spec.hidden_size,)
        if self.spec.norm == "rmsnorm":
            return F.rms_norm(x, size, weight, self.spec.norm_eps)
        return F.layer_norm(x, size, weight, weights.vector(f"{name}.bias"), self.spec.norm_eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the halves of every head against each other; x [T, heads, D]."""
    cos, sin = rotary
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Angle per position of each pair of elements, [D / 2] in float32 (Su et al., 2021; llama3: Dubey et al., 2024)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        # 1 where the wavelength is short (kept), 0 where it is long (divided by the factor), a ramp between.
        keep = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        keep = keep.clamp(0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies
