"""Modules that take the places of a model's layers, so that its own code before and after them runs
without them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flexgen_helm.models.transformers_backend.layer_arguments import LayerArguments, parameter_names


class AllRecordedError(Exception):
    """Stop the forward pass after the last layer, whose stand-in has recorded its arguments."""


class LayerStandIn(nn.Module):
    """Takes the place of a layer: records what it is given, or returns what it is told.

    It has the layer's attributes, which models ask for, and is not its parent: `modules` of the
    model do not reach the layer.

    hidden, arguments: hidden states and other arguments of its last call, [1, T, H] in most models.
    result: hidden states that it returns; None: it records, and returns what it was given.
    num_returned: values of the tuple that it returns, hidden states first; 0 for hidden states
        alone.
    """

    def __init__(self, layer: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # an attribute that is set would be a child
        self._is_last, self.num_returned = is_last, 0
        self.hidden: Tensor | None = None
        self.arguments: LayerArguments | None = None
        self.result: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        if positional:
            hidden, *others = positional
            names = parameter_names(self._layer)[1:]
            named = {**dict(zip(names, others)), **named}
            positional = tuple(others[len(names) :])  # more than the layer has names for
        else:
            hidden = named.pop("hidden_states")
        if self.result is not None:
            hidden = self.result
        else:
            self.hidden, self.arguments = hidden, LayerArguments(positional, named)
            if self._is_last:
                raise AllRecordedError
        return (hidden, *[None] * (self.num_returned - 1)) if self.num_returned else hidden
