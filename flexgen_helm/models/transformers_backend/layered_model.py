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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.empty_model import empty_model
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall, Bindings, ExpertsCall
from flexgen_helm.models.transformers_backend.layer_arguments import (
    CacheStandIn,
    LayerArguments,
    cache_names,
    parameter_names,
)
from flexgen_helm.models.transformers_backend.own_attention import OwnAttention
from flexgen_helm.models.transformers_backend.stand_ins import AllRecordedError, LayerStandIn


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
        self._stand_ins = [LayerStandIn(layer, layer is self.layers[-1]) for layer in self.layers]
        for index, stand_in in enumerate(self._stand_ins):
            module_list[index] = stand_in
        self._cache_names = [
            frozenset().union(*(cache_names(part) for part in layer.modules()))
            for layer in self.layers
        ]
        embeddings: Any = getattr(self.base, "embeddings", None)
        self.first_position = 0
        if hasattr(embeddings, "create_position_ids_from_input_ids"):
            self.first_position = int(embeddings.padding_idx) + 1
        if self.layer_input_table is not None:
            # The model takes row 0 for ids that the table lacks. Here the table consists of the
            # rows that were looked up, and their numbers are the ids: it has all of them.
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

        arguments: `input_ids` or `inputs_embeds`, and `position_ids`, each [1, T]. A
            `layer_input_table` needs ids; with embeddings alone what it gives layers is wrong.
        """
        for stand_in in self._stand_ins:
            stand_in.arguments = stand_in.result = None
        inputs = {
            **self._with_layer_inputs(arguments),
            "position_ids": arguments["position_ids"] + self.first_position,
        }
        with suppress(AllRecordedError):
            try:
                self._run(self.base, inputs)
            except (ValueError, IndexError) as error:
                # The model unpacks a tuple that its layers return. How long it is, stand-ins learn
                # from the error, as no layer has run yet.
                expected = _UNPACKED.search(str(error))
                if expected is None or any(stand_in.num_returned for stand_in in self._stand_ins):
                    raise
                for stand_in in self._stand_ins:
                    stand_in.num_returned = int(expected[1] or 1)
                self._run(self.base, inputs)
        hidden = self._stand_ins[0].hidden
        recorded = [stand_in.arguments for stand_in in self._stand_ins if stand_in.arguments]
        if hidden is None or len(recorded) < len(self.layers):
            raise UnsupportedArchitectureError(
                f"{type(self.model).__name__} does not call its layers one after the other"
            )
        for stand_in in self._stand_ins:
            stand_in.hidden = None
        past = CacheStandIn(arguments["position_ids"])
        return hidden, [
            replace(of_layer, caches=names & of_layer.named.keys()).with_cache(past)
            for of_layer, names in zip(recorded, self._cache_names)
        ]

    def _run(self, model: Any, arguments: Mapping[str, Any]) -> Any:
        """Run without padding: without a mask, models read the positions, for which the host waits.

        Masks on the meta device have no values, and models with recurrent layers read them. Those
        that attend in code of their own need one, to which they add.
        """
        positions = arguments["position_ids"]
        names = {*parameter_names(self.base)}
        if "position_ids" not in names:  # the model counts positions from its cache's length on
            # Not all caches are annotated.
            caches = cache_names(self.base) | names & {"past_key_values", "cache"}
            arguments = {**arguments, **dict.fromkeys(caches, CacheStandIn(positions))}
        # The model's own buffer of token types is as long as one sequence may be.
        if hasattr(getattr(self.base, "embeddings", None), "token_type_ids"):
            arguments = {**arguments, "token_type_ids": torch.zeros_like(positions)}
        # Modules with states are passed the mask unless all of it is ones, which `_KnownMask` says.
        without_values = positions.device.type == "meta" and not self.own_attention
        mask = None if without_values else torch.ones_like(positions, dtype=torch.bool)
        length = _KnownLength(positions) if positions.device.type == "meta" else nullcontext()
        with length, _KnownMask(mask) if self.has_states else nullcontext():
            return model(**arguments, attention_mask=mask, use_cache=False)

    def layer(self, index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Run one layer, hidden [1, T, H] -> [1, T, H]; of S streams [S, 1, T, H] or [1, T, S,
        H].
        """
        with OwnAttention(self.bindings) if self.own_attention else nullcontext():
            out = self.layers[index](hidden, *arguments.positional, **arguments.named)
        self._stand_ins[index].num_returned = len(out) if isinstance(out, tuple) else 0
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def after(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run the code after the layers -> logits [1, N, V].

        hidden: [1, N, H], or of S streams [S, 1, N, H] or [1, N, S, H].
        positions: [1, N], of any value.
        """
        for stand_in in self._stand_ins:
            stand_in.arguments, stand_in.result = None, hidden
        # one of the streams, for its shape
        embeds = (
            hidden if hidden.dim() == 3 else hidden[:, :, 0] if hidden.shape[0] == 1 else hidden[0]
        )
        arguments = {"inputs_embeds": embeds, "position_ids": positions}
        try:
            logits: Tensor = self._run(self.model, self._with_layer_inputs(arguments)).logits
        finally:
            for stand_in in self._stand_ins:
                stand_in.result = stand_in.hidden = stand_in.arguments = None
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


# What is said where a tensor is unpacked as a tuple of so many values, or its first one is taken;
# then there is no number.
_UNPACKED = re.compile(r"not enough values to unpack \(expected (\d+)|invalid index of a 0-dim")


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
