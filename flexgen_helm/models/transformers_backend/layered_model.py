"""A causal model of `transformers` whose layers are called one at a time.

    forward of the model     code before the layers | layer 0 | layer 1 | … | code after them
    here                     `before`               | `layer(0)`, `layer(1)`, … | `after`

The model is built without weights. In its list of layers stand-ins take the place of the layers:
they record what the model passes to each of them, and return the hidden states that they are told.
So everything around the layers is the model's own code: embeddings, positions, final norm, scaling
and caps of logits.

Attention and experts go through the interfaces of `transformers`, to functions that the caller of a
layer binds.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.empty_model import empty_model
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall, Bindings, ExpertsCall
from flexgen_helm.models.transformers_backend.own_attention import OwnAttention


@dataclass
class LayerArguments:
    """What the model passes to a layer besides the hidden states.

    caches: names of those that stand for a cache.
    """

    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    caches: frozenset[str] = frozenset()

    @property
    def layer_input(self) -> Tensor:
        """The input that a table has for this layer and each token, [1, T, P]: the only tensor of
        this kind.
        """
        return next(
            value for value in (*self.positional, *self.named.values()) if _is_layer_input(value)
        )

    @property
    def shared_keys(self) -> UserDict[str, tuple[Tensor, Tensor]]:
        """Keys and values that layers leave to later ones; empty where they do not."""
        return next(
            (value for value in self.named.values() if isinstance(value, UserDict)), UserDict()
        )

    def with_layer_input(self, table_rows: Tensor) -> LayerArguments:
        """Return the same with another input of the layer."""
        return self._with(lambda name, value: table_rows if _is_layer_input(value) else value)

    def with_past(self, past: PastOfTokens) -> LayerArguments:
        """Return the same with another stand-in for the cache, where a layer is given one."""
        return (
            self._with(lambda name, value: past if name in self.caches else value)
            if self.caches
            else self
        )

    def with_shared_keys(self, shared: Mapping[str, tuple[Tensor, Tensor]]) -> LayerArguments:
        """Return the same with keys and values of the layers before."""
        return self._with(
            lambda name, value: type(value)(shared) if isinstance(value, UserDict) else value
        )

    def _with(self, new: Callable[[str, Any], Any]) -> LayerArguments:
        named = {name: new(name, value) for name, value in self.named.items()}
        return LayerArguments(
            tuple(new("", value) for value in self.positional), named, self.caches
        )


class LayeredModel:
    """One causal model of `transformers` without weights.

    model: the causal model.
    layers: its decoder layers, which are not reachable from `model` any more.
    layers_path: name of their list in the model's state dict.
    first_position: row of the first token in a table of positions. Descendants of RoBERTa do not
        use those up to the padding token's.
    has_states: layers keep states; they are passed a mask.
    own_attention: modules compute attention in their own code.
    """

    def __init__(
        self,
        config_text: str,
        device: torch.device | str,
        has_states: bool = False,
        own_attention: bool = False,
    ) -> None:
        """config_text: content of `config.json`.

        device: of buffers; 'meta' for a model that only shapes pass.

        Raises `UnsupportedArchitectureError` for what `transformers` does not know, or does not run
        this way.
        """
        self.bindings, self.has_states, self.own_attention = Bindings(), has_states, own_attention
        self.model = empty_model(config_text, has_buffers=str(device) != "meta")
        self.layers_path, module_list = _find_layers(self.model)
        self.layers: list[Any] = list(module_list)
        self._states = [_StandInState(is_last=layer is self.layers[-1]) for layer in self.layers]
        for index, (layer, state) in enumerate(zip(self.layers, self._states)):
            module_list[index] = _StandIn(layer, state)
        self._cache_names = [
            frozenset().union(*(cache_names(part) for part in layer.modules()))
            for layer in self.layers
        ]
        embeddings: Any = getattr(self.base, "embeddings", None)
        self.first_position = 0
        if hasattr(embeddings, "create_position_ids_from_input_ids"):
            self.first_position = int(embeddings.padding_idx) + 1
        if self.layer_input_table is not None:
            # Token ids that the table lacks are row 0. Rows that were looked up are numbered anew,
            # and all are there.
            self.base.config.vocab_size_per_layer_input = torch.iinfo(torch.long).max
        for module in (self.model, *self.layers):
            module.requires_grad_(False)
            for path, part in module.named_modules():
                part.__dict__["flexgen_helm_bindings"] = self.bindings
                part.__dict__["flexgen_helm_path"] = path
                for name, buffer in part._buffers.items():
                    if buffer is not None and buffer.device.type != "meta":
                        part._buffers[name] = buffer.to(device)

    def call_directly(self) -> None:
        """Let modules call each other's `forward` without looking for hooks: a layer calls sixteen
        of them.
        """
        for module in (self.model, *self.layers):
            for part in module.modules():
                part.__class__ = _without_hooks(type(part))  # type: ignore[arg-type]  # a class is hashable
                part.__dict__.update(part._modules)  # found before `nn.Module.__getattr__` is asked

    @property
    def base(self) -> Any:
        """The model without its language-model head, and without what wraps a decoder that has no
        encoder.
        """
        base: Any = self.model.base_model
        return getattr(base, "decoder", base)

    @property
    def layer_input_table(self) -> Any:
        """The embedding of the inputs that layers have of their own; None in most models."""
        return getattr(self.base, "embed_tokens_per_layer", None)

    def before(self, arguments: Mapping[str, Tensor]) -> tuple[Tensor, list[LayerArguments]]:
        """Run the code before the layers -> hidden [1, T, H], and what each layer is passed.

        arguments: `input_ids` or `inputs_embeds`, and `position_ids`, each [1, T]. With embeddings
            alone, the inputs of layers that a table has are meaningless.
        """
        for state in self._states:
            state.recorded = state.result = None
        inputs = {
            **self._with_layer_inputs(arguments),
            "position_ids": arguments["position_ids"] + self.first_position,
        }
        with suppress(_AllRecordedError):
            try:
                self._run(self.base, inputs)
            except (ValueError, IndexError) as error:
                # The model unpacks what its layers return, and none has run yet.
                expected = _UNPACKED.search(str(error))
                if expected is None or any(state.num_returned for state in self._states):
                    raise
                for state in self._states:
                    state.num_returned = int(expected[1] or 1)
                self._run(self.base, inputs)
        hidden = self._states[0].hidden
        recorded = [state.recorded for state in self._states if state.recorded is not None]
        if hidden is None or len(recorded) < len(self._states):
            raise UnsupportedArchitectureError(
                f"{type(self.model).__name__} does not call its layers one after the other"
            )
        for state in self._states:
            state.hidden = None
        past = PastOfTokens(arguments["position_ids"])
        return hidden, [
            replace(of_layer, caches=names & of_layer.named.keys()).with_past(past)
            for of_layer, names in zip(recorded, self._cache_names)
        ]

    def _run(self, model: Any, arguments: Mapping[str, Any]) -> Any:
        """Run without padding: without a mask, models read the positions, for which the host waits.

        Masks on the meta device have no values, and models with recurrent layers read them.
        """
        positions = arguments["position_ids"]
        names = {*parameter_names(self.base)}
        if "position_ids" not in names:  # the model numbers tokens from those of its cache on
            # Not all caches are annotated.
            caches = cache_names(self.base) | names & {"past_key_values", "cache"}
            arguments = {**arguments, **dict.fromkeys(caches, PastOfTokens(positions))}
        # The model's buffer of them has as many as positions of one sequence.
        if hasattr(getattr(self.base, "embeddings", None), "token_type_ids"):
            arguments = {**arguments, "token_type_ids": torch.zeros_like(positions)}
        without_values = positions.device.type == "meta" and not self.own_attention
        mask = None if without_values else torch.ones_like(positions, dtype=torch.bool)
        # Modules with states are passed the mask unless all of it is ones.
        known = _KnownLength(positions) if positions.device.type == "meta" else nullcontext()
        with known, _KnownMask(mask) if self.has_states else nullcontext():
            return model(**arguments, attention_mask=mask, use_cache=False)

    def layer(self, index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Run one layer, hidden [1, T, H] -> [1, T, H]; of S streams [S, 1, T, H] or [1, T, S,
        H].
        """
        with OwnAttention(self.bindings) if self.own_attention else nullcontext():
            out = self.layers[index](hidden, *arguments.positional, **arguments.named)
        self._states[index].num_returned = len(out) if isinstance(out, tuple) else 0
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def after(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run the code after the layers -> logits [1, N, V].

        hidden: [1, N, H], or of S streams [S, 1, N, H] or [1, N, S, H].
        positions: [1, N], of any value.
        """
        for state in self._states:
            state.recorded, state.result = None, hidden
        embeds = (
            hidden if hidden.dim() == 3 else hidden[:, :, 0] if hidden.shape[0] == 1 else hidden[0]
        )
        arguments = {"inputs_embeds": embeds, "position_ids": positions}
        try:
            logits: Tensor = self._run(self.model, self._with_layer_inputs(arguments)).logits
        finally:
            for state in self._states:
                state.result = state.hidden = state.recorded = None
        return logits

    def _with_layer_inputs(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add zeros for the inputs of layers, which models cannot find without token ids."""
        table, embeds = self.layer_input_table, arguments.get("inputs_embeds")
        if table is None or embeds is None:
            return dict(arguments)
        inputs = embeds.new_zeros(
            (*embeds.shape[:2], len(self.layers), table.embedding_dim // len(self.layers))
        )
        return {**arguments, "per_layer_inputs": inputs}

    @contextmanager
    def bound(
        self,
        attend: Callable[[AttentionCall], Tensor] | None,
        run_experts: Callable[[ExpertsCall], Tensor] | None,
    ) -> Iterator[None]:
        """Let modules call these functions."""
        self.bindings.attend, self.bindings.run_experts = attend, run_experts
        try:
            yield
        finally:
            self.bindings.attend = self.bindings.run_experts = None


@cache
def _without_hooks(module_class: Any) -> type[nn.Module]:
    """Return a class of modules that differs from `module_class` in how it is called alone."""

    def call(self: Any, *positional: Any, **named: Any) -> Any:
        return self.forward(*positional, **named)

    return type(
        module_class.__name__,
        (module_class,),
        {"__call__": call, "__module__": module_class.__module__},
    )


def cache_names(module: nn.Module) -> frozenset[str]:
    """Return the parameters of a module that stand for a cache, by their annotations.

    Releases of `transformers` call them `past_key_values`, `cache_params`, `layer_past`, or
    `cache`.
    """
    annotations = _annotations(type(module))  # type: ignore[arg-type]  # a class is hashable
    return frozenset(name for name, annotation in annotations.items() if _CACHE.search(annotation))


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of what a module's forward pass takes, in their order."""
    return list(_annotations(type(module)))  # type: ignore[arg-type]  # a class is hashable


@cache
def _annotations(module_class: Any) -> dict[str, str]:
    """Return what the forward pass of a class takes, and the texts of its annotations."""
    try:
        parameters = list(signature(module_class.forward).parameters.values())
    except (TypeError, ValueError):  # a function without a signature
        return {}
    return {
        parameter.name: "" if parameter.annotation is Signature.empty else str(parameter.annotation)
        for parameter in parameters[1:]
    }


def _is_layer_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


class PastOfTokens:
    """Stands for the cache of layers: each token has as many before it as its position says.

    Keys and values go to the engine by attention, so they are returned as they are.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> TokensBefore:
        """Return the number of tokens before, which models add to 0 … T - 1 to have positions
        [T].
        """
        positions = self._positions[0]
        return TokensBefore(positions - torch.arange(len(positions), device=positions.device))

    # Sizes of masks, which are not made.

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, keys: Tensor, values: Tensor, *layer: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        return keys, values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its layers ask their cache for {name}")


class TokensBefore:
    """Stands for the number of tokens before each, [T]; a range from there to as many more is their
    positions.
    """

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts

    def __add__(self, more: int | Tensor) -> TokensBefore | Tensor:
        total = self._counts + more
        return total if isinstance(more, Tensor) else TokensBefore(total)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [value._counts if isinstance(value, cls) else value for value in args]
        if func is torch.arange:
            start, _ = values
            return start + torch.arange(len(start), device=start.device)
        return func(*values, **(kwargs or {}))


class _KnownMask(TorchFunctionMode):
    """Answers whether all of a mask is ones, which it is, without a wait for the device."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self._mask, self._compared = mask, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.all and self._compared is not None and args[0] is self._compared:
            return torch.tensor(True)
        out = func(*args, **(kwargs or {}))
        if func in (Tensor.__eq__, Tensor.eq, torch.eq) and args[0] is self._mask:
            self._compared = out
        return out


class _KnownLength(TorchFunctionMode):
    """Answers which the last position of traced tokens is: modules ask whether a text is long
    (LongRoPE).
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self._shape = positions.shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.max, Tensor.max) and len(args) == 1 and args[0].shape == self._shape:
            return torch.tensor(self._shape[-1] - 1)
        return func(*args, **(kwargs or {}))


# An annotation such as `transformers.cache_utils.Cache | None`.
_CACHE = re.compile(r"\bCache\b")
_UNPACKED = re.compile(r"not enough values to unpack \(expected (\d+)|invalid index of a 0-dim()")


class _AllRecordedError(Exception):
    """Stop the forward pass after the last layer, whose stand-in has recorded its arguments."""


@dataclass
class _StandInState:
    """What a stand-in was given, and what it returns.

    hidden, recorded: hidden states and other arguments of its last call.
    result: hidden states that it returns; None while arguments are recorded.
    num_returned: values of the tuple that it returns, hidden states first; 0 for hidden states
        alone.
    """

    is_last: bool
    num_returned: int = 0
    hidden: Tensor | None = None
    recorded: LayerArguments | None = None
    result: Tensor | None = None


class _StandIn(nn.Module):
    """Stands in the model for a layer. It has the layer's attributes, which models ask for."""

    def __init__(self, layer: nn.Module, state: _StandInState) -> None:
        super().__init__()
        self.__dict__["_layer"], self.__dict__["_state"] = layer, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        state = self._state
        if positional:
            hidden, *others = positional
            named = {**dict(zip(parameter_names(self._layer)[1:], others)), **named}
            positional = tuple(others[len(parameter_names(self._layer)) - 1 :])
        else:
            hidden = named.pop("hidden_states")
        if state.result is not None:
            hidden = state.result
        else:
            state.hidden, state.recorded = hidden, LayerArguments(positional, named)
            if state.is_last:
                raise _AllRecordedError
        return (hidden, *[None] * (state.num_returned - 1)) if state.num_returned else hidden


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module itself and the buffers that checkpoints have, such as
    biases of routers.
    """
    buffers = {
        name: buffer for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }  # fmt: skip
    return {**dict(module.named_parameters(recurse=False)), **buffers}


def _find_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Find the list of decoder layers, by its length; of several the outermost."""
    config = model.config.get_text_config()
    count = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise UnsupportedArchitectureError(f"{type(model).__name__} has no list of {count} layers")
    return min(lists, key=lambda item: item[0].count("."))
