"""Fill the record of a model that runs by the modules of `transformers`."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from torch import nn

from flexgen_helm.errors import FlexgenError, UnsupportedArchitectureError
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.transformers_backend.config import (
    LayerKind,
    ModulesConfig,
    Shapes,
    SharedKeys,
    TransformersConfig,
)
from flexgen_helm.models.transformers_backend.empty_model import class_and_config
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall
from flexgen_helm.models.transformers_backend.layer_kinds import (
    kept_in_float32,
    layer_kind,
    own_tensors,
)
from flexgen_helm.models.transformers_backend.layered_model import LayeredModel
from flexgen_helm.models.transformers_backend.trace import LayerTrace, ModelTrace, trace_layers

UNKNOWN_ATTENTION = "computes attention in a way that is not known here"
_trace_lock = threading.Lock()  # a trace replaces functions of `transformers` meanwhile
# Names of the context length; a model of states alone may have none, and then takes more than any
# request has.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
)
_ANY_LENGTH = 1 << 20


def read_transformers_config(content: Mapping[str, Any]) -> TransformersConfig:
    """Fill the record of a model from its `config.json`.

    Raises `UnsupportedArchitectureError` naming the class and what is not supported of it,
    `ValueError` for entries that its configuration cannot have.
    """
    text = json.dumps(content, sort_keys=True)
    with _trace_lock:
        try:
            return _read(content, text)
        except UnsupportedArchitectureError as error:
            try:
                return _read(content, text, own_attention=True)
            except UnsupportedArchitectureError as in_own_code:
                has_interface = getattr(
                    class_and_config(text)[0], "_supports_attention_backend", False
                )
                # What a class with the interface lacks, or refuses by itself, is the reason; what
                # `transformers` raised is not, where it attends in its own code.
                if has_interface or error.__cause__ is None:
                    raise error from None
                raise in_own_code from None


def _read(content: Mapping[str, Any], text: str, own_attention: bool = False) -> TransformersConfig:
    try:
        model = LayeredModel(text, "meta", own_attention=own_attention)
    except FlexgenError:
        raise
    except Exception as error:  # a configuration class raises whatever its entries lead to
        raise ValueError(f"transformers makes no model of it: {_first_line(error)}") from error
    name = type(model.model).__name__
    try:
        trace = trace_layers(model)
    except Exception as error:  # whatever a module does with shapes that it does not expect
        if isinstance(error, UnsupportedArchitectureError) and name in str(error):
            raise
        what = UNKNOWN_ATTENTION if own_attention else "cannot run layer by layer"
        raise UnsupportedArchitectureError(f"{name} {what}: {_first_line(error)}") from error
    architecture = str(content.get("model_type")).removesuffix("_text")  # of one of several parts
    return _record(model, trace, architecture, text)


def _record(
    model: LayeredModel, trace: ModelTrace, architecture: str, text: str
) -> TransformersConfig:
    name, config = type(model.model).__name__, model.model.config.get_text_config()
    in_float32 = kept_in_float32(model.model)
    kinds = [
        layer_kind(layer, of_layer, name, in_float32)
        for layer, of_layer in zip(model.layers, trace.layers)
    ]
    # Batches wait for experts inside a layer, where `OwnAttention` must not be active.
    if model.own_attention and any(kind.num_experts for kind in kinds):
        raise UnsupportedArchitectureError(f"{name} has experts beside attention in its own code")
    # Whether a layer has neither attention nor a state is said by the configuration (Nemotron-H).
    types = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
    without_mixer = {layer for layer, kind in enumerate(types) if kind in ("mlp", "moe")}
    by_layer = [
        None
        if layer in without_mixer and not of_layer.attention_calls
        else _only_call(of_layer, name)
        for layer, of_layer in enumerate(trace.layers)
    ]
    calls = [call for call in by_layer if call is not None]
    windows = {call.mask.window for call in calls if call.mask.window is not None}
    if len({window.is_chunked for window in windows}) > 1:
        raise UnsupportedArchitectureError(f"{name} has sliding windows and chunks")
    modules = _modules(model, trace, kinds, by_layer, text)
    # The most key heads and the largest group may be of two layers: no layer has more query heads
    # than their product. Without attention, no layer has keys.
    kv_heads = max((call.k.shape[1] for call in calls), default=1)
    group = max((call.q.shape[1] // call.k.shape[1] for call in calls), default=1)
    return TransformersConfig(
        architecture=architecture,
        num_layers=len(kinds),
        hidden_size=config.hidden_size,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=max((call.k.shape[2] for call in calls), default=1),
        ffn_size=max(kind.widest for kind in modules.kinds),
        vocab_size=model.model.get_output_embeddings().out_features,
        max_positions=_max_positions(config) - model.first_position,
        embed_size=model.base.get_input_embeddings().weight.shape[1],
        tied_head=modules.head_key in (model.model.all_tied_weights_keys or {}),
        windows=tuple(
            None if call is None or call.mask.window is None else call.mask.window.tokens
            for call in by_layer
        )
        if windows
        else (),
        chunked=any(window.is_chunked for window in windows),
        attn_softcap=next((call.softcap for call in calls if call.softcap is not None), None),
        experts=_moe(kinds),
        modules=modules,
    )


def _modules(
    model: LayeredModel,
    trace: ModelTrace,
    kinds: list[LayerKind],
    by_layer: list[AttentionCall | None],
    text: str,
) -> ModulesConfig:
    """Describe the modules that compute a model.

    by_layer: calls of attention; None of layers without. text: of its `config.json`.
    """
    name, distinct = type(model.model).__name__, list(dict.fromkeys(kinds))
    table, head = model.base.get_input_embeddings(), model.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedArchitectureError(f"the head of {name} is no linear layer")
    paths = {id(module): path for path, module in model.model.named_modules()}
    inputs: dict[str, Any] = {}
    if (input_table := model.layer_input_table) is not None:
        rows, width = input_table.weight.shape
        inputs = dict(
            layer_input_key=f"{paths[id(input_table)]}.weight",
            layer_input_rows=rows,
            layer_input_size=width // len(kinds),
        )
    shared = tuple(
        SharedKeys(  # k, v: [1, heads, T, D]; those of calls have no first axis
            key, layer, k.shape[1], k.shape[3], v.shape[3],
            tuple(n for n, call in enumerate(by_layer)
                  if n > layer and call is not None and call.key_object is k),
        )
        for layer, of_layer in enumerate(trace.layers)
        for key, (k, v) in of_layer.shared.items()
    )  # fmt: skip
    axis = 2 if len(trace.hidden) == 4 and trace.hidden[0] == 1 else 0
    return ModulesConfig(
        class_name=name,
        text=text,
        layers_path=model.layers_path,
        kinds=tuple(distinct),
        layer_kinds=tuple(distinct.index(kind) for kind in kinds),
        embed=_outside(model, trace.before),
        head=_outside(model, trace.after),
        head_bias=head.bias is not None,
        table_key=f"{paths[id(table)]}.weight",
        head_key=f"{paths[id(head)]}.weight",
        table_rows=table.weight.shape[0],
        streams=trace.hidden[axis] if len(trace.hidden) == 4 else 1,
        streams_axis=axis,
        shared_keys=shared,
        own_attention=model.own_attention,
        padding_id=model.first_position - 1,
        **inputs,
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _only_call(trace: LayerTrace, name: str) -> AttentionCall | None:
    """Return the layer's call of attention; None for one that keeps a state instead of keys and
    values.
    """
    if not trace.attention_calls and trace.mixers:
        return None
    if not trace.attention_calls:
        raise UnsupportedArchitectureError(
            f"{name} has layers that keep states, or attend, in a way of their own, which is not "
            "supported"
        )
    if len(trace.attention_calls) > 1:
        raise UnsupportedArchitectureError(
            f"{name} has layers that need several caches, which is not supported: they call "
            f"attention {len(trace.attention_calls)} times"
        )
    (call,) = trace.attention_calls
    if not call.mask.is_causal:
        raise UnsupportedArchitectureError(
            f"attention of {name} is neither causal nor over a causal window"
        )
    if call.k.shape[0] != call.q.shape[0] or call.q.shape[1] % call.k.shape[1]:
        raise UnsupportedArchitectureError(
            f"attention of {name} has keys of other tokens than its queries"
        )
    return call


def _outside(model: LayeredModel, called: set[int]) -> Shapes:
    """Return the tensors outside the layers whose modules were called, without the table and the
    head's matrix.
    """
    head = model.model.get_output_embeddings()
    tables = model.base.get_input_embeddings(), model.layer_input_table
    return tuple(
        (f"{path}.{name}" if path else name, tuple(tensor.shape))
        for path, module in model.model.named_modules()
        if id(module) in called or module in (model.model, model.base)
        for name, tensor in own_tensors(module).items()
        if not (name == "weight" and module in (*tables, head))
        and not (name == "bias" and module is head)
    )


def _moe(kinds: list[LayerKind]) -> MoEConfig | None:
    kind = next((kind for kind in kinds if kind.num_experts), None)
    if kind is None:
        return None
    (inner, *_) = (
        shape[1]
        for stack in kind.experts
        for entry, shape in stack.matrices
        if entry == "down_proj"
    )
    dense = tuple(layer for layer, its_kind in enumerate(kinds) if not its_kind.num_experts)
    return MoEConfig(kind.num_experts, kind.per_token, inner, dense_layers=dense)


def _max_positions(config: Any) -> int:
    """Return the context length, as far as a token's rotation depends on its position alone.

    LongRoPE and dynamic scaling change the rotation of all tokens beside one that is beyond the
    original context.
    Sparse attention takes all keys as long as there are no more than `index_topk`.
    """
    sizes = (getattr(config, name, None) for name in _POSITIONS)
    longest = next((size for size in sizes if isinstance(size, int) and size > 0), _ANY_LENGTH)
    longest = min(longest, getattr(config, "index_topk", None) or longest)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest
