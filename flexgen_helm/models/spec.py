"""The architecture record: everything the decoder, the loader and the planner know about one model.

No torch here: a plan for OPT-175B is made from this record alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the whole head, halves rotated against each other.

    theta: base of the inverse frequencies. kind: 'default', 'linear' (positions divided by `factor`) or
    'llama3' (low frequencies divided by `factor`, with a smooth border between the wavelengths
    `original_max_positions / low_freq_factor` and `original_max_positions / high_freq_factor`).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model. Filled by a family's configuration reader.

    Sizes are counts of elements. `embed_size` differs from `hidden_size` only where the model projects its
    embeddings (OPT-350M). `norm_after`: layer norm behind the residual sum instead of before the block.
    `rope` None means learned positions, whose table starts `position_offset` rows late (OPT: 2). `qk_norm`: queries
    and keys are normed head by head before they are rotated (Qwen3). `windows`: for every layer the positions that a
    token sees, itself included, or None for all; empty where no layer has a window.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    embed_size: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    activation: Literal["relu", "silu", "gelu", "gelu_tanh"]
    gated_mlp: bool
    rope: RopeSpec | None
    norm_after: bool = False
    norm_affine: bool = True
    final_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    position_offset: int = 0
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """Positions that a token sees in this layer, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in tensor_shapes(self).values())

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Keys and values of all layers for one position, in bytes."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element

    @property
    def linear_flops_per_token(self) -> int:
        """Operations (a multiply-add counts two) of the layers' products for one token; no attention, no head."""
        per_layer = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        per_layer += (3 if self.gated_mlp else 2) * self.hidden_size * self.ffn_size
        return 2 * self.num_layers * per_layer

    @property
    def head_flops_per_token(self) -> int:
        """Operations of the language-model head (and its projection) for one position."""
        project = self.hidden_size * self.embed_size if self.embed_size != self.hidden_size else 0
        return 2 * (project + self.embed_size * self.vocab_size)

    def attention_flops(self, query_tokens: int, key_tokens: int) -> int:
        """Operations of scores and mixing for `query_tokens` that each see `key_tokens`, over all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * query_tokens * key_tokens


# The stages through which a token passes: embed, layers.0 … layers.L-1, head.
EMBED, HEAD = "embed", "head"


def layer_stage(index: int) -> str:
    return f"layers.{index}"


def stages(spec: ModelSpec) -> list[str]:
    return [EMBED, *(layer_stage(i) for i in range(spec.num_layers)), HEAD]


def _norm(spec: ModelSpec, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.norm_affine:
        yield f"{name}.weight", (spec.hidden_size,)
        if spec.norm == "layernorm":
            yield f"{name}.bias", (spec.hidden_size,)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _stage_tensors(spec: ModelSpec, stage: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, projected = spec.hidden_size, spec.embed_size != spec.hidden_size
    if stage == EMBED:
        yield "embed.tokens.weight", (spec.vocab_size, spec.embed_size)
        if spec.rope is None:
            yield "embed.positions.weight", (spec.max_positions + spec.position_offset, hidden)
        if projected:
            yield from _linear("embed.project_in", hidden, spec.embed_size, False)
    elif stage == HEAD:
        if spec.final_norm:
            yield from _norm(spec, "head.norm")
        if projected:
            yield from _linear("head.project_out", spec.embed_size, hidden, False)
        if not spec.tied_head:
            yield from _linear("head.lm", spec.vocab_size, spec.embed_size, False)
    else:
        yield from _norm(spec, f"{stage}.attn_norm")
        yield from _linear(f"{stage}.attn.q", spec.q_size, hidden, spec.qkv_bias)
        yield from _linear(f"{stage}.attn.k", spec.kv_size, hidden, spec.qkv_bias)
        yield from _linear(f"{stage}.attn.v", spec.kv_size, hidden, spec.qkv_bias)
        if spec.qk_norm:
            yield f"{stage}.attn.q_norm.weight", (spec.head_dim,)
            yield f"{stage}.attn.k_norm.weight", (spec.head_dim,)
        yield from _linear(f"{stage}.attn.o", hidden, spec.q_size, spec.out_bias)
        yield from _norm(spec, f"{stage}.mlp_norm")
        if spec.gated_mlp:
            yield from _linear(f"{stage}.mlp.gate", spec.ffn_size, hidden, spec.mlp_bias)
        yield from _linear(f"{stage}.mlp.up", spec.ffn_size, hidden, spec.mlp_bias)
        yield from _linear(f"{stage}.mlp.down", hidden, spec.ffn_size, spec.mlp_bias)


def stage_tensor_shapes(spec: ModelSpec, stage: str) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of the tensors that one stage owns (a tied head owns no matrix of its own)."""
    return dict(_stage_tensors(spec, stage))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of the model, in the order in which a pass meets them.

    Matrices are [out, in] as in `torch.nn.Linear`; tables are [rows, width]; the rest are vectors.
    """
    return {name: shape for stage in stages(spec) for name, shape in _stage_tensors(spec, stage)}
