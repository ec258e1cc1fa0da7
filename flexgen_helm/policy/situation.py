"""What a cost is computed for: model, machine, workload, precision, limits, and the habits of the engine. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flexgen_helm.core.errors import UsageError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.spec import HEAD, ModelSpec, layer_stage, stage_tensor_shapes
from flexgen_helm.policy.memory import COPIES_SHARE, staging_bytes
from flexgen_helm.policy.placement import Tier, matrices
from flexgen_helm.policy.policy import Schedule
from flexgen_helm.policy.workload import Workload
from flexgen_helm.policy.workspace import Workspace

GROUP_BITS = 32  # scale and offset of a group of quantized values, 16 bits each


@dataclass(frozen=True)
class Precision:
    """Bytes of one element: of weights and cache at rest and on links, and of what products take.

    Compressed is what takes fewer than 16 bits.
    """

    weight_bytes: float
    cache_bytes: float
    compute_bytes: int

    @classmethod
    def named(cls, name: str, compute_bytes: int, group: int = 64) -> Precision:
        """fp16: weights in 16 bits, cache in the compute type; 4-bit formats: both in 4 bits and their scales."""
        if name == "fp16":
            return cls(2, compute_bytes, compute_bytes)
        packed = (4 + GROUP_BITS / group) / 8
        return cls(packed, packed, compute_bytes)

    @property
    def weights_compressed(self) -> bool:
        return self.weight_bytes < 2

    @property
    def cache_compressed(self) -> bool:
        return self.cache_bytes < 2


@dataclass(frozen=True)
class Runtime:
    """Habits of an engine that its costs follow from.

    weights_locked, cache_locked: host memory of weights and cache is page-locked. disk_cache_on_host: attention on
    the host covers a cache on the disk too. converts_per_batch: weights are brought to the compute type for every
    batch of a pass, not once. max_batch_tokens: prompt tokens of one batch, however many sequences it has.
    group_rows: rows of one call of decoding's attention, 0 for all of a batch. page_cache: files are read through the
    operating system's page cache. staging: 'ring' as `policy.memory` plans it,
    or 'layers', FlexGen's: two halves of a layer on the gpu, a layer on the host.
    """

    weights_locked: bool = True
    cache_locked: bool = True
    disk_cache_on_host: bool = False
    converts_per_batch: bool = True
    max_batch_tokens: int = 4096
    group_rows: int = 32
    page_cache: bool = False
    staging: Literal["ring", "layers"] = "ring"


OURS = Runtime()


@dataclass(frozen=True)
class Shape:
    """A block: sequences of a batch, batches, and the order of the work."""

    gpu_batch_size: int
    num_gpu_batches: int
    schedule: Schedule

    @property
    def rows(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches


@dataclass(frozen=True)
class Situation:
    """Everything but the policy. limits: bytes a tier; stages: machines of a pipeline, each with these limits and an
    equal share of the layers. endless: the workload's lengths go on for ever, so that one block tells the rate."""

    spec: ModelSpec
    hardware: HardwareProfile
    workload: Workload
    precision: Precision
    limits: Mapping[Tier, float]
    runtime: Runtime = OURS
    overlap: bool = True
    cpu_attention: bool = True
    stages: int = 1
    endless: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= self.spec.num_layers:
            raise UsageError(f"{self.spec.num_layers} layers cannot be spread over {self.stages} pipeline stages")

    @property
    def home(self) -> Tier:
        return "cpu" if self.hardware.gpu is None else "gpu"

    @property
    def overlap_share(self) -> float:
        return self.hardware.overlap if self.overlap else 0.0

    @cached_property
    def copies_fit(self) -> bool:
        """Whether weights that all rest beside the computing rest in its type (see `policy.memory`)."""
        copies = self.resting_elements * self.precision.compute_bytes
        return not self.precision.weights_compressed and copies <= COPIES_SHARE * self.limits[self.home]

    @cached_property
    def dtype(self) -> str:
        """The type of products, by its size."""
        sixteen = [name for name in self.hardware.home.matmul_flops if name != "float32"]
        return sixteen[0] if self.precision.compute_bytes == 2 and sixteen else "float32"

    # Elements of the weights: all that rest, of which the tables' rows are gathered and the others pass every time.
    @cached_property
    def resting_elements(self) -> int:
        return sum(matrices(self.spec, 1).values())

    @cached_property
    def streamed_elements(self) -> int:
        spec = self.spec
        layers = sum(
            math.prod(shape)
            for layer in range(spec.num_layers)
            for shape in stage_tensor_shapes(spec, layer_stage(layer)).values()
            if len(shape) > 1
        )
        return layers + self.head_elements

    @cached_property
    def head_elements(self) -> int:
        own = sum(math.prod(shape) for shape in stage_tensor_shapes(self.spec, HEAD).values() if len(shape) > 1)
        return own + (self.spec.vocab_size * self.spec.embed_size if self.spec.tied_head else 0)

    @cached_property
    def layer_elements(self) -> float:
        return (self.streamed_elements - self.head_elements) / self.spec.num_layers

    def exceeds_ring(self, elements: float) -> bool:
        """Whether a stage of so many elements is larger than the ring through which weights come."""
        ring = staging_bytes(self.spec, 2, int(self.limits[self.home])) / 2
        return elements > ring

    @property
    def kv_elements(self) -> int:
        """Of one position in all layers."""
        return 2 * self.spec.num_layers * self.spec.kv_size

    @cached_property
    def workspace(self) -> Workspace:
        spec = self.spec
        direct = self.precision.compute_bytes != 4 or self.hardware.gpu is not None or spec.attn_softcap is not None
        return Workspace(spec, self.precision.compute_bytes, direct)

    def seen(self, context: float) -> float:
        """Positions that a token sees of `context`, as a mean over the layers: some have a window."""
        windows = self.spec.windows
        if not windows:
            return context
        return sum(context if window is None else min(context, window) for window in windows) / len(windows)


def layer_shapes(spec: ModelSpec) -> list[tuple[int, ...]]:
    return [shape for shape in stage_tensor_shapes(spec, layer_stage(0)).values() if len(shape) > 1]


def layer_matrices(spec: ModelSpec) -> int:
    return len(layer_shapes(spec))
