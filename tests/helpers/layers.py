"""Decoder layers that tests look at, or make fail."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from flexgen_helm.models.decoder import Decoder, LayerBatch
from flexgen_helm.models.transformers_backend.decoder import TransformersDecoder

# layer, its number, what it is given -> hidden states of each batch; the first computes them.
Step = Callable[[Callable[[], list[Tensor]], int, Sequence[LayerBatch]], Sequence[Tensor]]


def replace_layers(patch, step):
    """Let `step` compute the batches that go through a layer together, in engines of both kinds."""
    for owner in (Decoder, TransformersDecoder):

        def layer(self, weights, number, batches, honest=owner.layer):
            given = list(batches)
            yield from step(lambda: list(honest(self, weights, number, given)), number, given)

        patch.setattr(owner, "layer", layer)


class _Setter:
    setattr = staticmethod(setattr)


replace_layers_for_good = partial(replace_layers, _Setter)
