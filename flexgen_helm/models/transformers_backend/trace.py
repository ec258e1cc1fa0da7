"""Pass shapes without data through the modules of a model once, and note what its layers do."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.config import (
    ExpertTensors,
    LayerKind,
    Mixer,
    SequenceState,
    Shapes,
)
from flexgen_helm.models.transformers_backend.interfaces import (
    AttentionCall,
    ExpertsCall,
    Mask,
    is_plain,
    is_traced,
)
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

    order: paths of the modules that were called, in order.
    inputs, outputs: the first tensor that each module was given, and what it returned, by path.
    calls: of attention.
    experts: calls of experts, by the path of their module.
    shared: keys and values that it leaves to later layers, by name.
    mixers: modules that asked for a state; states: what they kept.
    one_by_one: passes of one token alone go on from its states; several tokens at once would ignore
        one.
    """

    order: list[str] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)
    experts: dict[str, ExpertsCall] = field(default_factory=dict)
    shared: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mixers: set[str] = field(default_factory=set)
    states: list[SequenceState] = field(default_factory=list)
    one_by_one: bool = False


@dataclass(frozen=True)
class ModelTrace:
    """before, after: identities of the modules outside the layers that were called. hidden: shape
    of hidden states.
    """

    layers: list[LayerTrace]
    before: set[int]
    after: set[int]
    hidden: tuple[int, ...]


def trace_layers(model: LayeredModel) -> ModelTrace:
    """Pass shapes through the model."""
    name, layers = type(model.model).__name__, [LayerTrace() for _ in model.layers]
    ids = torch.zeros((1, _TOKENS), dtype=torch.long, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    trace, before, after = LayerTrace(), set[int](), set[int]()

    def attend(call: AttentionCall) -> Tensor:
        trace.calls.append(call)
        return call.q.new_empty((*call.q.shape[:2], call.v.shape[2]))

    def run_experts(call: ExpertsCall) -> Tensor:
        trace.experts[call.path] = call
        trace.order.append(call.path)
        return torch.empty_like(call.x)

    with torch.no_grad(), model.bound(attend, run_experts), _one_sequence():
        _require_no_tokens_in_arguments(model, positions)
        with register_module_forward_pre_hook(lambda module, given: before.add(id(module))):
            hidden, arguments = model.before({"input_ids": ids, "position_ids": positions})
        arguments_of_one = model.before(
            {"input_ids": ids[:, :1], "position_ids": positions[:, :1]}
        )[1]
        for index, layer in enumerate(model.layers):
            trace, given = layers[index], arguments[index]
            _require_known_arguments(model, layer, given)
            shared_before = dict(given.shared_keys)
            with _noted(layer, trace, name) as note_state:
                cache = StateCache(positions, note_state)
                out = model.layer(index, hidden, given.with_past(cache))
            trace.states = states = [state for state, _ in cache.found()]
            trace.shared = {
                key: pair
                for key, pair in given.shared_keys.items()
                if pair is not shared_before.get(key)
            }
            if states:
                # `attend` and `run_experts` write to `trace`: of the trials to one that nobody
                # reads.
                trace = LayerTrace()
                layers[index].one_by_one = _ignores_a_state(model, index, states, hidden, given)
                if _ignores_a_state(
                    model, index, states, hidden[..., :1, :], arguments_of_one[index]
                ):
                    raise UnsupportedArchitectureError(
                        f"{name} does not go on from the states that its layers keep"
                    )
            if layers[index].shared.keys() & shared_before:
                raise UnsupportedArchitectureError(f"{name} replaces keys that layers share")
            if out.shape != hidden.shape:
                raise UnsupportedArchitectureError(
                    f"the layers of {name} change the shape of the hidden states"
                )
            hidden = out
        with register_module_forward_pre_hook(lambda module, given: after.add(id(module))):
            model.after(hidden, positions)
    return ModelTrace(layers, before, after, tuple(hidden.shape))


def _require_known_arguments(
    model: LayeredModel, layer: nn.Module, arguments: LayerArguments
) -> None:
    """Raise if a layer is given a tensor or an object of which nothing is known here."""
    names = parameter_names(layer)[1:]
    names += ["another tensor"] * (len(arguments.positional) - len(names))
    positional = zip(names, arguments.positional)
    inputs = None if model.layer_input_table is None else arguments.layer_input
    for name, value in (*positional, *arguments.named.items()):
        if isinstance(value, (PastOfTokens, UserDict)) or value is inputs:
            continue
        parts = tree_leaves(value)
        unknown = [part for part in parts if not is_plain(part) and not isinstance(part, Mask)]
        if unknown and not (
            name in _KNOWN_TENSORS and all(isinstance(part, Tensor) for part in parts)
        ):
            raise UnsupportedArchitectureError(
                f"{type(model.model).__name__} passes its layers {name} "
                f"({type(unknown[0]).__name__}), of which nothing is known here"
            )


def _ignores_a_state(
    model: LayeredModel,
    index: int,
    states: list[SequenceState],
    hidden: Tensor,
    arguments: LayerArguments,
) -> bool:
    """Whether a layer's output does not depend on one of the states before; gradients say what it
    depends on.
    """
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
    """Raise if the model passes its layers what depends on tokens, besides hidden states and their
    own inputs.

    Such arguments are made again from positions alone (`TransformersDecoder.rotary`).
    """
    width = model.base.get_input_embeddings().weight.shape[1]
    with torch.enable_grad():
        embeds = 1 * torch.zeros((1, _TOKENS, width), device="meta", requires_grad=True)
        _, arguments = model.before({"inputs_embeds": embeds, "position_ids": positions})
    has_inputs = model.layer_input_table is not None
    for given in arguments:
        values = [
            value
            for value in tree_leaves((given.positional, dict(given.named)))
            if isinstance(value, Tensor)
        ]
        if any(
            value.requires_grad and not (has_inputs and value is given.layer_input)
            for value in values
        ):
            raise UnsupportedArchitectureError(
                f"{type(model.model).__name__} passes its layers more that depends on tokens than "
                "hidden states"
            )


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Look at masks, for which `transformers` must not search several sequences in positions
    without values.
    """
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
def _noted(layer: nn.Module, trace: LayerTrace, name: str) -> Iterator[Callable[[], None]]:
    """Note the modules of a layer that are called, and what passes between them.

    Yields what notes that the innermost module has asked for a state. Raises
    `UnsupportedArchitectureError` if one that can be given a cache has not been given the stand-in,
    by whatever name.
    """
    active: list[str] = []  # modules whose call has begun and not ended, outermost first

    def before(
        path: str, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        active.append(path)
        given = {**dict(zip(parameter_names(module), positional)), **named}
        if any(
            not isinstance(given[cache], PastOfTokens)
            for cache in cache_names(module) & given.keys()
        ):
            raise UnsupportedArchitectureError(
                f"{name} does not pass its cache on to {path or 'the layer'}"
            )
        trace.inputs[path] = next(iter((*positional, *named.values())), None)
        trace.order.append(path)

    def after(path: str, module: nn.Module, arguments: tuple[Any, ...], returned: Any) -> None:
        active.pop()
        trace.outputs[path] = returned

    def note_state() -> None:
        trace.mixers.add(active[-1])

    with ExitStack() as hooks:
        for path, module in layer.named_modules():
            hooks.callback(
                module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove
            )
            hooks.callback(module.register_forward_hook(partial(after, path)).remove)
        yield note_state


def is_linear(module: nn.Module) -> bool:
    """Whether a module does what `nn.Linear` does, whatever its class adds."""
    return isinstance(module, nn.Linear) and _multiplies(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _multiplies(linear_class: type[nn.Linear]) -> bool:
    """Whether a class multiplies by its weight and adds its bias, tried where it has a forward pass
    of its own.
    """
    if linear_class.forward is nn.Linear.forward:
        return True
    with (
        suppress(Exception),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
    ):  # whatever it is made with, or needs to run
        x, trial = torch.randn(4, 2), linear_class(2, 3)
        return torch.allclose(
            trial(x), nn.functional.linear(x, trial.weight, trial.bias), atol=1e-6
        )
    return False


# What modules of experts may have, and `TransformersDecoder` reads.
_EXPERT_TENSORS = {
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
}
_EXPERT_SETTINGS = {
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_concatenated",
    "is_transposed",
    "training",
}


def kept_in_float32(model: Any) -> re.Pattern[str]:
    """Return what finds the names of tensors that `transformers` keeps in float32 in any model of
    16 bits.
    """
    names = sorted(model._keep_in_fp32_modules_strict or ())
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")


def layer_kind(
    layer: nn.Module, trace: LayerTrace, name: str, in_float32: re.Pattern[str]
) -> LayerKind:
    """Describe a traced layer: its matrices, the tensors that stay beside them, its experts, and
    its states.

    name: of the model's class.
    in_float32: finds the names of tensors that are kept in float32.
    """
    modules = dict(layer.named_modules())
    linears = [path for path in trace.order if is_linear(modules[path])]
    once = [path for path in linears if linears.count(path) == 1]
    mixer = _mixer(trace, once, name)
    streamed = [
        path
        for path in once
        if not in_float32.search(f"{path}.weight")
        and (
            mixer is None
            or not path.startswith(f"{mixer.path}.")
            or path in (*mixer.inputs, mixer.output)
        )
    ]
    experts = tuple(_expert_tensors(path, call, name) for path, call in trace.experts.items())
    matrices: Shapes = tuple(
        (f"{path}.weight", tuple(modules[path].weight.shape)) for path in streamed
    )
    taken = {f"{path}.weight" for path in streamed}
    taken |= {f"{stack.path}.{entry}" for stack in experts for entry, _ in stack.matrices}
    resident: Shapes = tuple(
        (path, tuple(tensor.shape))
        for owner, module in modules.items()
        for leaf, tensor in own_tensors(module).items()
        if (path := f"{owner}.{leaf}" if owner else leaf) not in taken
    )
    call = next(iter(trace.experts.values()), None)
    return LayerKind(
        matrices,
        resident,
        experts,
        num_experts=0 if call is None else call.module.num_experts,
        per_token=0 if call is None else call.selected.shape[1],
        float32=tuple(path for path, _ in resident if in_float32.search(path)),
        mixer=mixer,
        attends=bool(trace.calls),
    )


def _mixer(trace: LayerTrace, linears: list[str], name: str) -> Mixer | None:
    """Return the module of a layer that keeps a state. linears: those that are called once."""
    if not trace.mixers:
        return None
    if len(trace.mixers) > 1:
        raise UnsupportedArchitectureError(
            f"{name} has layers in which several modules keep a state"
        )
    (path,) = trace.mixers
    given, returned = trace.inputs[path], trace.outputs[path]
    returned = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(returned, Tensor) or returned.shape[:-1] != given.shape[:-1]:
        raise UnsupportedArchitectureError(
            f"{name} has states in a module that returns more than hidden states"
        )
    inside = [linear for linear in linears if linear.startswith(f"{path}.")]
    inputs = tuple(linear for linear in inside if trace.inputs[linear] is given)
    output = next((linear for linear in inside if trace.outputs[linear] is returned), "")
    width = sum(trace.outputs[linear].shape[-1] for linear in inputs) or given.shape[-1]
    return Mixer(path, tuple(trace.states), inputs, output, width, trace.one_by_one)


def _expert_tensors(path: str, call: ExpertsCall, name: str) -> ExpertTensors:
    module = call.module
    if not f".{path}".endswith(".experts"):
        raise UnsupportedArchitectureError(
            f"the experts of {name} are in a module {path}, not experts"
        )
    tensors = dict(module.named_parameters(recurse=False))
    settings = {
        entry
        for entry, value in module.__dict__.items()
        if entry.startswith(("has_", "is_")) and value
    }
    if unknown := (settings - _EXPERT_SETTINGS) | (tensors.keys() - _EXPERT_TENSORS):
        raise UnsupportedArchitectureError(
            f"the experts of {name} have {min(unknown)}, of which nothing is known here"
        )
    transposed = bool(module.is_transposed)
    shapes = {entry: tensor.shape for entry, tensor in tensors.items() if tensor.dim() == 3}
    matrices = tuple(
        (entry, (columns, rows) if transposed else (rows, columns))
        for entry, (_, rows, columns) in shapes.items()
    )
    return ExpertTensors(path, matrices, transposed)
