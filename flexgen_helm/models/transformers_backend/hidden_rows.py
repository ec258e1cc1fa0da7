"""What tokens carry from layer to layer of a model of `transformers`, as one row of a tensor for
each token.

    hidden states of every stream | inputs of every layer | keys and values used again

Most models have the first part alone, in one stream. Gemma 3n and Hunyuan 4 have four streams.
Gemma 3n and Gemma 4 look up an input of every layer with the token, and their last layers attend
with keys and values of an earlier one.

Shapes: T tokens, H hidden size, S streams, L layers, P elements of a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexgen_helm.models.transformers_backend.config import SharedKeys, TransformersConfig
from flexgen_helm.models.transformers_backend.layer_arguments import LayerArguments


class HiddenRows:
    """The columns of a token's row; `ModelConfig.hidden_elements` is their number."""

    def __init__(self, config: TransformersConfig) -> None:
        self._modules = config.modules
        self._streams_end = config.modules.streams * config.hidden_size
        self._inputs_end = self._streams_end + config.modules.layer_inputs_size
        self._end = config.hidden_elements

    def new(self, hidden: Tensor, arguments: Sequence[LayerArguments]) -> Tensor:
        """Return the rows before the first layer; hidden: as layers are given them."""
        parts = [self._rows(hidden)]
        if self._inputs_end > self._streams_end:
            parts += [of_layer.layer_input.squeeze(0) for of_layer in arguments]
        if self._end > self._inputs_end:
            parts.append(parts[0].new_zeros((len(parts[0]), self._end - self._inputs_end)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def hidden(self, state: Tensor) -> Tensor:
        """Rows [T, …] -> hidden states as layers are given them: [1, T, H], of streams [S, 1, T, H]
        or [1, T, S, H].
        """
        streams = self._modules.streams
        if streams == 1:
            return state[None, :, : self._streams_end]
        rows = state[:, : self._streams_end].view(len(state), streams, -1)
        return rows[None] if self._modules.streams_axis else rows.transpose(0, 1)[:, None]

    def arguments(self, state: Tensor, layer: int, arguments: LayerArguments) -> LayerArguments:
        """Return what a layer is passed, with what these tokens carry for it."""
        if size := self._modules.layer_input_size:
            first = self._streams_end + layer * size
            arguments = arguments.with_layer_input(state[None, :, first : first + size])
        if self._modules.shared_keys:
            stored = {
                shared.name: tuple(
                    part.unflatten(1, (shared.heads, -1)).transpose(0, 1)[None] for part in parts
                )
                for shared, *parts in self._shared(state)
                if shared.layer < layer
            }
            arguments = arguments.with_shared_keys(stored)
        return arguments

    def after(self, state: Tensor, layer: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Return the rows after a layer; hidden: what it returned. arguments: what it was
        passed.
        """
        rows = self._rows(hidden)
        if self._end == self._streams_end:
            return rows
        after = torch.cat((rows, state[:, self._streams_end :]), 1)
        for shared, *columns in self._shared(after):
            if shared.layer == layer:
                for column, part in zip(columns, arguments.shared_keys[shared.name]):
                    column.copy_(part.squeeze(0).transpose(0, 1).flatten(1))
        return after

    def _rows(self, hidden: Tensor) -> Tensor:
        if self._modules.streams == 1 or self._modules.streams_axis:
            return hidden.squeeze(0).flatten(1)
        return hidden.squeeze(1).transpose(0, 1).flatten(1)

    def _shared(self, state: Tensor) -> Iterator[tuple[SharedKeys, Tensor, Tensor]]:
        """Yield the columns of keys and of values that layers leave to later ones, [T, heads *
        elements] each.
        """
        first = self._inputs_end
        for shared in self._modules.shared_keys:
            middle = first + shared.heads * shared.key_dim
            end = middle + shared.heads * shared.value_dim
            yield shared, state[:, first:middle], state[:, middle:end]
            first = end
