"""What a model of `transformers` passes to its layers besides the hidden states, the stand-in for a
cache among it.

Shapes: T tokens, P elements of a layer's input.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

# An annotation such as `transformers.cache_utils.Cache | None`.
_CACHE = re.compile(r"\bCache\b")


@dataclass
class LayerArguments:
    """What the model passes to a layer besides the hidden states.

    positional: those without a name; named: by the names of the layer's parameters.
    caches: names of those that stand for a cache.
    """

    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    caches: frozenset[str] = frozenset()

    @property
    def layer_input(self) -> Tensor:
        """The input that a table has for this layer and each token, [1, T, P]: the only
        floating-point tensor with three axes.
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

    def with_cache(self, cache_stand_in: CacheStandIn) -> LayerArguments:
        """Return the same with another stand-in for the cache, where a layer is given one."""
        return self._with(lambda name, value: cache_stand_in if name in self.caches else value)

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


def _is_layer_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


class CacheStandIn:
    """Stands for the cache of layers: each token has as many before it as its position says.

    Keys and values are returned as they are, because attention hands them to the engine. The names
    of its methods and their parameters are those of `transformers.Cache`.
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
    """Stands for the number of tokens in the cache, which differs by token here: [T].

    Models compute positions as a range that begins with this number; the result is those of the
    tokens.
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
