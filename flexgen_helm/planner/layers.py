"""Divide the layers of a model among the ranks of a pipeline. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import ModelConfig


def divide_layers(config: ModelConfig, num_ranks: int, counts: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each rank: those that `counts` gives, else shares that take about as long to decode.

    The head counts by its operations, so the last rank has fewer layers. Raises `UsageError` if a rank had no layer.
    """
    layers = config.num_layers
    if counts is None:
        if layers < num_ranks:
            raise UsageError(f"{layers} layers cannot be divided among {num_ranks} ranks; start fewer processes")
        counts = _balanced(layers, num_ranks, config.head_flops_per_token * layers / config.linear_flops_per_token)
    elif len(counts) != num_ranks or sum(counts) != layers or min(counts) < 1:
        raise UsageError(
            f"--pipeline-layers {','.join(map(str, counts))} does not fit {layers} layers and {num_ranks} ranks; "
            f"give {num_ranks} numbers with the sum {layers}"
        )
    return _ranges(counts)


def _ranges(counts: Sequence[int]) -> list[range]:
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends)]


def _balanced(layers: int, num_ranks: int, head: float) -> list[int]:
    """Return layers by rank whose largest share is smallest; head: what the last rank has besides, in layers."""
    before = num_ranks - 1
    if not before:
        return [layers]
    last = min(range(1, layers - before + 1), key=lambda count: max(count + head, -(-(layers - count) // before)))
    share, more = divmod(layers - last, before)
    return [share + (rank < more) for rank in range(before)] + [last]
