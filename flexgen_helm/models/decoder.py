"""The decoder: token embedding, layers and head as equations over a flat list of real tokens (no padding).

It receives plain tensors and operators and returns tensors; where weights lie, in which precision they rest, and in
which order stages run is not known here. Shapes: T tokens of any number of sequences side by side, H hidden size,
Hq query heads, Hk key heads, D elements a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.config import ModelConfig, MoEConfig, RopeConfig

# Attention of one layer: q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D]. The executor binds caches and segments.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, rotated elements of a head]

# Tokens whose feed-forward activations exist at once: bounds the workspace of long prompts, exact either way.
_MLP_TOKENS = 4096


class StageWeights(Protocol):
    """The weights of one stage, by canonical name without the stage's prefix; values in the compute type.

    repeatable: a matrix may be asked for more than once by one batch; else each once, in the order of the spec.
    """

    repeatable: bool

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
    "relu": torch.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Decoder:
    """The equations of one model."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.attention = AttentionConfig(
            scale=config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale,
            softcap=config.attn_softcap,
            slopes=alibi_slopes(config.num_heads).to(device) if config.alibi else None,
        )
        self.dtype = dtype
        self._activation = _ACTIVATIONS[config.activation]
        ropes = {config.layer_rope(layer) for layer in range(config.num_layers)} - {None}
        self._frequencies = {r: inverse_frequencies(r, config.head_dim).to(device) for r in ropes if r is not None}

    def rotary(self, positions: Tensor) -> dict[RopeConfig, Rotary]:
        """Rotations of each token by its absolute position [T], one for every kind that occurs among the layers."""
        found = {}
        for rope, frequencies in self._frequencies.items():
            angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
            angles = torch.cat((angles, angles), dim=-1)[:, None, :]
            cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
            found[rope] = cos.to(self.dtype), sin.to(self.dtype)
        return found

    def embed(self, weights: StageWeights, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids and positions [T] -> hidden [T, H]."""
        hidden = weights.lookup("tokens", token_ids)
        if self.config.embed_scale != 1.0:
            hidden = hidden * self.config.embed_scale
        if self.config.embed_size != self.config.hidden_size:
            hidden = weights.linear("project_in", hidden)
        if self.config.learned_positions:
            hidden = hidden + weights.lookup("positions", positions + self.config.position_offset)
        return self._norm(weights, "norm", hidden) if self.config.embed_norm else hidden

    def layer(
        self,
        weights: StageWeights,
        layer: int,
        hidden: Tensor,
        rotary: Mapping[RopeConfig, Rotary],
        attend: Attend,
    ) -> Tensor:
        """Decoder layer number `layer`; hidden [T, H] -> [T, H]."""

        def norm(name: str, x: Tensor) -> Tensor:
            return self._norm(weights, name, x)

        def attention(x: Tensor) -> Tensor:
            rope = self.config.layer_rope(layer)
            return self._attention(weights, x, None if rope is None else rotary[rope], attend)

        def mlp(x: Tensor) -> Tensor:
            experts = self.config.moe(layer)
            return self._mlp(weights, "mlp", x) if experts is None else self._experts(weights, experts, x)

        if self.config.residual == "pre_norm":
            hidden = attention(norm("attn_norm", hidden)).add_(hidden)
            return mlp(norm("mlp_norm", hidden)).add_(hidden)
        if self.config.residual == "post_norm":
            hidden = norm("attn_norm", attention(hidden).add_(hidden))
            return norm("mlp_norm", mlp(hidden).add_(hidden))
        if self.config.residual == "sandwich":
            hidden = norm("attn_post_norm", attention(norm("attn_norm", hidden))).add_(hidden)
            return norm("mlp_post_norm", mlp(norm("mlp_norm", hidden))).add_(hidden)
        assert self.config.residual == "parallel"
        return attention(norm("attn_norm", hidden)).add_(hidden).add_(mlp(norm("mlp_norm", hidden)))

    def head(self, weights: StageWeights, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] of the positions that are asked for -> logits [T, V] in float32."""
        if self.config.final_norm:
            hidden = self._norm(weights, "norm", hidden)
        if self.config.embed_size != self.config.hidden_size:
            hidden = weights.linear("project_out", hidden)
        logits = weights.linear("lm", hidden).float()
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attention(self, weights: StageWeights, x: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        config = self.config
        q = weights.linear("attn.q", x).view(-1, config.num_heads, config.head_dim)
        k = weights.linear("attn.k", x).view(-1, config.num_kv_heads, config.head_dim)
        v = weights.linear("attn.v", x).view(-1, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q = self._rms_norm(q, weights.vector("attn.q_norm.weight"))
            k = self._rms_norm(k, weights.vector("attn.k_norm.weight"))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return weights.linear("attn.o", attend(q, k, v).reshape(-1, config.q_size))

    def _mlp(self, weights: StageWeights, name: str, x: Tensor) -> Tensor:
        if x.shape[0] > _MLP_TOKENS and weights.repeatable:
            return torch.cat([self._mlp(weights, name, part) for part in x.split(_MLP_TOKENS)])
        if self.config.gated_mlp:
            inner = self._activation(weights.linear(f"{name}.gate", x)).mul_(weights.linear(f"{name}.up", x))
        else:
            inner = self._activation(weights.linear(f"{name}.up", x))
        return weights.linear(f"{name}.down", inner)

    def _experts(self, weights: StageWeights, experts: MoEConfig, x: Tensor) -> Tensor:
        """Each token through the experts that its router likes best, weighed by the router (Shazeer et al., 2017)."""
        likings = torch.softmax(weights.linear("mlp.router", x).float(), dim=-1)  # [T, E]
        shares, picked = torch.topk(likings, experts.per_token, dim=-1)  # [T, K]
        if experts.normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in picked.unique().tolist():
            tokens, place = torch.where(picked == expert)
            theirs = self._mlp(weights, f"mlp.experts.{expert}", x[tokens])
            out.index_add_(0, tokens, theirs * shares[tokens, place, None].to(x.dtype))
        return out

    def _norm(self, weights: StageWeights, name: str, x: Tensor) -> Tensor:
        weight = weights.vector(f"{name}.weight")
        if self.config.norm == "rmsnorm":
            return self._rms_norm(x, weight)
        return F.layer_norm(x, (self.config.hidden_size,), weight, weights.vector(f"{name}.bias"), self.config.norm_eps)

    def _rms_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and self.config.norm_plus_one:
            weight = weight + 1.0
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the halves of the first elements of every head against each other; x [T, heads, D]."""
    cos, sin = rotary
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rotary), x[..., size:]), dim=-1)
    first, second = (slice(0, size // 2), slice(size // 2, size))
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin[..., first], value=-1)
    out[..., second].addcmul_(x[..., first], sin[..., second])
    return out


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of elements, [rotated elements / 2] in float32 (Su et al., 2021)."""
    dim = rope.dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "factors":  # LongRoPE (Ding et al., 2024)
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind in ("llama3", "yarn"):
        keep = _kept_llama3(rope, frequencies) if rope.kind == "llama3" else _kept_yarn(rope, dim)
        return keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies


def _kept_llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """1 where the wavelength is short (kept), 0 where it is long (divided), a ramp between (Dubey et al., 2024)."""
    wavelengths = 2 * math.pi / frequencies
    ramp = rope.original_max_positions / wavelengths - rope.low_freq_factor
    return (ramp / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)


def _kept_yarn(rope: RopeConfig, dim: int) -> Tensor:
    """1 where many turns fit into the original context, 0 where few do, a ramp over the elements between
    (Peng et al., 2023, section 3.2)."""

    def element(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = element(rope.beta_fast), element(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0.0
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)


def alibi_slopes(heads: int) -> Tensor:
    """Loss of score per position of distance, [heads] in float32 (Press et al., 2021).

    A geometric series from 2^(-8/n) for n heads, n a power of two; further heads take every other term of the
    series for 2n.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)
