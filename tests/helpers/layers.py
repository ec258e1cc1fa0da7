"""Decoder layers that tests look at, or make fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flexgen_helm.models.decoder import Decoder, LayerBatch
from flexgen_helm.models.transformers_backend.decoder import TransformersDecoder

# layer, its number, what it is given -> hidden states of each batch; the first computes them.
Step = Callable[[Callable[[], list[Tensor]], int, Sequence[LayerBatch]], Sequence[Tensor]]


def replace_layers(patch: Any, step: Step) -> None:
    """Let `step` compute the batches that go through a layer together, in engines of both kinds."""
    for owner in (Decoder, TransformersDecoder):

        def layer(self: Any, weights: Any, number: int, batches: Any, honest: Any = owner.layer) -> Iterator[Tensor]:
            given = list(batches)
            yield from step(lambda: list(honest(self, weights, number, given)), number, given)

        patch.setattr(owner, "layer", layer)


class _Setter:
    setattr = staticmethod(setattr)


replace_layers_for_good = partial(replace_layers, _Setter)
