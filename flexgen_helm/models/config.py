"""The architecture record: everything the decoder, the loader and the planner know about one model.

No torch here: a plan for OPT-175B is made from this record alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from flexgen_helm.identity import record_text, same_names

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the halves of the first `dim` elements of a head (None: all) rotate together.

    theta: base of the inverse frequencies. kind: what stretches them to contexts longer than `original_max_positions`:
    'default' nothing; 'linear' divides all by `factor`; 'llama3' divides the low ones, with a smooth border between
    the wavelengths original/`low_freq_factor` and original/`high_freq_factor`; 'yarn' divides those that turn less
    than `beta_slow` times over the original context, keeps those that turn more than `beta_fast` times, and ramps
    between them (`truncate`: over whole elements); 'factors' divides each by its own of `factors`. magnitude:
    multiplies cosines and sines.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    dim: int | None = None

    def identity_text(self) -> str:
        return record_text(
            self,
            "RopeSpec",
            same_names(
                "theta kind factor low_freq_factor high_freq_factor original_max_positions beta_fast beta_slow "
                "truncate factors magnitude dim"
            ),
        )


@dataclass(frozen=True)
class MoEConfig:
    """A feed-forward part of `count` gated experts, of which a router picks `per_token` for every token.

    normalize: the picked experts' weights sum to one. dense_layers: layers with an ordinary feed-forward part.
    """

    count: int
    per_token: int
    ffn_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()

    def identity_text(self) -> str:
        return record_text(self, "ExpertSpec", same_names("count per_token ffn_size normalize dense_layers"))


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Filled by a family's configuration reader.

    Sizes are counts of elements. `embed_size` differs from `hidden_size` only where the model projects its
    embeddings (OPT-350M).

    residual: 'pre_norm' x + f(norm(x)); 'post_norm' norm(x + f(x)); 'sandwich' x + norm(f(norm(x)));
    'parallel' x + attention(norm(x)) + mlp(norm'(x)). Positions: `rope`, or `alibi` (scores fall linearly with the
    distance), or else a learned table that starts `position_offset` rows late (OPT: 2). windows: for every layer the
    positions that a token sees, itself included, or None for all; empty where no layer has a window. local_rope:
    that of the layers with a window, where it differs. qk_norm: queries and keys are normed head by head before they
    are rotated. norm_plus_one: RMS norms multiply by 1 + weight. attn_scale: of the scores, None for
    head_dim ** -0.5. attn_softcap, final_softcap: scores, logits become c tanh(x / c). experts: None for an ordinary
    feed-forward part.
    """

    architecture: str
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
    activation: Activation
    gated_mlp: bool
    rope: RopeConfig | None
    residual: Literal["pre_norm", "post_norm", "sandwich", "parallel"] = "pre_norm"
    norm_affine: bool = True
    final_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    position_offset: int = 0
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    alibi: bool = False
    embed_norm: bool = False
    embed_scale: float = 1.0
    norm_plus_one: bool = False
    attn_scale: float | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    experts: MoEConfig | None = None

    def identity_text(self) -> str:
        return record_text(
            self,
            "ModelSpec",
            {"family": "architecture"}
            | same_names(
                "num_layers hidden_size num_heads num_kv_heads head_dim ffn_size vocab_size max_positions "
                "embed_size norm norm_eps activation gated_mlp rope residual norm_affine final_norm qkv_bias out_bias "
                "mlp_bias tied_head position_offset qk_norm windows local_rope alibi embed_norm embed_scale "
                "norm_plus_one attn_scale attn_softcap final_softcap experts"
            ),
        )

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotation of this layer's queries and keys."""
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    def moe(self, layer: int) -> MoEConfig | None:
        """The experts of this layer; None where its feed-forward part is an ordinary one."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def learned_positions(self) -> bool:
        return self.rope is None and not self.alibi

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
        attention = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        matrices = 3 if self.gated_mlp else 2
        weights = self.num_layers * attention
        for layer in range(self.num_layers):
            experts = self.moe(layer)
            width = self.ffn_size if experts is None else experts.per_token * experts.ffn_size
            weights += self.hidden_size * (matrices * width + (0 if experts is None else experts.count))
        return 2 * weights

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
# The table of tokens, which is the head's matrix too where the two are tied.
EMBED_TABLE = "embed.tokens.weight"


def layer_stage(index: int) -> str:
    return f"layers.{index}"


def stage_names(config: ModelConfig) -> list[str]:
    return [EMBED, *(layer_stage(i) for i in range(config.num_layers)), HEAD]


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.norm_affine:
        yield f"{name}.weight", (config.hidden_size,)
        if config.norm == "layernorm":
            yield f"{name}.bias", (config.hidden_size,)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _stage_tensors(config: ModelConfig, stage: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, projected = config.hidden_size, config.embed_size != config.hidden_size
    if stage == EMBED:
        yield EMBED_TABLE, (config.vocab_size, config.embed_size)
        if config.learned_positions:
            yield "embed.positions.weight", (config.max_positions + config.position_offset, hidden)
        if config.embed_norm:
            yield from _norm(config, "embed.norm")
        if projected:
            yield from _linear("embed.project_in", hidden, config.embed_size, False)
    elif stage == HEAD:
        if config.final_norm:
            yield from _norm(config, "head.norm")
        if projected:
            yield from _linear("head.project_out", config.embed_size, hidden, False)
        if not config.tied_head:
            yield from _linear("head.lm", config.vocab_size, config.embed_size, False)
    else:
        yield from _norm(config, f"{stage}.attn_norm")
        yield from _linear(f"{stage}.attn.q", config.q_size, hidden, config.qkv_bias)
        yield from _linear(f"{stage}.attn.k", config.kv_size, hidden, config.qkv_bias)
        yield from _linear(f"{stage}.attn.v", config.kv_size, hidden, config.qkv_bias)
        if config.qk_norm:
            yield f"{stage}.attn.q_norm.weight", (config.head_dim,)
            yield f"{stage}.attn.k_norm.weight", (config.head_dim,)
        yield from _linear(f"{stage}.attn.o", hidden, config.q_size, config.out_bias)
        if config.residual == "sandwich":
            yield from _norm(config, f"{stage}.attn_post_norm")
        yield from _norm(config, f"{stage}.mlp_norm")
        experts = config.moe(int(stage.partition(".")[2]))
        if experts is None:
            yield from _mlp(f"{stage}.mlp", config, config.ffn_size)
        else:
            yield from _linear(f"{stage}.mlp.router", experts.count, hidden, False)
            for expert in range(experts.count):
                yield from _mlp(f"{stage}.mlp.experts.{expert}", config, experts.ffn_size)
        if config.residual == "sandwich":
            yield from _norm(config, f"{stage}.mlp_post_norm")


def _mlp(name: str, config: ModelConfig, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.gated_mlp:
        yield from _linear(f"{name}.gate", size, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.up", size, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.down", config.hidden_size, size, config.mlp_bias)


def stage_tensor_shapes(config: ModelConfig, stage: str) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of the tensors that one stage owns (a tied head owns no matrix of its own)."""
    return dict(_stage_tensors(config, stage))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of the model, in the order in which a pass meets them.

    Matrices are [out, in] as in `torch.nn.Linear`; tables are [rows, width]; the rest are vectors.
    """
    return {name: shape for stage in stage_names(config) for name, shape in _stage_tensors(config, stage)}
