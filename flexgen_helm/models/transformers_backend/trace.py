"""Pass shapes without data through the modules of a model once, and note what its layers do."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.config import SequenceState
from flexgen_helm.models.transformers_backend.interfaces import (
    AttentionCall,
    ExpertsCall,
    Mask,
    checks_requests,
    is_plain,
)
from flexgen_helm.models.transformers_backend.layer_arguments import (
    CacheStandIn,
    LayerArguments,
    cache_names,
    parameter_names,
)
from flexgen_helm.models.transformers_backend.layered_model import LayeredModel
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
    attention_calls: in order.
    experts: calls of experts, by the path of their module.
    shared: keys and values that it leaves to later layers, by name.
    mixers: modules that asked for a state; states: what they kept.
    one_by_one: passes of one token alone go on from its states; several tokens at once would ignore
        one.
    """

    order: list[str] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    attention_calls: list[AttentionCall] = field(default_factory=list)
    experts: dict[str, ExpertsCall] = field(default_factory=dict)
    shared: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mixers: set[str] = field(default_factory=set)
    states: list[SequenceState] = field(default_factory=list)
    one_by_one: bool = False

    def attend(self, call: AttentionCall) -> Tensor:
        """Note a call of attention; return a result without values."""
        self.attention_calls.append(call)
        return call.q.new_empty((*call.q.shape[:2], call.v.shape[2]))

    def run_experts(self, call: ExpertsCall) -> Tensor:
        """Note a call of experts; return a result without values."""
        self.experts[call.path] = call
        self.order.append(call.path)
        return torch.empty_like(call.x)


@dataclass(frozen=True)
class ModelTrace:
    """What the whole model did.

    before, after: identities of the modules that were called before and after the layers.
    hidden: shape of hidden states.
    """

    layers: list[LayerTrace]
    before: set[int]
    after: set[int]
    hidden: tuple[int, ...]


def trace_layers(model: LayeredModel) -> ModelTrace:
    """Pass shapes through the model."""
    name = type(model.model).__name__
    ids = torch.zeros((1, _TOKENS), dtype=torch.long, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    before, after = set[int](), set[int]()
    layers: list[LayerTrace] = []
    ignored = LayerTrace()  # of passes through several layers, or once more through one
    with torch.no_grad(), _one_sequence():
        with model.bound(ignored.attend, ignored.run_experts):
            _require_no_tokens_in_arguments(model, positions)
            with register_module_forward_pre_hook(lambda module, args: before.add(id(module))):
                hidden, arguments = model.before({"input_ids": ids, "position_ids": positions})
            first_token = {"input_ids": ids[:, :1], "position_ids": positions[:, :1]}
            _, arguments_of_one = model.before(first_token)
        for index, layer_arguments in enumerate(arguments):
            trace, out = _trace_layer(model, index, hidden, layer_arguments)
            if trace.states:
                with model.bound(ignored.attend, ignored.run_experts):
                    ignores_a_state = partial(_ignores_a_state, model, index, trace.states)
                    trace.one_by_one = ignores_a_state(hidden, layer_arguments)
                    if ignores_a_state(hidden[..., :1, :], arguments_of_one[index]):
                        raise UnsupportedArchitectureError(
                            f"{name} does not go on from the states that its layers keep"
                        )
            layers.append(trace)
            hidden = out
        with (
            model.bound(ignored.attend, ignored.run_experts),
            register_module_forward_pre_hook(lambda module, args: after.add(id(module))),
        ):
            model.after(hidden, positions)
    return ModelTrace(layers, before, after, tuple(hidden.shape))


def _trace_layer(
    model: LayeredModel, index: int, hidden: Tensor, arguments: LayerArguments
) -> tuple[LayerTrace, Tensor]:
    """Pass shapes through one layer; return what it did, and its hidden states."""
    name, layer, trace = type(model.model).__name__, model.layers[index], LayerTrace()
    _require_known_arguments(model, layer, arguments)
    shared_before = dict(arguments.shared_keys)
    with (
        model.bound(trace.attend, trace.run_experts),
        _recording(layer, trace, name) as note_state,
    ):
        cache = StateCache(torch.arange(_TOKENS, device="meta")[None], note_state)
        out = model.layer(index, hidden, arguments.with_cache(cache))
    trace.states = [state for state, _ in cache.kept_states()]
    trace.shared = {
        key: pair
        for key, pair in arguments.shared_keys.items()
        if pair is not shared_before.get(key)
    }
    if trace.shared.keys() & shared_before:
        raise UnsupportedArchitectureError(f"{name} replaces keys that layers share")
    if out.shape != hidden.shape:
        raise UnsupportedArchitectureError(
            f"the layers of {name} change the shape of the hidden states"
        )
    return trace, out


def _require_known_arguments(
    model: LayeredModel, layer: nn.Module, arguments: LayerArguments
) -> None:
    """Raise if a layer is given a tensor or an object of which nothing is known here."""
    names = parameter_names(layer)[1:]
    names += ["another tensor"] * (len(arguments.positional) - len(names))
    positional = zip(names, arguments.positional)
    inputs = None if model.layer_input_table is None else arguments.layer_input
    for name, value in (*positional, *arguments.named.items()):
        if isinstance(value, (CacheStandIn, UserDict)) or value is inputs:
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
            if not model.layer(index, hidden, arguments.with_cache(cache)).requires_grad:
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
    for of_layer in arguments:
        for value in tree_leaves((of_layer.positional, dict(of_layer.named))):
            depends_on_tokens = isinstance(value, Tensor) and value.requires_grad
            if depends_on_tokens and not (has_inputs and value is of_layer.layer_input):
                raise UnsupportedArchitectureError(
                    f"{type(model.model).__name__} passes its layers more that depends on tokens "
                    "than hidden states"
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
    token = checks_requests.set(True)
    try:
        yield
    finally:
        checks_requests.reset(token)
        masking_utils.find_packed_sequence_indices, masking_utils.chunked_overlay = search, overlay


@contextmanager
def _recording(layer: nn.Module, trace: LayerTrace, name: str) -> Iterator[Callable[[], None]]:
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
        passed = {**dict(zip(parameter_names(module), positional)), **named}
        if any(
            not isinstance(passed[cache], CacheStandIn)
            for cache in cache_names(module) & passed.keys()
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
