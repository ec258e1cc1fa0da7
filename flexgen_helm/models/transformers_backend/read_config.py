"""Fill the record of a model that runs by the modules of `transformers`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
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
from flexgen_helm.models.transformers_backend.empty_model import OWN_ATTENTION
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall
from flexgen_helm.models.transformers_backend.layered_model import LayeredModel, own_tensors
from flexgen_helm.models.transformers_backend.trace import LayerTrace, kept_in_float32, layer_kind, trace_layers

_one_at_a_time = threading.Lock()  # a trace replaces a function of `transformers` meanwhile


def read_transformers_config(content: Mapping[str, Any]) -> TransformersConfig:
    """Fill the record of a model from its `config.json`.

    Raises `UnsupportedArchitectureError` naming the class and what is not supported of it, `ValueError` for entries
    that its configuration cannot have.
    """
    text = json.dumps(content, sort_keys=True)
    with _one_at_a_time:
        return _read(content, text)


def _read(content: Mapping[str, Any], text: str) -> TransformersConfig:
    model = _empty_model(text)
    name, config = type(model.model).__name__, model.model.config.get_text_config()
    layers, before, after, streams = _traced(model, name)
    in_float32 = kept_in_float32(model.model)
    kinds = [layer_kind(layer, trace, name, in_float32) for layer, trace in zip(model.layers, layers)]
    distinct = list(dict.fromkeys(kinds))
    by_layer = [
        None if _is_feed_forward(config, layer) and not trace.calls else _only_call(trace, name)
        for layer, trace in enumerate(layers)
    ]
    calls = [call for call in by_layer if call is not None]
    if not calls:
        raise UnsupportedArchitectureError(f"{name} {OWN_ATTENTION}")
    table, head = model.base.get_input_embeddings(), model.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedArchitectureError(f"the head of {name} is no linear layer")
    modules = ModulesConfig(
        class_name=name,
        text=text,
        layers_path=model.layers_path,
        kinds=tuple(distinct),
        layer_kinds=tuple(distinct.index(kind) for kind in kinds),
        embed=_outside(model, before),
        head=_outside(model, after),
        head_bias=head.bias is not None,
        table_key=_weight_key(model, table),
        head_key=_weight_key(model, head),
        table_rows=table.weight.shape[0],
        streams=streams,
        shared_keys=tuple(_shared_keys(layers, by_layer)),
        **_layer_inputs(model, len(layers)),
    )
    kv_heads = max(call.k.shape[1] for call in calls)
    experts = next((kind for kind in distinct if kind.num_experts), None)
    return TransformersConfig(
        architecture=str(content.get("model_type")).removesuffix("_text"),  # of one of several parts
        num_layers=len(kinds),
        hidden_size=config.hidden_size,
        num_heads=max(call.q.shape[1] // call.k.shape[1] for call in calls) * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=max(call.k.shape[2] for call in calls),
        ffn_size=max(kind.widest for kind in distinct),
        vocab_size=head.out_features,
        max_positions=_max_positions(config, model.base),
        embed_size=table.weight.shape[1],
        tied_head=_is_tied(model.model),
        windows=_windows(by_layer, name),
        chunked=any(call.mask.window is not None and call.mask.window.is_chunked for call in calls),
        attn_softcap=next((call.softcap for call in calls if call.softcap is not None), None),
        experts=None if experts is None else _moe(kinds, experts),
        modules=modules,
    )


def _empty_model(text: str) -> LayeredModel:
    """Make a model without weights. Raises `ValueError` for entries that its configuration cannot have."""
    try:
        return LayeredModel(text, "meta")
    except FlexgenError:
        raise
    except Exception as error:  # a configuration class raises whatever its entries lead to
        raise ValueError(f"transformers makes no model of it: {_first_line(error)}") from error


def _traced(model: LayeredModel, name: str) -> tuple[list[LayerTrace], set[int], set[int], int]:
    """Trace the layers. Raises `UnsupportedArchitectureError` where they do not run one by one."""
    try:
        return trace_layers(model)
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # whatever a module does with shapes that it does not expect
        if not getattr(type(model.model), "_supports_attention_backend", False):
            raise UnsupportedArchitectureError(f"{name} {OWN_ATTENTION}") from error
        raise UnsupportedArchitectureError(f"{name} cannot run layer by layer: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _weight_key(model: LayeredModel, module: nn.Module) -> str:
    """Return the name of a module's weight."""
    return next(f"{path}.weight" for path, other in model.model.named_modules() if other is module)


def _layer_inputs(model: LayeredModel, num_layers: int) -> dict[str, Any]:
    """Return the fields that describe a table with a row of its own for each layer; none without such a table."""
    table = model.layer_input_table
    if table is None:
        return {}
    rows, width = table.weight.shape
    return {
        "layer_input_key": _weight_key(model, table),
        "layer_input_rows": rows,
        "layer_input_size": width // num_layers,
    }


def _shared_keys(layers: list[LayerTrace], by_layer: list[AttentionCall | None]) -> Iterator[SharedKeys]:
    """Yield the keys and values that layers give to later ones."""
    for layer, trace in enumerate(layers):
        for own_name, (k, v) in trace.shared.items():
            users = [n for n, call in enumerate(by_layer) if n > layer and call is not None and call.key is k]
            yield SharedKeys(own_name, layer, k.shape[1], k.shape[3], v.shape[3], tuple(users))


def _is_feed_forward(config: Any, layer: int) -> bool:
    """Whether the configuration says that a layer has neither attention nor a state (Nemotron-H)."""
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
    return layer < len(kinds) and kinds[layer] in ("mlp", "moe")


def _only_call(trace: LayerTrace, name: str) -> AttentionCall | None:
    """Return the layer's call of attention; None for one that keeps a state instead of keys and values."""
    if not trace.calls and trace.mixers:
        return None
    if len(trace.calls) != 1:
        raise UnsupportedArchitectureError(
            f"{name} has layers that call attention {len(trace.calls)} times through transformers' attention "
            "interface; layers with several caches, or with attention of their own, are not supported"
        )
    (call,) = trace.calls
    if not call.mask.is_causal:
        raise UnsupportedArchitectureError(f"attention of {name} is neither causal nor over a causal window")
    if call.k.shape[0] != call.q.shape[0] or call.q.shape[1] % call.k.shape[1]:
        raise UnsupportedArchitectureError(f"attention of {name} has keys of other tokens than its queries")
    return call


def _outside(model: LayeredModel, called: set[int]) -> Shapes:
    """Return the tensors outside the layers whose modules were called, without the table and the head's matrix."""
    head = model.model.get_output_embeddings()
    tables = model.base.get_input_embeddings(), model.layer_input_table
    own = [
        (f"{path}.{name}" if path else name, tuple(tensor.shape))
        for path, module in model.model.named_modules()
        if id(module) in called or module in (model.model, model.base)
        for name, tensor in own_tensors(module).items()
        if not (name == "weight" and module in (*tables, head)) and not (name == "bias" and module is head)
    ]
    return tuple(own)


def _windows(calls: list[AttentionCall | None], name: str) -> tuple[int | None, ...]:
    by_layer = [None if call is None else call.mask.window for call in calls]
    windows = set(by_layer) - {None}
    if len({window.is_chunked for window in windows if window is not None}) > 1:
        raise UnsupportedArchitectureError(f"{name} has sliding windows and chunks")
    return tuple(None if window is None else window.tokens for window in by_layer) if windows else ()


def _moe(kinds: list[LayerKind], kind: LayerKind) -> MoEConfig:
    (inner, *_) = (shape[1] for own in kind.experts for entry, shape in own.matrices if "down" in entry)
    dense = tuple(layer for layer, other in enumerate(kinds) if not other.num_experts)
    return MoEConfig(kind.num_experts, kind.per_token, inner, dense_layers=dense)


def _is_tied(model: Any) -> bool:
    return any("lm_head" in key or "embed_out" in key for key in (model.all_tied_weights_keys or {}))


def _max_positions(config: Any, base: nn.Module) -> int:
    """Return the context length, as far as a token's rotation depends on its own position alone.

    RoBERTa's relatives have as many rows in their table of positions, and use those behind the padding's alone:

        rows   0 .. padding_idx | padding_idx + 1 .. max_position_embeddings - 1
                                  position 0

    LongRoPE and dynamic scaling change the rotation of all tokens beside one that is beyond the original context.
    """
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
    sizes = (getattr(config, name, None) for name in names)
    longest = next((size for size in sizes if isinstance(size, int) and size > 0), 1 << 20)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    embeddings: Any = getattr(base, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        longest -= embeddings.padding_idx + 1
    return longest
