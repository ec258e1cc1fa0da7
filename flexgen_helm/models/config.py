"""ModelConfig: what planner, cache, offload and checkpoint reader know of one model, whoever
computes it. No torch.

A plan for OPT-175B is made from this record alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any

from flexgen_helm.identity import Identified

TensorShapes = Iterator[tuple[str, tuple[int, ...]]]  # canonical name, shape


# Here and below, `name` and `first_version` keep digests as they were before fields were renamed
# (identity.py).
@dataclass(frozen=True)
class MoEConfig(
    Identified, name="ExpertSpec", first_version="count per_token ffn_size normalize dense_layers"
):
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
    """The positions that a token sees: the last `tokens`, itself included, or those of its own
    chunk.

    is_chunked: positions are divided into chunks of `tokens`, counted from the sequence's first one
        (Llama 4).
    """

    tokens: int
    is_chunked: bool = False

    def oldest(self, position: Any, start: Any = 0) -> Any:
        """Return the first position that a token at `position` sees; less than 0 if it is before
        the first.

        position: an integer or a tensor of them, as is `start`.
        start: absolute position of what both are counted from.
        """
        if self.is_chunked:
            return (position + start) // self.tokens * self.tokens - start
        return position + (1 - self.tokens)


# The fields of the first version of both kinds of record, as digests name them.
FIRST_VERSION = (
    "family=architecture num_layers hidden_size num_heads num_kv_heads head_dim ffn_size "
    "vocab_size max_positions embed_size norm norm_eps activation gated_mlp rope residual "
    "norm_affine final_norm qkv_bias out_bias mlp_bias tied_head position_offset qk_norm windows "
    "local_rope alibi embed_norm embed_scale norm_plus_one attn_scale attn_softcap final_softcap "
    "experts"
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Identified, ABC):
    """One decoder-only model, as planner, cache, offload and checkpoint reader see it.

    `DecoderConfig` adds the equations of a model that our own decoder computes,
    `TransformersConfig` the modules of one that `transformers` computes. Sizes are in elements,
    positions in tokens. A new field has a default that leaves other models alone.
    """

    architecture: str  # name of the `Architecture` that filled the record
    num_layers: int
    hidden_size: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; fewer with grouped-query attention
    head_dim: int
    ffn_size: int  # inner size of the MLP; of modules, rows of the widest matrix of a layer
    vocab_size: int
    max_positions: int  # context length
    # width of the embedding table; another than `hidden_size` where the model projects (OPT-350M)
    embed_size: int
    tied_head: bool = True  # the embedding table is the head's matrix too
    # by layer: positions that a token sees, itself included; None for all
    windows: tuple[int | None, ...] = ()
    # `windows` are chunks: a token sees those before it in its own one (Llama 4)
    chunked: bool = False
    attn_softcap: float | None = None  # scores become cap tanh(score / cap) (Gemma 2)
    experts: MoEConfig | None = None  # instead of the MLP (Mixtral, Qwen3-MoE)
    # layers of the model that come before these, on other ranks of a pipeline
    layers_before: int = 0
    layers_after: int = 0  # layers of the model that come after these

    # What `DecoderConfig` and `TransformersConfig` implement.

    @property
    @abstractmethod
    def class_name(self) -> str:
        """The class of `transformers` whose modules compute the model, or the architecture of our
        own decoder.
        """

    @property
    @abstractmethod
    def values_digest(self) -> str:
        """Digest of the files of `transformers` that compute the model's values; "" if none
        does.
        """

    @abstractmethod
    def stage_tensors(self, stage: str) -> TensorShapes:
        """Yield canonical name and shape of one stage's tensors.

        A tied head has no further matrix, unless another rank of a pipeline has the embedding
        table.

        Matrices are [out, in] as in `torch.nn.Linear`, tables [rows, width], the rest vectors.
        """

    @abstractmethod
    def layer_kind(self, layer: int) -> Hashable:
        """Return what layers share whose tensors have equal shapes; layer: counted in the whole
        model.
        """

    @cached_property
    @abstractmethod
    def linear_flops_per_token(self) -> int:
        """FLOPs (a multiply-add counts two) of the layers' products for one token; without
        attention and head.
        """

    @cached_property
    @abstractmethod
    def expert_elements(self) -> int:
        """Weights of one expert; 0 in a model without experts."""

    @cached_property
    @abstractmethod
    def widest_ffn(self) -> int:
        """Inner size of the widest MLP or expert."""

    # What holds for most models; `DecoderConfig` or `TransformersConfig` override it.

    @property
    def num_streams(self) -> int:
        """Hidden states of a token; Gemma 3n keeps several."""
        return 1

    @property
    def has_score_bias(self) -> bool:
        """Whether scores have a bias by distance (ALiBi)."""
        return False

    @property
    def refused_ids(self) -> Mapping[int, str]:
        """Ids of tokens that a text cannot have: what they do there."""
        return {}

    @property
    def context_end(self) -> str:
        """Say what begins behind the context, where that is shorter than the model's; "" where it
        is not.
        """
        return ""

    @property
    def caps_logits(self) -> bool:
        return False

    @property
    def neutral_norm_weight(self) -> float:
        """The stored weight with which a norm changes nothing further."""
        return 1.0

    def has_float32(self, name: str) -> bool:
        """Return whether a vector is kept in float32 where others have the compute dtype."""
        return False

    def part(self, layers: range) -> ModelConfig:
        """Return some layers of the model, as one rank of a pipeline has them.

        Embedding and head belong to the first and the last layer. Stages and tensors keep the names
        that they have in the model; the methods that take a layer count from this part's first one.
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

    @property
    def waiting_copies(self) -> int:
        """Copies of a token's hidden states while it waits in a layer for experts, which compute
        once for all tokens of a pass.

        They are: before the layer, behind its attention, what experts are given, and the sum of
        their results.
        """
        return 4

    @cached_property
    def hidden_elements(self) -> int:
        """Elements of a token's hidden states, and of what else it carries from layer to layer."""
        return self.hidden_size

    @property
    def key_layers(self) -> tuple[int | None, ...]:
        """For each layer the layer of the whole model that computes its keys and values, or None.

        layer           0    1  2
        key_layers    None   1  1     layer 0 keeps a state instead; layer 2 uses 1's keys again
        cache_layers  None   0  0     which of the stored keys and values these are
        """
        return tuple(range(self.layers_before, self.layers_before + self.num_layers))

    @cached_property
    def cache_layers(self) -> tuple[int | None, ...]:
        """For each layer the number of the stored keys and values that it attends with, or None.

        The first layer here that has a number stores them (`key_layers`).
        """
        numbers: dict[int, int] = {}
        return tuple(
            None if layer is None else numbers.setdefault(layer, len(numbers))
            for layer in self.key_layers
        )

    @cached_property
    def num_attention_layers(self) -> int:
        """Layers that attend; the others of a hybrid keep a state instead."""
        return sum(layer is not None for layer in self.key_layers)

    @cached_property
    def num_cache_layers(self) -> int:
        """Layers whose keys and values are stored; at least one is counted."""
        return max(1, len({*self.cache_layers} - {None}))

    @cached_property
    def layer_states(self) -> tuple[int, ...]:
        """For each layer the elements of the state that it keeps of a sequence, 0 in most
        models.
        """
        return (0,) * self.num_layers

    @cached_property
    def mixer_width(self) -> int:
        """Elements of a token that the widest module with a state computes with; 0 without one."""
        return 0

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

    def moe(self, layer: int) -> MoEConfig | None:
        """The experts of this layer; None for an ordinary MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

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
        firsts = self.first_stages.values()
        values = {
            stage: sum(prod(shape) for _, shape in self.stage_tensors(stage)) for stage in {*firsts}
        }
        return sum(values[stage] for stage in firsts)

    @cached_property
    def first_stages(self) -> Mapping[str, str]:
        """Stage -> the first one with tensors of equal shapes: sizes are computed once for all of a
        kind.
        """
        firsts: dict[Hashable, str] = {}
        kinds = {
            stage: stage
            if stage in (EMBED, HEAD)
            else self.layer_kind(int(stage.removeprefix("layers.")))
            for stage in stage_names(self)
        }
        return {stage: firsts.setdefault(kind, stage) for stage, kind in kinds.items()}

    @cached_property
    def head_flops_per_token(self) -> int:
        """FLOPs of the language-model head, and of its projection, for one position."""
        if not self.has_head:
            return 0
        project = self.hidden_size * self.embed_size if self.projects_embeddings else 0
        return 2 * (project + self.embed_size * self.vocab_size)

    def attention_flops(self, query_tokens: int, key_tokens: int) -> int:
        """FLOPs of all layers' scores and weighted sums, for `query_tokens` that attend to
        `key_tokens` each.
        """
        return 4 * self.num_attention_layers * self.q_size * query_tokens * key_tokens


# The stages that a token passes in order: embed, layers.0 … layers.L-1, head.
EMBED, HEAD = "embed", "head"
# Embedding table, also the head's matrix if the two are tied.
EMBED_TABLE = "embed.tokens.weight"
# The head's own matrix, if they are not.
HEAD_MATRIX = "head.lm.weight"
# Table of inputs of every layer, looked up by token too (Gemma 3n, Gemma 4).
LAYER_INPUT_TABLE = "embed.layer_inputs.weight"

# Canonical names of an expert's tensors begin so: layers.{i}.mlp.experts.{e}.gate.weight, for
# example.
_EXPERT = re.compile(r"(.*\.experts\.\d+)\.")


@cache  # models have tens of thousands of tensors, and plans ask hundreds of times
def expert_of(name: str) -> str | None:
    """Return the expert that a tensor belongs to, the part of its name up to the expert's number;
    None if to none.
    """
    matched = _EXPERT.match(name)
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


@lru_cache(maxsize=2)  # those of one model are asked for again and again
def tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Canonical name -> shape of all tensors of the model, in the order of a pass."""
    return MappingProxyType(
        dict(chain.from_iterable(map(config.stage_tensors, stage_names(config))))
    )
