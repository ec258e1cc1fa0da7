"""ModelConfig: everything that decoder, checkpoint reader and planner know of one model. No torch.

A plan for OPT-175B is made from this record alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from flexgen_helm.identity import Identified
from flexgen_helm.models.transformers_backend.config import ModulesConfig

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
ResidualKind = Literal["pre_norm", "post_norm", "sandwich", "parallel", "reordered_norm"]


@dataclass(frozen=True)
class RopeConfig(
    Identified,
    name="RopeSpec",
    first_version="theta kind factor low_freq_factor high_freq_factor original_max_positions beta_fast beta_slow "
    "truncate factors magnitude dim",
):
    """Rotary position embedding of the first `dim` elements of a head; their two halves rotate against each other.

    theta: base of the inverse frequencies.
    kind: how the frequencies are stretched to contexts longer than `original_max_positions`.
        'default': not at all.
        'linear': all are divided by `factor`.
        'llama3': low ones are divided by `factor`, with a ramp between the wavelengths original / low_freq_factor and
            original / high_freq_factor.
        'yarn': those with fewer than `beta_slow` turns in the original context are divided by `factor`, those with
            more than `beta_fast` are not, with a ramp between.
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
class MoEConfig(Identified, name="ExpertSpec", first_version="count per_token ffn_size normalize dense_layers"):
    """Mixture of experts: a router selects some gated MLPs for every token (Mixtral, Qwen3-MoE).

    count: experts of a layer.
    per_token: experts that the router selects for a token.
    ffn_size: inner size of one expert.
    normalize: the weights of the selected experts are scaled to the sum 1.
    dense_layers: indices of layers that have an ordinary MLP instead.
    """

    count: int
    per_token: int
    ffn_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """The positions that a token sees: the last `tokens`, itself included, or those of its own chunk.

    is_chunked: positions are divided into chunks of `tokens`, counted from the sequence's first one (Llama 4).
    """

    tokens: int
    is_chunked: bool = False

    def oldest(self, position: Any, start: Any = 0) -> Any:
        """Return the first position that a token at `position` sees; less than 0 if it is before the first.

        position: an integer or a tensor of them, as is `start`.
        start: absolute position of what both are counted from.
        """
        if self.is_chunked:
            return (position + start) // self.tokens * self.tokens - start
        return position + (1 - self.tokens)


@dataclass(frozen=True)
class Residual:
    """Where a layer's norms are. f is one of its two blocks, attention ('attn') and feed-forward ('mlp').

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


@dataclass(frozen=True)
class ModelConfig(
    Identified,
    name="ModelSpec",
    first_version="family=architecture num_layers hidden_size num_heads num_kv_heads head_dim ffn_size vocab_size "
    "max_positions embed_size norm norm_eps activation gated_mlp rope residual norm_affine final_norm qkv_bias "
    "out_bias mlp_bias tied_head position_offset qk_norm windows local_rope alibi embed_norm embed_scale norm_plus_one "
    "attn_scale attn_softcap final_softcap experts",
    later="qk_norm_all_heads layers_before layers_after generic=modules chunked",
):
    """One decoder-only model, filled by the module of its architecture (`models.architectures`).

    Sizes are in elements, positions in tokens. A new field comes last, with a default that leaves other models alone.
    """

    architecture: str  # name of the `Architecture` that filled the record
    num_layers: int
    hidden_size: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; fewer with grouped-query attention
    head_dim: int
    ffn_size: int  # inner size of the MLP
    vocab_size: int
    max_positions: int  # context length
    embed_size: int  # width of the embedding table; another than `hidden_size` where the model projects (OPT-350M)
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
    tied_head: bool = True  # the embedding table is the head's matrix too
    position_offset: int = 0  # rows of the table of learned positions before position 0 (OPT: 2)
    qk_norm: bool = False  # RMS norm of each head's query and key before the rotation (Qwen3, Gemma 3)
    windows: tuple[int | None, ...] = ()  # by layer: positions that a token sees, itself included; None for all
    local_rope: RopeConfig | None = None  # rotation of the layers with a window, where it differs (Gemma 3)
    alibi: bool = False  # scores fall linearly with the distance (BLOOM)
    embed_norm: bool = False  # embeddings are normed (BLOOM)
    embed_scale: float = 1.0  # factor on embeddings (Gemma)
    norm_plus_one: bool = False  # RMS norms multiply by 1 + weight (Gemma)
    attn_scale: float | None = None  # factor on scores; None for head_dim ** -0.5 (Gemma, some GPT-2)
    attn_softcap: float | None = None  # scores become cap tanh(score / cap) (Gemma 2)
    final_softcap: float | None = None  # the same of logits (Gemma 2)
    experts: MoEConfig | None = None  # instead of the MLP (Mixtral, Qwen3-MoE)
    qk_norm_all_heads: bool = False  # `qk_norm` is of all heads together, not of each (OLMo 2)
    layers_before: int = 0  # layers of the model that come before these, on other ranks of a pipeline
    layers_after: int = 0  # layers of the model that come after these
    modules: ModulesConfig | None = None  # runs by transformers' own modules; features above are theirs
    chunked: bool = False  # `windows` are chunks: a token sees those before it in its own one (Llama 4)

    def part(self, layers: range) -> ModelConfig:
        """Return some layers of the model, as one rank of a pipeline has them.

        Embedding and head belong to the first and the last layer. Stages and tensors keep the names that they have in
        the model; the methods that take a layer count from this part's first one.
        """
        experts = self.experts
        if experts is not None:
            dense = tuple(layer - layers.start for layer in experts.dense_layers if layer in layers)
            experts = replace(experts, dense_layers=dense)
        return replace(
            self,
            num_layers=len(layers),
            windows=self.windows[layers.start : layers.stop],
            experts=experts,
            layers_before=self.layers_before + layers.start,
            layers_after=self.layers_after + self.num_layers - layers.stop,
        )

    @cached_property
    def state_size(self) -> int:
        """Elements of a token between two layers."""
        if self.modules is None:
            return self.hidden_size
        streams = self.modules.streams * self.hidden_size
        return streams + self.modules.layer_inputs_size + self.modules.shared_size

    @cached_property
    def cache_layers(self) -> tuple[int | None, ...]:
        """For each layer the number of the stored keys and values that it attends with; None if it attends to none.

        Most layers have their own. Some use those of an earlier one, the first of them here stores them.
        """
        owners: dict[int, int] = {}  # layer of the whole model -> the one whose keys and values it has
        for shared in self.modules.shared_keys if self.modules is not None else ():
            owners |= dict.fromkeys(shared.readers, shared.layer)
        numbers: dict[int, int] = {}
        layers = range(self.layers_before, self.layers_before + self.num_layers)
        return tuple(
            numbers.setdefault(owners.get(layer, layer), len(numbers))
            if self.modules is None or self.modules.kind(layer).attends
            else None
            for layer in layers
        )

    @cached_property
    def num_cache_layers(self) -> int:
        """Layers whose keys and values are stored; at least one is counted."""
        return max(1, *(number + 1 for number in self.cache_layers if number is not None), 1)

    @cached_property
    def layer_states(self) -> tuple[int, ...]:
        """For each layer the elements of the state that it keeps of a sequence, 0 in most models."""
        if self.modules is None:
            return (0,) * self.num_layers
        kinds = (self.modules.kind(self.layers_before + layer) for layer in range(self.num_layers))
        return tuple(0 if kind.mixer is None else kind.mixer.elements for kind in kinds)

    @cached_property
    def mixer_width(self) -> int:
        """Elements of a token that the widest module with a state computes with; 0 without one."""
        kinds = () if self.modules is None else self.modules.kinds
        return max((kind.mixer.width for kind in kinds if kind.mixer is not None), default=0)

    @property
    def has_embedding(self) -> bool:
        return not self.layers_before

    @property
    def has_head(self) -> bool:
        return not self.layers_after

    def window(self, layer: int) -> Window | None:
        """Positions that a token attends to in this layer; None for all."""
        tokens = self.windows[layer] if self.windows else None
        return None if tokens is None else Window(tokens, self.chunked)

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Rotation of this layer's queries and keys."""
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    def moe(self, layer: int) -> MoEConfig | None:
        """The experts of this layer; None for an ordinary MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def learned_positions(self) -> bool:
        return self.rope is None and not self.alibi

    @property
    def projects_embeddings(self) -> bool:
        return self.embed_size != self.hidden_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Distinct parameters; a tied head counts once."""
        return sum(prod(shape) for shape in tensor_shapes(self).values())

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of one position's keys and values in all layers."""
        return 2 * self.num_cache_layers * self.kv_size * bytes_per_element

    @cached_property
    def linear_flops_per_token(self) -> int:
        """FLOPs (a multiply-add counts two) of the layers' products for one token; without attention and head."""
        if self.modules is not None:
            return 2 * sum(self.modules.kind(self.layers_before + i).weights_per_token for i in range(self.num_layers))
        matrices = 3 if self.gated_mlp else 2
        weights = self.num_layers * 2 * self.hidden_size * (self.q_size + self.kv_size)
        for layer in range(self.num_layers):
            moe = self.moe(layer)
            width = self.ffn_size if moe is None else moe.per_token * moe.ffn_size
            weights += self.hidden_size * (matrices * width + (0 if moe is None else moe.count))
        return 2 * weights

    @cached_property
    def head_flops_per_token(self) -> int:
        """FLOPs of the language-model head, and of its projection, for one position."""
        if not self.has_head:
            return 0
        project = self.hidden_size * self.embed_size if self.projects_embeddings else 0
        return 2 * (project + self.embed_size * self.vocab_size)

    def attention_flops(self, query_tokens: int, key_tokens: int) -> int:
        """FLOPs of all layers' scores and weighted sums, for `query_tokens` that attend to `key_tokens` each."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * query_tokens * key_tokens


# The stages that a token passes in order: embed, layers.0 … layers.L-1, head.
EMBED, HEAD = "embed", "head"
# Embedding table, also the head's matrix if the two are tied.
EMBED_TABLE = "embed.tokens.weight"
# The head's own matrix, if they are not.
HEAD_MATRIX = "head.lm.weight"
# Table of inputs of every layer, looked up by token too (Gemma 3n, Gemma 4).
LAYER_INPUT_TABLE = "embed.layer_inputs.weight"

# Queries of a prompt whose scores exist at once in unfused attention, and whose masks do: they bound the workspace.
SCORE_TOKENS, QUERY_CHUNK_TOKENS = 1024, 256

TensorShapes = Iterator[tuple[str, tuple[int, ...]]]  # canonical name, shape

# Canonical names of an expert's tensors begin so: layers.{i}.mlp.experts.{e}.gate.weight and others.
_EXPERT = re.compile(r"(.*\.experts\.\d+)\.")


def expert_of(name: str) -> str | None:
    """Return the expert that a tensor belongs to, the part of its name up to the expert's number; None if to none."""
    matched = _EXPERT.match(name) if ".experts." in name else None  # models have tens of thousands of tensors
    return None if matched is None else matched[1]


def expert_number(expert: str) -> int:
    """Return the number of an expert in its layer; expert: as `expert_of` returns it."""
    return int(expert.rpartition(".")[2])


def layer_stage(index: int) -> str:
    return f"layers.{index}"


def layer_stages(config: ModelConfig) -> list[str]:
    return [layer_stage(config.layers_before + layer) for layer in range(config.num_layers)]


def stage_names(config: ModelConfig) -> list[str]:
    return [EMBED] * config.has_embedding + layer_stages(config) + [HEAD] * config.has_head


def stage_tensor_shapes(config: ModelConfig, stage: str) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of one stage's tensors.

    A tied head has no matrix of its own, unless another rank of a pipeline has the embedding table.

    Matrices are [out, in] as in `torch.nn.Linear`, tables [rows, width], the rest vectors.
    """
    if config.modules is not None:
        return dict(_module_tensors(config, config.modules, stage))
    if stage == EMBED:
        return dict(_embed_tensors(config))
    if stage == HEAD:
        return dict(_head_tensors(config))
    return dict(_layer_tensors(config, stage))


@lru_cache(maxsize=2)  # those of one model are asked for again and again
def tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Canonical name -> shape of all tensors of the model, in the order of a pass."""
    stages = (stage_tensor_shapes(config, stage) for stage in stage_names(config))
    return MappingProxyType({name: shape for stage in stages for name, shape in stage.items()})


def has_float32(config: ModelConfig, name: str) -> bool:
    """Return whether a vector is kept in float32 where others have the compute dtype."""
    stage, _, own_name = name.partition(".")
    if config.modules is None or stage != "layers":
        return False
    layer, _, own_name = own_name.partition(".")
    return own_name in config.modules.kind(int(layer)).float32


def _module_tensors(config: ModelConfig, modules: ModulesConfig, stage: str) -> TensorShapes:
    """Tensors of a model that runs by transformers' modules; what is no matrix is flat."""
    if stage not in (EMBED, HEAD):
        for name, shape in modules.kind(int(stage.removeprefix("layers."))).shapes.items():
            yield f"{stage}.{name}", shape
        return
    table = EMBED_TABLE, (modules.table_rows, config.embed_size)
    for name, size in modules.embed if stage == EMBED else modules.head:
        yield f"{stage}.{name}", (prod(size),)
    if stage == EMBED:
        yield table
        if modules.layer_input_key:
            yield LAYER_INPUT_TABLE, (modules.layer_input_rows, modules.layer_inputs_size)
        return
    if not config.tied_head:
        yield HEAD_MATRIX, (config.vocab_size, config.hidden_size)
    elif not config.has_embedding:
        yield table
    if modules.head_bias:
        yield "head.lm.bias", (config.vocab_size,)


def _embed_tensors(config: ModelConfig) -> TensorShapes:
    yield EMBED_TABLE, (config.vocab_size, config.embed_size)
    if config.learned_positions:
        yield "embed.positions.weight", (config.max_positions + config.position_offset, config.hidden_size)
    if config.embed_norm:
        yield from _norm("embed.norm", config)
    if config.projects_embeddings:
        yield from _linear("embed.project_in", config.hidden_size, config.embed_size, False)


def _head_tensors(config: ModelConfig) -> TensorShapes:
    if config.final_norm:
        yield from _norm("head.norm", config)
    if config.projects_embeddings:
        yield from _linear("head.project_out", config.embed_size, config.hidden_size, False)
    if not config.tied_head:
        yield from _linear("head.lm", config.vocab_size, config.embed_size, False)
    elif not config.has_embedding:
        yield EMBED_TABLE, (config.vocab_size, config.embed_size)


def _layer_tensors(config: ModelConfig, stage: str) -> TensorShapes:
    hidden, residual = config.hidden_size, RESIDUALS[config.residual]
    if residual.input_norm or residual.sum_norm:
        yield from _norm(f"{stage}.attn_norm", config)
    yield from _linear(f"{stage}.attn.q", config.q_size, hidden, config.qkv_bias)
    yield from _linear(f"{stage}.attn.k", config.kv_size, hidden, config.qkv_bias)
    yield from _linear(f"{stage}.attn.v", config.kv_size, hidden, config.qkv_bias)
    if config.qk_norm:
        all_heads = config.qk_norm_all_heads
        yield f"{stage}.attn.q_norm.weight", (config.q_size if all_heads else config.head_dim,)
        yield f"{stage}.attn.k_norm.weight", (config.kv_size if all_heads else config.head_dim,)
    yield from _linear(f"{stage}.attn.o", hidden, config.q_size, config.out_bias)
    if residual.output_norm:
        yield from _norm(f"{stage}.attn_post_norm", config)
    if residual.input_norm or residual.sum_norm:
        yield from _norm(f"{stage}.mlp_norm", config)
    moe = config.moe(int(stage.removeprefix("layers.")) - config.layers_before)
    if moe is None:
        yield from _mlp(f"{stage}.mlp", config, config.ffn_size)
    else:
        yield from _linear(f"{stage}.mlp.router", moe.count, hidden, False)
        for expert in range(moe.count):
            yield from _mlp(f"{stage}.mlp.experts.{expert}", config, moe.ffn_size)
    if residual.output_norm:
        yield from _norm(f"{stage}.mlp_post_norm", config)


def _norm(name: str, config: ModelConfig) -> TensorShapes:
    if config.norm_affine:
        yield f"{name}.weight", (config.hidden_size,)
        if config.norm == "layernorm":
            yield f"{name}.bias", (config.hidden_size,)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> TensorShapes:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _mlp(name: str, config: ModelConfig, size: int) -> TensorShapes:
    if config.gated_mlp:
        yield from _linear(f"{name}.gate", size, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.up", size, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.down", config.hidden_size, size, config.mlp_bias)
