"""DecoderConfig: the equations of a model that our own decoder computes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flexgen_helm.identity import Identified
from flexgen_helm.models.config import (
    EMBED,
    EMBED_TABLE,
    FIRST_VERSION,
    HEAD,
    HEAD_MATRIX,
    ModelConfig,
    MoEConfig,
    TensorShapes,
    tensor_shapes,
)

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
ResidualKind = Literal["pre_norm", "post_norm", "sandwich", "parallel", "reordered_norm"]


# `Identified`: what digests of answers call a class and its fields. A new field needs a default,
# and is named in neither list.
@dataclass(frozen=True)
class RopeConfig(
    Identified,
    name="RopeSpec",
    first_version="theta kind factor low_freq_factor high_freq_factor original_max_positions "
    "beta_fast beta_slow truncate factors magnitude dim",
):
    """Rotary position embedding of the first `dim` elements of a head; their two halves rotate
    against each other.

    theta: base of the inverse frequencies.
    kind: how the frequencies are stretched to contexts longer than `original_max_positions`.
        'default': not at all.
        'linear': all are divided by `factor`.
        'llama3': low ones are divided by `factor`, with a ramp between the wavelengths original /
            low_freq_factor and original / high_freq_factor.
        'yarn': those with fewer than `beta_slow` turns in the original context are divided by
            `factor`, those with more than `beta_fast` are not, with a ramp between.
        'factors': each is divided by its own entry of `factors` (LongRoPE, GGUF files).
    truncate: the ramp of 'yarn' begins and ends at whole elements.
    magnitude: factor on cosines and sines.
    dim: rotated elements of a head; None for all (GPT-NeoX and Phi-3 rotate a part).
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


@dataclass(frozen=True)
class Residual:
    """Where a layer's norms are. f is one of its two blocks, attention ('attn') and feed-forward
    ('mlp').

        x = f(norm(h))     if input_norm, else f(h)     tensor '<block>_norm'
        x = norm(x)        if output_norm               tensor '<block>_post_norm'
        h = h + x
        h = norm(h)        if sum_norm                  tensor '<block>_norm'

    parallel: both blocks read the same h, and both results are added to it.
    """

    input_norm: bool = True
    output_norm: bool = False
    sum_norm: bool = False
    parallel: bool = False


RESIDUALS: Mapping[ResidualKind, Residual] = {
    "pre_norm": Residual(),  # all but the following
    "post_norm": Residual(input_norm=False, sum_norm=True),  # OPT-350M
    "sandwich": Residual(output_norm=True),  # Gemma 2 and 3
    "parallel": Residual(parallel=True),  # GPT-NeoX
    "reordered_norm": Residual(input_norm=False, output_norm=True),  # OLMo 2
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(
    ModelConfig,
    name="ModelSpec",
    first_version=FIRST_VERSION,
    later="qk_norm_all_heads layers_before layers_after chunked norm_bias",
):
    """One model by its equations, filled by the module of its architecture
    (`models.architectures`).
    """

    norm: Literal["layernorm", "rmsnorm"]  # of hidden states
    norm_eps: float
    activation: Activation
    gated_mlp: bool  # down(act(gate(x)) up(x)), else down(act(up(x))) (OPT, GPT-2, GPT-NeoX, BLOOM)
    rope: RopeConfig | None  # rotary positions; None with ALiBi or a learned table
    residual: ResidualKind = "pre_norm"  # where norms are
    norm_affine: bool = True  # norms have weights (not in some OPT fine-tunes)
    final_norm: bool = True  # the head begins with a norm (not in OPT-350M)
    qkv_bias: bool = False  # of q, k and v (OPT, GPT-2, GPT-NeoX, BLOOM, Qwen2)
    out_bias: bool = False  # of the attention output (OPT, GPT-2, GPT-NeoX, BLOOM)
    mlp_bias: bool = False  # (OPT, GPT-2, GPT-NeoX, BLOOM)
    position_offset: int = 0  # rows of the table of learned positions before position 0 (OPT: 2)
    # RMS norm of each head's query and key before the rotation (Qwen3, Gemma 3)
    qk_norm: bool = False
    # rotation of the layers with a window, where it differs (Gemma 3)
    local_rope: RopeConfig | None = None
    alibi: bool = False  # scores fall linearly with the distance (BLOOM)
    embed_norm: bool = False  # embeddings are normed (BLOOM)
    embed_scale: float = 1.0  # factor on embeddings (Gemma)
    norm_plus_one: bool = False  # RMS norms multiply by 1 + weight (Gemma)
    # factor on scores; None for head_dim ** -0.5 (Gemma, some GPT-2)
    attn_scale: float | None = None
    final_softcap: float | None = None  # logits become cap tanh(logit / cap) (Gemma 2)
    norm_bias: bool = True  # layer norms have biases (not in MPT)
    qk_norm_all_heads: bool = False  # `qk_norm` is of all heads together, not of each (OLMo 2)

    @property
    def class_name(self) -> str:
        return self.architecture

    @property
    def values_digest(self) -> str:
        return ""

    def stage_tensors(self, stage: str) -> TensorShapes:
        table = EMBED_TABLE, (self.vocab_size, self.embed_size)
        if stage == EMBED:
            yield table
            if self.learned_positions:
                yield (
                    "embed.positions.weight",
                    (self.max_positions + self.position_offset, self.hidden_size),
                )
            if self.embed_norm:
                yield from self._norm("embed.norm")
            if self.projects_embeddings:
                yield "embed.project_in.weight", (self.hidden_size, self.embed_size)
        elif stage == HEAD:
            if self.final_norm:
                yield from self._norm("head.norm")
            if self.projects_embeddings:
                yield "head.project_out.weight", (self.embed_size, self.hidden_size)
            if not self.tied_head:
                yield HEAD_MATRIX, (self.vocab_size, self.embed_size)
            elif not self.has_embedding:
                yield table
        else:
            yield from self._layer_tensors(
                stage, self.moe(int(stage.removeprefix("layers.")) - self.layers_before)
            )

    def layer_kind(self, layer: int) -> MoEConfig | None:
        return self.moe(layer - self.layers_before)

    def _layer_tensors(self, stage: str, moe: MoEConfig | None) -> TensorShapes:
        hidden, residual = self.hidden_size, RESIDUALS[self.residual]
        has_norm = residual.input_norm or residual.sum_norm
        if has_norm:
            yield from self._norm(f"{stage}.attn_norm")
        for part, size in (("q", self.q_size), ("k", self.kv_size), ("v", self.kv_size)):
            yield from _linear(f"{stage}.attn.{part}", size, hidden, self.qkv_bias)
        if self.qk_norm:
            all_heads = self.qk_norm_all_heads
            yield f"{stage}.attn.q_norm.weight", (self.q_size if all_heads else self.head_dim,)
            yield f"{stage}.attn.k_norm.weight", (self.kv_size if all_heads else self.head_dim,)
        yield from _linear(f"{stage}.attn.o", hidden, self.q_size, self.out_bias)
        if residual.output_norm:
            yield from self._norm(f"{stage}.attn_post_norm")
        if has_norm:
            yield from self._norm(f"{stage}.mlp_norm")
        if moe is None:
            yield from self._mlp(f"{stage}.mlp", self.ffn_size)
        else:
            yield f"{stage}.mlp.router.weight", (moe.count, hidden)
            for expert in range(moe.count):
                yield from self._mlp(f"{stage}.mlp.experts.{expert}", moe.ffn_size)
        if residual.output_norm:
            yield from self._norm(f"{stage}.mlp_post_norm")

    def _norm(self, name: str) -> TensorShapes:
        if self.norm_affine:
            yield f"{name}.weight", (self.hidden_size,)
            if self.norm == "layernorm" and self.norm_bias:
                yield f"{name}.bias", (self.hidden_size,)

    def _mlp(self, name: str, size: int) -> TensorShapes:
        for part in ("gate", "up") if self.gated_mlp else ("up",):
            yield from _linear(f"{name}.{part}", size, self.hidden_size, self.mlp_bias)
        yield from _linear(f"{name}.down", self.hidden_size, size, self.mlp_bias)

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Rotation of this layer's queries and keys."""
        return self.local_rope if self.local_rope and self.window(layer) else self.rope

    @property
    def waiting_copies(self) -> int:
        # hidden states behind attention, and the sum; in parallel layers also those before it
        return 2 + RESIDUALS[self.residual].parallel

    @property
    def learned_positions(self) -> bool:
        return self.rope is None and not self.alibi

    @property
    def has_score_bias(self) -> bool:
        return self.alibi

    @property
    def caps_logits(self) -> bool:
        return self.final_softcap is not None

    @property
    def neutral_norm_weight(self) -> float:
        return 0.0 if self.norm_plus_one else 1.0

    @cached_property
    def linear_flops_per_token(self) -> int:
        matrices = 3 if self.gated_mlp else 2
        weights = self.num_layers * 2 * self.hidden_size * (self.q_size + self.kv_size)
        for moe in map(self.moe, range(self.num_layers)):
            width = self.ffn_size if moe is None else moe.per_token * moe.ffn_size
            weights += self.hidden_size * (matrices * width + (0 if moe is None else moe.count))
        return 2 * weights

    @cached_property
    def expert_elements(self) -> int:
        matrices = 3 if self.gated_mlp else 2
        return 0 if self.experts is None else matrices * self.hidden_size * self.experts.ffn_size

    @cached_property
    def widest_ffn(self) -> int:
        return max(
            shape[0] for name, shape in tensor_shapes(self).items() if name.endswith(".up.weight")
        )


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> TensorShapes:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)
