"""The decoder: embedding, layers and head as equations over a flat list of tokens, without padding.

It receives tensors and operators and returns tensors. Where weights are stored, in which precision,
and in which order stages run is not known here. Shapes: T tokens of any number of sequences in a
row, H hidden size, Hq query heads, Hk key heads, D elements of a head, V vocabulary, E experts, K
experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.kernels import layer_rows
from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.decoder_config import RESIDUALS, DecoderConfig, RopeConfig
from flexgen_helm.models.routing import RoutedTokens, RowExperts, run_together, wait_for_experts


@dataclass(frozen=True, eq=False)
class StateGroup:
    """Tokens of a batch whose sequences have a state in a layer that keeps one.

    tokens: of one sequence; or, with `one_each`, one token of each of B sequences, as a slice or as
        indices [B].
    states: of these sequences before the tokens, [B, elements] in float32; None if they begin here.
    keep: stores those behind the tokens.
    is_prefix: later groups go on from what `keep` has stored.
    """

    tokens: Any
    one_each: bool
    states: Tensor | None
    keep: Callable[[Tensor], object]
    is_prefix: bool = False


class Attend(Protocol):
    """Attention of one layer. The executor binds caches and segments."""

    def state_groups(self) -> Iterable[StateGroup]:
        """Divide the batch's tokens for a layer that keeps states."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: AttentionConfig | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D].

        config: None for the decoder's own.
        sinks: [Hq], logits that take a share of each head's softmax and have no value.
        """
        ...


@dataclass(eq=False)
class LayerBatch:
    """What a layer is given of a batch.

    hidden: [T, H]; None once the layer has taken them.
    rotary: what `rotary` of the decoder returned for its positions.
    """

    hidden: Tensor | None
    rotary: Any
    attend: Attend

    def take_hidden(self) -> Tensor:
        """Return the hidden states, which nobody else keeps: the batch may wait in its mixture."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return hidden


Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, rotated elements of a head]

_QUERIES_KEYS_VALUES = "attn.q", "attn.k", "attn.v"
# Tokens whose inner MLP activations exist at once: bounds the workspace of long prompts without
# changing a result.
_MLP_TOKENS = 4096


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows [T] of a table to look up: on the compute device, and on the host for a table that is
    not there.
    """

    on_device: Tensor
    on_host: Tensor

    def shifted(self, offset: int) -> TableRows:
        return TableRows(self.on_device + offset, self.on_host + offset) if offset else self

    def below(self, rows: int) -> TableRows:
        """Row 0 instead of those that a table of `rows` rows does not have."""
        return TableRows(
            *(numbers.where(numbers < rows, 0) for numbers in (self.on_device, self.on_host))
        )


class Products(Protocol):
    """Matrices of one stage, by canonical name without the stage's prefix.

    repeatable: a matrix may be used more than once. Otherwise each is used at most once, in the
        order of `ModelConfig.stage_tensors`; experts in the order of `use_experts`.
    """

    repeatable: bool

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [T, in] times `name`.weight transposed, plus `name`.bias -> [T, out]."""
        ...

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        """Multiply x with each of some matrices, in this order, at once where that is faster."""
        return [self.linear(name, x) for name in names]


class StageWeights(Products, Protocol):
    """The weights of one stage; values in the compute dtype.

    holds_experts: all of its experts rest on a device, where launches cost more than moving rows.
    """

    holds_experts: bool = False

    def use_experts(self, experts: Sequence[int], num_tokens: int) -> None:
        """Say which experts so many tokens use, in order; called after routing, before their first
        product.
        """
        ...

    def expert_linear(self, experts: RowExperts, name: str, x: Tensor) -> Tensor:
        """x [rows, in] times the matrix of each row's expert -> [rows, out]; `name` has {} for the
        expert's number.
        """
        parts = zip(experts.sizes, x.split([*experts.sizes.values()]))
        products = [self.linear(name.format(number), part) for number, part in parts]
        return products[0] if len(products) == 1 else torch.cat(products)

    def vector(self, name: str) -> Tensor | None:
        """A norm's weight or bias; None if the model has none."""
        ...

    def lookup(self, name: str, rows: TableRows) -> Tensor:
        """Rows [T] of a table -> [T, width]."""
        ...


@dataclass(frozen=True, eq=False)
class _OfExperts(Products):
    """Matrices of several experts as those of one."""

    weights: StageWeights
    experts: RowExperts
    repeatable: bool = False

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights.expert_linear(self.experts, name, x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Decoder:
    """The equations of one model. `TransformersDecoder` answers to the same calls.

    attention: of layers that name no other.
    """

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.attention = AttentionConfig(
            scale=config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale,
            softcap=config.attn_softcap,
            slopes=alibi_slopes(config.num_heads).to(device) if config.alibi else None,
        )
        _ = self.attention.on_host  # copied now, so that no pass waits for it
        self.dtype = dtype
        self._activation = _ACTIVATIONS[config.activation]
        ropes = {config.layer_rope(layer) for layer in range(config.num_layers)}
        self._frequencies = {
            rope: inverse_frequencies(rope, config.head_dim).to(device)
            for rope in ropes
            if rope is not None
        }

    def rotary(self, positions: Tensor) -> dict[RopeConfig, Rotary]:
        """Rotations of tokens at absolute positions [T], for each rotary embedding of the model."""
        rotations = {}
        for rope, frequencies in self._frequencies.items():
            angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
            angles = torch.cat((angles, angles), dim=-1)[:, None, :]
            cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
            rotations[rope] = cos.to(self.dtype), sin.to(self.dtype)
        return rotations

    def embed(self, weights: StageWeights, token_ids: TableRows, positions: TableRows) -> Tensor:
        """token_ids and positions [T] -> hidden [T, H]."""
        config = self.config
        hidden = weights.lookup("tokens", token_ids)
        if config.embed_scale != 1.0:
            hidden = hidden * config.embed_scale
        if config.projects_embeddings:
            hidden = weights.linear("project_in", hidden)
        if config.learned_positions:
            hidden = hidden + weights.lookup("positions", positions.shifted(config.position_offset))
        return self._norm(weights, "norm", hidden) if config.embed_norm else hidden

    def layer(
        self, weights: StageWeights, layer: int, batches: Iterable[LayerBatch]
    ) -> Generator[Tensor, None, None]:
        """Decoder layer number `layer`: of each batch hidden [T, H] -> [T, H], in order.

        A layer with experts asks for all batches before it yields the first, and wants each expert
        once.
        """
        runs = (partial(self._layer, weights, layer, batch) for batch in batches)
        if self.config.moe(layer) is None:
            return (run() for run in runs)
        return run_together(runs, weights.use_experts)

    def _layer(self, weights: StageWeights, layer: int, batch: LayerBatch) -> Tensor:
        residual, moe = RESIDUALS[self.config.residual], self.config.moe(layer)
        norm = (
            partial(self._norm, weights, "mlp_norm") if residual.input_norm else Tensor.contiguous
        )

        def mlp(hidden: Tensor) -> Tensor:
            if moe is None:
                return self._mlp(weights, "mlp", norm(hidden))
            return wait_for_experts(self._route(weights, moe, hidden, norm))

        # Used tensors keep no name, and so no memory, while a batch waits for experts.
        hidden = batch.take_hidden()
        attention = partial(self._attention, weights, layer, batch)
        if residual.parallel:
            return attention(hidden).add_(hidden).add_(mlp(hidden))
        hidden = self._add(weights, "attn", attention(hidden), hidden)
        return self._add(weights, "mlp", mlp(hidden), hidden)

    def _attention(
        self, weights: StageWeights, layer: int, batch: LayerBatch, hidden: Tensor
    ) -> Tensor:
        config, rope = self.config, self.config.layer_rope(layer)
        x = (
            self._norm(weights, "attn_norm", hidden)
            if RESIDUALS[config.residual].input_norm
            else hidden
        )
        q, k, v = (
            part.view(len(x), -1, config.head_dim)
            for part in weights.linears(_QUERIES_KEYS_VALUES, x)
        )
        if config.qk_norm and config.qk_norm_all_heads:
            q = self._norm(weights, "attn.q_norm", q.flatten(1)).view_as(q)
            k = self._norm(weights, "attn.k_norm", k.flatten(1)).view_as(k)
        elif config.qk_norm:
            q, k = self._norm(weights, "attn.q_norm", q), self._norm(weights, "attn.k_norm", k)
        if rope is not None:
            rotary = batch.rotary[rope]
            q, k = layer_rows.rotate(q, *rotary), layer_rows.rotate(k, *rotary)
        return weights.linear("attn.o", batch.attend(q, k, v).reshape(-1, config.q_size))

    def head(self, weights: StageWeights, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] of the positions to score -> logits [T, V] in float32."""
        if self.config.final_norm:
            hidden = self._norm(weights, "norm", hidden)
        if self.config.projects_embeddings:
            hidden = weights.linear("project_out", hidden)
        logits = weights.linear("lm", hidden).float()
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _add(self, weights: StageWeights, block: str, x: Tensor, hidden: Tensor) -> Tensor:
        """Add one block's output x to the residual stream, with the norms that follow it
        (`Residual`).
        """
        residual = RESIDUALS[self.config.residual]
        if residual.output_norm:
            x = self._norm(weights, f"{block}_post_norm", x)
        hidden = x.add_(hidden)
        return self._norm(weights, f"{block}_norm", hidden) if residual.sum_norm else hidden

    def _mlp(self, weights: Products, name: str, x: Tensor) -> Tensor:
        if x.shape[0] > _MLP_TOKENS and weights.repeatable:
            return torch.cat([self._mlp(weights, name, part) for part in x.split(_MLP_TOKENS)])
        if self.config.gated_mlp:
            activated, *factors = weights.linears((f"{name}.gate", f"{name}.up"), x)
        else:
            activated, factors = weights.linear(f"{name}.up", x), []
        inner = layer_rows.gate(self.config.activation, activated, *factors)
        if inner is None:  # no compiled loop does both at once here
            inner = self._activation(activated)
            for factor in factors:
                inner.mul_(factor)
        return weights.linear(f"{name}.down", inner)

    def _route(
        self,
        weights: StageWeights,
        moe: MoEConfig,
        hidden: Tensor,
        norm: Callable[[Tensor], Tensor],
    ) -> RoutedTokens:
        """Each token of norm(hidden) [T, H] goes through the experts of its K largest router
        probabilities.
        """

        def experts(of_rows: RowExperts, x: Tensor) -> Tensor:
            if len(of_rows.sizes) > 1:
                return self._mlp(_OfExperts(weights, of_rows), "mlp.experts.{}", x)
            return self._mlp(weights, f"mlp.experts.{next(iter(of_rows.sizes))}", x)

        # [T, E]
        probabilities = torch.softmax(weights.linear("mlp.router", norm(hidden)).float(), dim=-1)
        expert_weights, selected = torch.topk(probabilities, moe.per_token, dim=-1)
        if moe.normalize:
            expert_weights = expert_weights / expert_weights.sum(-1, keepdim=True)
        return RoutedTokens(
            hidden, selected, expert_weights, moe.count, experts, weights.holds_experts, norm=norm
        )

    def _norm(self, weights: StageWeights, name: str, x: Tensor) -> Tensor:
        config, weight = self.config, weights.vector(f"{name}.weight")
        if config.norm == "rmsnorm":
            return layer_rows.rms_norm(x, weight, config.norm_eps, config.norm_plus_one)
        return F.layer_norm(
            x, (config.hidden_size,), weight, weights.vector(f"{name}.bias"), config.norm_eps
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of elements, [rotated elements / 2] in float32 (Su et al.,
    2021).
    """
    dim = rope.dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    if rope.kind == "factors":  # LongRoPE (Ding et al., 2024)
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    # Dubey et al. (2024): 1 for short wavelengths, which are kept, 0 for long ones
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        ramp = rope.original_max_positions / wavelengths - rope.low_freq_factor
        keep = (ramp / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    else:
        keep = _yarn_ramp(rope, dim)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn_ramp(rope: RopeConfig, dim: int) -> Tensor:
    """1 for many turns in the original context, 0 for few, a ramp between (Peng et al., 2023,
    section 3.2).
    """

    def element(turns: float) -> float:
        return (
            dim
            * math.log(rope.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = element(rope.beta_fast), element(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0.0
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)


def alibi_slopes(heads: int) -> Tensor:
    """Decrease of a score per position of distance, [heads] in float32 (Press et al., 2021).

    For n heads, n a power of two: the geometric series from 2^(-8/n). Further heads take every
    other term of the series for 2n.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)
