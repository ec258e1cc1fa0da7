"""TransformersConfig: what is known of a model that runs by `transformers`' modules, without them.
No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from flexgen_helm.identity import Identified
from flexgen_helm.models.config import (
    EMBED,
    EMBED_TABLE,
    FIRST_VERSION,
    HEAD,
    HEAD_MATRIX,
    LAYER_INPUT_TABLE,
    ModelConfig,
    TensorShapes,
)

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # names within a stage, and shapes


@dataclass(frozen=True)
class ExpertTensors(Identified, name="ExpertTensors", first_version="path matrices transposed"):
    """Experts of a layer, which the state dict stacks: [experts, out, in].

    path: of their module within the layer; it ends in 'experts'.
    matrices: name of an entry of the state dict -> [out, in] of one expert.
    transposed: the state dict has [experts, in, out].
    """

    path: str
    matrices: Shapes
    transposed: bool = False


@dataclass(frozen=True)
class SequenceState(Identified, name="SequenceState", first_version="kind number shape"):
    """One tensor of what a module keeps of a sequence: linear attention, Mamba, short convolutions.

    kind: as `transformers`' cache calls it. number: among those of the module. shape: of one
        sequence.
    """

    kind: Literal["conv", "recurrent"]
    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Mixer(Identified, name="Mixer", first_version="path states inputs output width"):
    """A module that keeps a state of a sequence instead of keys and values.

    path: within the layer.
    inputs: paths of linear layers that are applied to the module's input.
    output: path of the linear layer whose result is the module's; "" if there is none.
    width: elements of a token that the module computes with.
    one_by_one: behind a state, the module is right for one token at a time alone.
    """

    path: str
    states: tuple[SequenceState, ...]
    inputs: tuple[str, ...]
    output: str
    width: int
    one_by_one: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each state of one sequence."""
        return tuple(prod(state.shape) for state in self.states)

    @property
    def elements(self) -> int:
        """Elements of all states of one sequence."""
        return sum(self.sizes)


@dataclass(frozen=True)
class LayerKind(
    Identified,
    name="LayerKind",
    first_version=("matrices others=resident experts num_experts per_token"),
):
    """The tensors of layers that are alike.

    matrices: name -> [out, in], in the order of their use; each is used once for a batch.
    resident: name -> shape of what always rests on the compute device: norms, biases, routers,
        sinks.
    experts: used in the order of routing.
    num_experts, per_token: of a layer, and that the router selects for a token; 0 without experts.
    float32: those of the resident ones that have float32 in every model, such as biases that choose
        experts.
    mixer: what keeps a state of each sequence; None in most layers.
    attends: it has keys and values.
    """

    matrices: Shapes
    resident: Shapes
    experts: tuple[ExpertTensors, ...] = ()
    num_experts: int = 0
    per_token: int = 0
    float32: tuple[str, ...] = ()
    mixer: Mixer | None = None
    attends: bool = True

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name within the layer -> shape as it is stored; what is no matrix is flat."""
        shapes: dict[str, tuple[int, ...]] = {name: (prod(shape),) for name, shape in self.resident}
        shapes |= dict(self.matrices)
        for expert in range(self.num_experts):
            for stack in self.experts:
                shapes |= {
                    expert_name(stack.path, expert, entry): shape for entry, shape in stack.matrices
                }
        return shapes

    @cached_property
    def weights_per_token(self) -> int:
        """Weights that one token is multiplied with."""
        of_every = sum(
            prod(shape) for _, shape in (*self.matrices, *self.resident) if len(shape) == 2
        )
        return of_every + self.per_token * self.expert_elements

    @cached_property
    def expert_elements(self) -> int:
        """Weights of one expert."""
        return sum(prod(shape) for stack in self.experts for _, shape in stack.matrices)

    @cached_property
    def widest(self) -> int:
        """Rows of the widest matrix."""
        stacked = (matrix for stack in self.experts for matrix in stack.matrices)
        return max(shape[0] for _, shape in (*self.matrices, *stacked))


@dataclass(frozen=True)
class SharedKeys(
    Identified, name="SharedKeys", first_version="name layer heads key_dim value_dim readers"
):
    """Keys and values that later layers use again, by the name that the model gives them.

    layer: that computes them; readers: those that use them again.
    """

    name: str
    layer: int
    heads: int
    key_dim: int
    value_dim: int
    readers: tuple[int, ...]


class StateDictEntry(NamedTuple):
    """Where the state dict has a tensor: of which expert, if the entry stacks them.

    transposed: the entry has [in, out].
    """

    key: str
    expert: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class ModulesConfig(
    Identified,
    name="GenericConfig",
    first_version=(
        "class_name text layers_path kinds layer_kinds embed head head_bias table_key head_key "
        "table_rows"
    ),
):
    """The modules of one model, as a trace finds them.

    class_name: of `transformers`.
    text: the configuration, as JSON in a canonical order.
    layers_path: name of the list of layers in the state dict.
    kinds: of its layers; layer_kinds: the number of each layer's kind.
    embed, head: what the code before and after the layers uses besides the embedding table and the
        head's matrix; keys of the state dict and shapes.
    head_bias: whether the language-model head has one.
    table_key, head_key: of the embedding table and of the head's matrix in the state dict.
    table_rows: of the embedding table, which may be more than the head's.
    streams: hidden states of a token; their axis in what layers are given, 0 of [S, 1, T, H] or 2
        of [1, T, S, H].
    layer_input_key, layer_input_rows, layer_input_size: of a second table that is looked up by
        token and has an input of every layer, and the elements of one; none: "" and 0.
    shared_keys: that several layers attend with.
    own_attention: modules compute attention in their own code.
    padding_id: of the token behind which positions stand still (RoBERTa); -1 if there is none.
    """

    class_name: str
    text: str
    layers_path: str
    kinds: tuple[LayerKind, ...]
    layer_kinds: tuple[int, ...]
    embed: Shapes
    head: Shapes
    head_bias: bool
    table_key: str
    head_key: str
    table_rows: int
    streams: int = 1
    streams_axis: int = 0
    layer_input_key: str = ""
    layer_input_rows: int = 0
    layer_input_size: int = 0
    shared_keys: tuple[SharedKeys, ...] = ()
    own_attention: bool = False
    padding_id: int = -1

    @property
    def layer_inputs_size(self) -> int:
        """Elements of a token's inputs of all layers."""
        return len(self.layer_kinds) * self.layer_input_size

    @property
    def shared_size(self) -> int:
        """Elements of a token's keys and values that several layers attend with."""
        return sum(
            shared.heads * (shared.key_dim + shared.value_dim) for shared in self.shared_keys
        )

    def kind(self, layer: int) -> LayerKind:
        """The kind of a layer of the whole model."""
        return self.kinds[self.layer_kinds[layer]]

    def entry_of(self, canonical: str) -> StateDictEntry:
        """Return where the state dict has the tensor with this canonical name."""
        stage, _, name = canonical.partition(".")
        if stage != "layers":
            special = {
                "tokens.weight": self.table_key,
                "lm.weight": self.head_key,
                "lm.bias": self.head_key.removesuffix("weight") + "bias",
                "layer_inputs.weight": self.layer_input_key,
            }
            return StateDictEntry(special.get(name, name))
        number, _, name = name.partition(".")
        prefix = f"{self.layers_path}.{number}."
        if (of_expert := _EXPERT.fullmatch(name)) is None:
            return StateDictEntry(prefix + name)
        (stack,) = (
            stack for stack in self.kind(int(number)).experts if stack.path == of_expert["path"]
        )
        key = f"{prefix}{stack.path}.{of_expert['entry']}"
        return StateDictEntry(key, int(of_expert["number"]), stack.transposed)


# Models of several parts that give placeholders the embedding of another token, even where there is
# no image.
_REPLACE_PLACEHOLDERS = {"gemma4", "gemma4_unified", "granite_speech", "granite_speech_plus"}
_PLACEHOLDER = re.compile("(image|video|audio)_token_(id|index)")
_EXPERT = re.compile(r"(?P<path>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<entry>.+)\.weight")


def expert_name(path: str, expert: int, entry: str) -> str:
    """Return the name within a layer of one expert's matrix:
    'mlp.experts.7.gate_up_proj.weight'.
    """
    return f"{path}.{expert}.{entry}.weight"


# What digests have said of every such model since before it had a record of its own.
_NO_EQUATIONS: Mapping[str, object] = {
    "norm": "rmsnorm", "norm_eps": 0.0, "activation": "silu", "gated_mlp": True, "rope": None,
    "residual": "pre_norm", "norm_affine": True, "final_norm": True, "qkv_bias": False,
    "out_bias": False, "mlp_bias": False, "position_offset": 0, "qk_norm": False,
    "local_rope": None, "alibi": False, "embed_norm": False, "embed_scale": 1.0,
    "norm_plus_one": False, "attn_scale": None, "final_softcap": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(
    ModelConfig,
    name="ModelSpec",
    first_version=FIRST_VERSION,
    later="layers_before layers_after generic=modules chunked",
    constants=_NO_EQUATIONS,
):
    """One model that runs by the modules of `transformers`; `transformers_backend.read_config`
    fills it.
    """

    modules: ModulesConfig

    @property
    def class_name(self) -> str:
        return self.modules.class_name

    @property
    def values_digest(self) -> str:
        from flexgen_helm.models.transformers_backend.code_digest import code_digest

        return code_digest(self.class_name)

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(
            self.modules.kind(self.layers_before + layer) for layer in range(self.num_layers)
        )

    def layer_kind(self, layer: int) -> int:
        return self.modules.layer_kinds[layer]

    def stage_tensors(self, stage: str) -> TensorShapes:
        """Yield names and shapes; what is no matrix is flat."""
        if stage not in (EMBED, HEAD):
            for name, shape in self.modules.kind(int(stage.removeprefix("layers."))).shapes.items():
                yield f"{stage}.{name}", shape
            return
        table = EMBED_TABLE, (self.modules.table_rows, self.embed_size)
        for name, size in self.modules.embed if stage == EMBED else self.modules.head:
            yield f"{stage}.{name}", (prod(size),)
        if stage == EMBED:
            yield table
            if self.modules.layer_input_key:
                yield (
                    LAYER_INPUT_TABLE,
                    (self.modules.layer_input_rows, self.modules.layer_inputs_size),
                )
            return
        if not self.tied_head:
            yield HEAD_MATRIX, (self.vocab_size, self.hidden_size)
        elif not self.has_embedding:
            yield table
        if self.modules.head_bias:
            yield "head.lm.bias", (self.vocab_size,)

    def has_float32(self, name: str) -> bool:
        stage, _, rest = name.partition(".")
        layer, _, name_in_layer = rest.partition(".")
        return stage == "layers" and name_in_layer in self.modules.kind(int(layer)).float32

    @property
    def num_streams(self) -> int:
        return self.modules.streams

    @cached_property
    def refused_ids(self) -> Mapping[int, str]:
        content = json.loads(self.modules.text)
        if str(content.get("model_type")) in _REPLACE_PLACEHOLDERS:
            ids = [
                value
                for name, value in content.items()
                if _PLACEHOLDER.fullmatch(name) and isinstance(value, int)
            ]
            return dict.fromkeys(ids, "stands for an image or a sound")
        return {self.modules.padding_id: "has no position"} if self.modules.padding_id >= 0 else {}

    @property
    def context_end(self) -> str:
        is_sparse = json.loads(self.modules.text).get("index_topk") == self.max_positions
        return ", where its sparse attention begins" if is_sparse else ""

    @cached_property
    def hidden_elements(self) -> int:
        return (
            self.num_streams * self.hidden_size
            + self.modules.layer_inputs_size
            + self.modules.shared_size
        )

    @property
    def key_layers(self) -> tuple[int | None, ...]:
        owners = {
            reader: shared.layer for shared in self.modules.shared_keys for reader in shared.readers
        }
        layers = enumerate(self._kinds, self.layers_before)
        return tuple(owners.get(layer, layer) if kind.attends else None for layer, kind in layers)

    @cached_property
    def layer_states(self) -> tuple[int, ...]:
        return tuple(0 if kind.mixer is None else kind.mixer.elements for kind in self._kinds)

    @cached_property
    def mixer_width(self) -> int:
        return max(
            (kind.mixer.width for kind in self.modules.kinds if kind.mixer is not None), default=0
        )

    @cached_property
    def linear_flops_per_token(self) -> int:
        return 2 * sum(kind.weights_per_token for kind in self._kinds)

    @cached_property
    def expert_elements(self) -> int:
        return next((kind.expert_elements for kind in self.modules.kinds if kind.experts), 0)

    @cached_property
    def widest_ffn(self) -> int:
        return self.ffn_size
