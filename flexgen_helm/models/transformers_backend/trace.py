"""Find out what the layers of a model are made of, by passing shapes without data through its modules once."""

from __future__ import annotations

import json
import re
import threading
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flexgen_helm.errors import FlexgenError, UnsupportedArchitectureError
from flexgen_helm.models.config import ModelConfig, MoEConfig
from flexgen_helm.models.transformers_backend.config import (
    ExpertTensors,
    LayerKind,
    Mixer,
    ModulesConfig,
    SequenceState,
    Shapes,
    SharedKeys,
)
from flexgen_helm.models.transformers_backend.empty_model import OWN_ATTENTION
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall, ExpertsCall, Mask, is_plain, is_traced
from flexgen_helm.models.transformers_backend.layered_model import (
    LayerArguments,
    LayeredModel,
    PastOfTokens,
    cache_names,
    own_tensors,
    parameter_names,
)
from flexgen_helm.models.transformers_backend.recurrent import StateCache

# Tokens of the traced pass.
_TOKENS = 3
# Tensors that layers are given, each a function of a token's position alone.
_KNOWN_TENSORS = {"position_embeddings", "position_ids", "attention_scaling"}
# What modules of experts may have, and `TransformersDecoder` reads.
_EXPERT_TENSORS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
_EXPERT_SETTINGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_concatenated", "is_transposed", "training"}


@dataclass
class _LayerTrace:
    """What a layer did.

    linears: paths of the linear modules that were called, in order.
    calls: of attention.
    experts: calls of experts, by the path of their module.
    shared: keys and values that it leaves to later layers, by name.
    inputs, outputs: the first tensor that each module was given, and what it returned, by path.
    before_experts: linear modules that had been called when experts were.
    active: modules whose call has begun and not ended, outermost first.
    mixers: modules that asked for a state.
    states: what they kept.
    uncached: modules that can be given a cache, and were not.
    one_by_one: several tokens at once do not go on from every state.
    """

    linears: list[str] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    experts: dict[str, ExpertsCall] = field(default_factory=dict)
    shared: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    before_experts: list[str] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    mixers: set[str] = field(default_factory=set)
    states: list[SequenceState] = field(default_factory=list)
    uncached: set[str] = field(default_factory=set)
    one_by_one: bool = False

    def note_state(self) -> None:
        self.mixers.add(self.active[-1])


_one_at_a_time = threading.Lock()  # a trace replaces a function of `transformers` meanwhile


def read_transformers_config(content: Mapping[str, Any]) -> ModelConfig:
    """Fill the record of a model from its `config.json`.

    Raises `UnsupportedArchitectureError` naming the class and what is not supported of it, `ValueError` for entries
    that its configuration cannot have.
    """
    text = json.dumps(content, sort_keys=True)
    with _one_at_a_time:
        return _read(content, text)


def _read(content: Mapping[str, Any], text: str) -> ModelConfig:
    try:
        model = LayeredModel(text, "meta")
    except FlexgenError:
        raise
    except Exception as error:  # a configuration class raises whatever its entries lead to
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"transformers makes no model of it: {reason}") from error
    name, config = type(model.model).__name__, model.model.config.get_text_config()
    try:
        layers, before, after, streams = _run(model)
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # whatever a module does with shapes that it does not expect
        if not getattr(type(model.model), "_supports_attention_backend", False):
            raise UnsupportedArchitectureError(f"{name} {OWN_ATTENTION}") from error
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise UnsupportedArchitectureError(f"{name} cannot run layer by layer: {reason}") from error
    in_float32 = _kept_in_float32(model.model)
    kinds = [_kind(layer, trace, name, in_float32) for layer, trace in zip(model.layers, layers)]
    distinct = list(dict.fromkeys(kinds))
    by_layer = [
        None if _is_feed_forward(config, layer) and not trace.calls else _only_call(trace, name)
        for layer, trace in enumerate(layers)
    ]
    calls = [call for call in by_layer if call is not None]
    if not calls:
        raise UnsupportedArchitectureError(f"{name} {OWN_ATTENTION}")
    heads = max(call.q.shape[1] // call.k.shape[1] for call in calls) * max(call.k.shape[1] for call in calls)
    table, head = model.base.get_input_embeddings(), model.model.get_output_embeddings()
    inputs = model.layer_input_table
    if type(head) is not nn.Linear:
        raise UnsupportedArchitectureError(f"the head of {name} is no linear layer")
    keys = {id(module): path for path, module in model.model.named_modules()}
    modules = ModulesConfig(
        class_name=name,
        text=text,
        layers_path=model.layers_path,
        kinds=tuple(distinct),
        layer_kinds=tuple(distinct.index(kind) for kind in kinds),
        embed=_outside(model, before),
        head=_outside(model, after),
        head_bias=head.bias is not None,
        table_key=f"{keys[id(table)]}.weight",
        head_key=f"{keys[id(head)]}.weight",
        table_rows=table.weight.shape[0],
        streams=streams,
        layer_input_key="" if inputs is None else f"{keys[id(inputs)]}.weight",
        layer_input_rows=0 if inputs is None else inputs.weight.shape[0],
        layer_input_size=0 if inputs is None else inputs.weight.shape[1] // len(layers),
        shared_keys=tuple(
            SharedKeys(
                own_name,
                layer,
                k.shape[1],
                k.shape[3],
                v.shape[3],
                tuple(n for n, other in enumerate(by_layer) if n > layer and other is not None and other.key is k),
            )
            for layer, trace in enumerate(layers)
            for own_name, (k, v) in trace.shared.items()
        ),
    )
    experts = next((kind for kind in distinct if kind.num_experts), None)
    return ModelConfig(
        architecture=str(content.get("model_type")).removesuffix("_text"),  # of one of several parts
        num_layers=len(kinds),
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=max(call.k.shape[1] for call in calls),
        head_dim=max(call.k.shape[2] for call in calls),
        ffn_size=max(kind.widest for kind in distinct),
        vocab_size=head.out_features,
        max_positions=_max_positions(config, model.base),
        embed_size=table.weight.shape[1],
        norm="rmsnorm",
        norm_eps=0.0,
        activation="silu",
        gated_mlp=True,
        rope=None,
        tied_head=_is_tied(model.model),
        windows=_windows(by_layer, name),
        chunked=any(call.mask.window is not None and call.mask.window.is_chunked for call in calls),
        attn_softcap=next((call.softcap for call in calls if call.softcap is not None), None),
        experts=None if experts is None else _moe(kinds, experts),
        modules=modules,
    )


def _run(model: LayeredModel) -> tuple[list[_LayerTrace], set[int], set[int], int]:
    """Pass shapes through the model; return what each layer did, the modules outside that were called, and the number
    of streams.
    """
    layers: list[_LayerTrace] = []

    def attend(call: AttentionCall) -> Tensor:
        layers[-1].calls.append(call)
        return call.q.new_empty((*call.q.shape[:2], call.v.shape[2]))

    def run_experts(call: ExpertsCall) -> Tensor:
        layers[-1].experts[paths[id(call.module)]] = call
        layers[-1].before_experts = list(layers[-1].linears)
        return torch.empty_like(call.x)

    ids = torch.zeros((1, _TOKENS), dtype=torch.long, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    paths: dict[int, str] = {}
    with torch.no_grad(), model.bound(attend, run_experts), _one_sequence():
        _require_no_tokens_in_arguments(model, positions)
        with _called(model.model) as before:
            hidden, arguments = model.before({"input_ids": ids, "position_ids": positions})
        arguments_of_one = model.before({"input_ids": ids[:, :1], "position_ids": positions[:, :1]})[1]
        for index, layer in enumerate(model.layers):
            trace = _LayerTrace()
            layers.append(trace)
            paths = {id(module): path for path, module in layer.named_modules()}
            _require_known_arguments(model, layer, arguments[index])
            before_it = dict(arguments[index].shared_keys)
            cache = StateCache(positions, trace.note_state)
            with _noted(layer, trace):
                out = model.layer(index, hidden, arguments[index].with_past(cache))
            trace.states = [state for state, _ in cache.found()]
            _require_cache(trace, type(model.model).__name__)
            if trace.states:
                layers.append(_LayerTrace())  # what these trials do is not of interest
                trace.one_by_one = _drops_states(model, index, trace.states, hidden, arguments[index])
                if _drops_states(model, index, trace.states, hidden[..., :1, :], arguments_of_one[index]):
                    raise UnsupportedArchitectureError(
                        f"{type(model.model).__name__} does not go on from the states that its layers keep"
                    )
                layers.pop()
            shared = arguments[index].shared_keys
            trace.shared = {name: own for name, own in shared.items() if own is not before_it.get(name)}
            if trace.shared.keys() & before_it:
                raise UnsupportedArchitectureError(f"{type(model.model).__name__} replaces keys that layers share")
            if out.shape != hidden.shape:
                raise UnsupportedArchitectureError(
                    f"the layers of {type(model.model).__name__} change the shape of the hidden states"
                )
            hidden = out
        with _called(model.model) as after:
            model.after(hidden, positions)
    return layers, before, after, hidden.shape[0] if hidden.dim() == 4 else 1


def _require_known_arguments(model: LayeredModel, layer: nn.Module, arguments: LayerArguments) -> None:
    """Raise if a layer is given a tensor or an object of which nothing is known here."""
    positional = zip(parameter_names(layer)[1:], arguments.positional)
    inputs = None if model.layer_input_table is None else arguments.layer_input
    for name, own in (*positional, *arguments.named.items()):
        if isinstance(own, (PastOfTokens, UserDict)) or own is inputs:
            continue
        values = list(_flat(own))
        tensors = name in _KNOWN_TENSORS and all(isinstance(value, Tensor) for value in values)
        if not tensors and not all(is_plain(value) or isinstance(value, Mask) for value in values):
            kind = next(type(value).__name__ for value in values if not is_plain(value))
            raise UnsupportedArchitectureError(
                f"{type(model.model).__name__} passes its layers {name} ({kind}), of which nothing is known here"
            )


def _require_cache(trace: _LayerTrace, name: str) -> None:
    """Raise if a module that can be given a cache has not been given the stand-in, by whatever name."""
    if trace.uncached:
        modules = ", ".join(sorted(path or "the layer" for path in trace.uncached))
        raise UnsupportedArchitectureError(f"{name} does not pass its cache on to {modules}")


def _drops_states(
    model: LayeredModel,
    index: int,
    states: list[SequenceState],
    hidden: Tensor,
    arguments: LayerArguments,
) -> bool:
    """Whether what a layer returns depends not on all states before; gradients say what it depends on."""
    for number in range(len(states)):
        values = [torch.zeros((1, *state.shape), device="meta") for state in states]
        values[number].requires_grad_()
        cache = StateCache(torch.zeros((1, 1), dtype=torch.long, device="meta"))
        with torch.enable_grad():
            cache.begin(states, values, hidden.dtype)
            if not model.layer(index, hidden, arguments.with_past(cache)).requires_grad:
                return True
    return False


def _require_no_tokens_in_arguments(model: LayeredModel, positions: Tensor) -> None:
    """Raise if the model passes its layers what depends on tokens, besides hidden states and their own inputs.

    Such arguments are made again from positions alone (`TransformersDecoder.rotary`).
    """
    width = model.base.get_input_embeddings().weight.shape[1]
    with torch.enable_grad():
        embeds = 1 * torch.zeros((1, _TOKENS, width), device="meta", requires_grad=True)
        _, arguments = model.before({"inputs_embeds": embeds, "position_ids": positions})
    has_inputs = model.layer_input_table is not None
    for own in arguments:
        values = [value for value in _flat((own.positional, own.named)) if isinstance(value, Tensor)]
        if any(value.requires_grad and not (has_inputs and value is own.layer_input) for value in values):
            raise UnsupportedArchitectureError(
                f"{type(model.model).__name__} passes its layers more that depends on tokens than hidden states"
            )


def _flat(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists and mappings have inside."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        yield value
        return
    for inner in value:
        yield from _flat(inner)


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Look at masks, for which `transformers` must not search several sequences in positions without values."""
    from transformers import masking_utils

    search, overlay = masking_utils.find_packed_sequence_indices, masking_utils.chunked_overlay
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # Chunks are counted from behind the padding, of which there is none.
    masking_utils.chunked_overlay = lambda chunk_size, left_padding: overlay(
        chunk_size, torch.zeros(left_padding.shape, dtype=torch.long)
    )
    token = is_traced.set(True)
    try:
        yield
    finally:
        is_traced.reset(token)
        masking_utils.find_packed_sequence_indices, masking_utils.chunked_overlay = search, overlay


@contextmanager
def _called(model: nn.Module) -> Iterator[set[int]]:
    """Collect the modules that are called."""
    called: set[int] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, arguments: called.add(id(module))) for module in model.modules()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _noted(layer: nn.Module, trace: _LayerTrace) -> Iterator[None]:
    """Collect the paths of linear modules in the order of their calls, and what passes between modules."""

    def before(path: str, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        trace.active.append(path)
        given = {**dict(zip(parameter_names(module), positional)), **named}
        if any(not isinstance(given[name], PastOfTokens) for name in cache_names(module) & given.keys()):
            trace.uncached.add(path)
        trace.inputs[path] = next(iter((*positional, *named.values())), None)
        if is_linear(module):
            trace.linears.append(path)

    def after(path: str, module: nn.Module, arguments: tuple[Any, ...], returned: Any) -> None:
        trace.active.pop()
        trace.outputs[path] = returned

    hooks = []
    for path, module in layer.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(after, path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_linear(module: nn.Module) -> bool:
    """Whether a module does what `nn.Linear` does, whatever its class adds."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _kept_in_float32(model: Any) -> re.Pattern[str]:
    """Return what finds the names of tensors that `transformers` keeps in float32 in any model of 16 bits."""
    names = sorted(model._keep_in_fp32_modules_strict or ())
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")


def _kind(layer: nn.Module, trace: _LayerTrace, name: str, in_float32: re.Pattern[str]) -> LayerKind:
    mixer = _mixer(trace, name)
    streamed = [
        path
        for path in trace.linears
        if trace.linears.count(path) == 1
        and not in_float32.search(f"{path}.weight")
        and (mixer is None or not path.startswith(f"{mixer.path}.") or path in (*mixer.inputs, mixer.output))
    ]
    modules = dict(layer.named_modules())
    experts = tuple(_expert_tensors(path, call, name) for path, call in trace.experts.items())
    stacked = {f"{own.path}.{entry}" for own in experts for entry, _ in own.matrices}
    matrices: Shapes = tuple((f"{path}.weight", tuple(modules[path].weight.shape)) for path in streamed)
    taken = {f"{path}.weight" for path in streamed} | stacked
    others: Shapes = tuple(
        (path, tuple(tensor.shape))
        for owner, module in modules.items()
        for path, tensor in ((f"{owner}.{own}" if owner else own, t) for own, t in own_tensors(module).items())
        if path not in taken
    )
    calls = list(trace.experts.values())
    count = calls[0].module.num_experts if calls else 0
    per_token = calls[0].selected.shape[1] if calls else 0
    kept = tuple(path for path, _ in others if in_float32.search(path))
    router, norm = _router(trace, [own.path for own in experts])
    return LayerKind(matrices, others, experts, count, per_token, kept, router, norm, mixer, bool(trace.calls))


def _mixer(trace: _LayerTrace, name: str) -> Mixer | None:
    """Return the module of a layer that keeps a state."""
    if not trace.mixers:
        return None
    if len(trace.mixers) > 1:
        raise UnsupportedArchitectureError(f"{name} has layers in which several modules keep a state")
    (path,) = trace.mixers
    given, returned = trace.inputs[path], trace.outputs[path]
    returned = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(returned, Tensor) or returned.shape[:-1] != given.shape[:-1]:
        raise UnsupportedArchitectureError(f"{name} has states in a module that returns more than hidden states")
    own = [other for other in trace.linears if other.startswith(f"{path}.") and trace.linears.count(other) == 1]
    inputs = tuple(other for other in own if trace.inputs[other] is given)
    output = next((other for other in own if trace.outputs[other] is returned), "")
    width = sum(trace.outputs[other].shape[-1] for other in inputs) or given.shape[-1]
    return Mixer(path, tuple(trace.states), inputs, output, width, trace.one_by_one)


def _router(trace: _LayerTrace, experts: list[str]) -> tuple[str, str]:
    """Return the module around the experts, and the one whose result it is given.

    "" twice if they are not found, or if the module computes more than a selection before, such as a shared expert.
    """
    if len(experts) != 1:
        return "", ""
    block = experts[0].rpartition(".")[0]
    given = trace.inputs.get(block)
    norm = next((path for path, returned in trace.outputs.items() if returned is given), "")
    num_linears = sum(path.startswith(f"{block}.") for path in trace.before_experts)
    return (block, norm) if block and norm and given is not None and num_linears < 2 else ("", "")


def _expert_tensors(path: str, call: ExpertsCall, name: str) -> ExpertTensors:
    module = call.module
    if not f".{path}".endswith(".experts"):
        raise UnsupportedArchitectureError(f"the experts of {name} are in a module {path}, not experts")
    settings = {own for own, value in module.__dict__.items() if own.startswith(("has_", "is_")) and value}
    tensors = {own for own, _ in module.named_parameters(recurse=False)}
    if unknown := (settings - _EXPERT_SETTINGS) | (tensors - _EXPERT_TENSORS):
        raise UnsupportedArchitectureError(f"the experts of {name} have {min(unknown)}, of which nothing is known here")
    stacked = {entry: weight.shape for entry, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    matrices = tuple(
        (entry, (shape[2], shape[1]) if module.is_transposed else (shape[1], shape[2]))
        for entry, shape in stacked.items()
    )
    return ExpertTensors(path, matrices, bool(module.is_transposed))


def _is_feed_forward(config: Any, layer: int) -> bool:
    """Whether the configuration says that a layer has neither attention nor a state (Nemotron-H)."""
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
    return layer < len(kinds) and kinds[layer] in ("mlp", "moe")


def _only_call(trace: _LayerTrace, name: str) -> AttentionCall | None:
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
