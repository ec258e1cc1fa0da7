"""Sizes of a model's tensors as stored: in all, by stage, and of its experts. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from flexgen_helm.models.config import ModelConfig, expert_of, tensor_shapes
from flexgen_helm.quant.precisions import FP16, Precision
from flexgen_helm.shared_sizes import ALIGNMENT, aligned


class StageSizes(NamedTuple):
    """Sizes of a stage's tensors.

    num_bytes, expert_bytes: of its matrices, and of those that belong to experts.
    expert_slot: bytes of the slot for its largest expert.
    largest_matrix: in bytes.
    num_values: of its matrices.
    vector_values, float32_values: of its vectors in the compute dtype, and of those that are always
        in float32.
    """

    num_bytes: int
    expert_bytes: int
    expert_slot: int
    largest_matrix: int
    num_values: int
    vector_values: int
    float32_values: int


@dataclass(frozen=True)
class StorageSizes:
    """Sizes of a model's tensors as stored.

    element_bytes: of a value that is not quantized.
    """

    config: ModelConfig
    precision: Precision = FP16
    element_bytes: int = 2

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor."""
        fmt = self.precision.format_of(name) if len(shape) == 2 else None
        return (
            prod(shape) * self.element_bytes
            if fmt is None
            else fmt.packed_bytes(shape[0], shape[1])
        )

    @cached_property
    def matrices(self) -> Mapping[str, int]:
        """Bytes of the tensors that a policy places, by name. Vectors are always on the compute
        tier.
        """
        return {
            name: self.num_bytes(name, shape)
            for name, shape in tensor_shapes(self.config).items()
            if len(shape) > 1
        }

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(stage.num_bytes for stage in self.stages.values())

    @cached_property
    def largest_matrix(self) -> int:
        """Bytes of the largest matrix."""
        return max(stage.largest_matrix for stage in self.stages.values())

    @cached_property
    def num_values(self) -> int:
        """Values of all matrices."""
        return sum(stage.num_values for stage in self.stages.values())

    def vector_bytes(self, compute_bytes: int) -> int:
        """Bytes of all vectors: on the compute tier, in elements of `compute_bytes` or in
        float32.
        """
        stages = self.stages.values()
        return sum(
            compute_bytes * stage.vector_values + 4 * stage.float32_values for stage in stages
        )

    @cached_property
    def stages(self) -> Mapping[str, StageSizes]:
        """Sizes of each stage; of layers alike they are computed once, unless each has formats of
        its own.
        """
        firsts = self.config.first_stages
        published = self.precision.published
        if published.by_name and not published.are_alike:
            firsts = {stage: stage for stage in firsts}
        sizes = {stage: self._stage_sizes(stage) for stage in dict.fromkeys(firsts.values())}
        return {stage: sizes[first] for stage, first in firsts.items()}

    def _stage_sizes(self, stage: str) -> StageSizes:
        tensors = list(self.config.stage_tensors(stage))
        vectors = Counter[bool]()  # whether in float32 -> values
        matrices, slots = Counter[str](), Counter[str]()
        for name, shape in tensors:
            if len(shape) == 1:
                vectors[self.config.has_float32(name)] += shape[0]
                continue
            matrices[name] = size = self.num_bytes(name, shape)
            if (expert := expert_of(name)) is not None:
                # one page more, because a matrix may begin within a page of its file
                slots[expert] += aligned(size) + ALIGNMENT
        return StageSizes(
            num_bytes=matrices.total(),
            expert_bytes=sum(size for name, size in matrices.items() if expert_of(name)),
            expert_slot=max(slots.values(), default=0),
            largest_matrix=max(matrices.values(), default=0),
            num_values=sum(prod(shape) for name, shape in tensors if name in matrices),
            vector_values=vectors[False],
            float32_values=vectors[True],
        )


# Reads tensor sizes once: plans of a model share them.
storage_sizes = cache(StorageSizes)
