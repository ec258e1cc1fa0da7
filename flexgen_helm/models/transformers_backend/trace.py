"""Pass shapes without data through the modules of a model once, and note what its layers do."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.config import ExpertTensors, LayerKind, Mixer, SequenceState, Shapes
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


@dataclass
class LayerTrace:
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


def trace_layers(model: LayeredModel) -> tuple[list[LayerTrace], set[int], set[int], int]:
    """Pass shapes through the model; return what each layer did, the modules outside that were called, and the number
    of streams.
    """
    layers: list[LayerTrace] = []

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
            trace = LayerTrace()
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
                layers.append(LayerTrace())  # what these trials do is not of interest
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


def _require_cache(trace: LayerTrace, name: str) -> None:
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
def _noted(layer: nn.Module, trace: LayerTrace) -> Iterator[None]:
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


# What a traced layer is made of: its matrices, what rests beside them, experts, and the module that keeps a state.

# What modules of experts may have, and `TransformersDecoder` reads.
_EXPERT_TENSORS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
_EXPERT_SETTINGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_concatenated", "is_transposed", "training"}


def kept_in_float32(model: Any) -> re.Pattern[str]:
    """Return what finds the names of tensors that `transformers` keeps in float32 in any model of 16 bits."""
    names = sorted(model._keep_in_fp32_modules_strict or ())
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")


def layer_kind(layer: nn.Module, trace: LayerTrace, name: str, in_float32: re.Pattern[str]) -> LayerKind:
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


def _mixer(trace: LayerTrace, name: str) -> Mixer | None:
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


def _router(trace: LayerTrace, experts: list[str]) -> tuple[str, str]:
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
