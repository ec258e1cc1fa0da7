"""What a cost is computed for: model, machine, workload, precision, limits, and the habits of the engine. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flexgen_helm.core.errors import UsageError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.spec import HEAD, TABLE, ModelSpec, layer_stage, stage_tensor_shapes
from flexgen_helm.policy.memory import COPIES_SHARE, staging_bytes
from flexgen_helm.policy.placement import AtRest, Tier
from flexgen_helm.policy.policy import Schedule
from flexgen_helm.policy.workload import Workload
from flexgen_helm.policy.workspace import Workspace
from flexgen_helm.quant.precisions import Precision

# Name of the profile of the machine at hand.
MEASURED = "measured"
# What a machine keeps for everything that is not ours: a share of its memory, and never less than this.
MARGIN_SHARE, MARGIN_BYTES = 0.1, 1 << 30


def less_margin(free: float, total: float) -> int:
    """What may be used of `free` bytes on a tier of `total`."""
    return max(0, int(free - max(MARGIN_BYTES, MARGIN_SHARE * total)))


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
    """Everything but the policy. compute_bytes: of an element of what products take. limits: bytes a tier; stages:
    machines of a pipeline, each with these limits and an equal share of the layers. endless: the workload's lengths
    go on for ever, so that one block tells the rate."""

    spec: ModelSpec
    hardware: HardwareProfile
    workload: Workload
    precision: Precision
    compute_bytes: int
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
        return self.runtime.staging == "ring" and self.copies_bytes <= COPIES_SHARE * self.limits[self.home]

    @cached_property
    def dtype(self) -> str:
        """The type of products, by its size."""
        sixteen = [name for name in self.hardware.home.matmul_flops if name != "float32"]
        return sixteen[0] if self.compute_bytes == 2 and sixteen else "float32"

    @cached_property
    def rest(self) -> AtRest:
        return AtRest(self.spec, self.precision)

    # Weights: all that rest; and of those what passes every time (layers and head), for a table's rows are gathered.
    @cached_property
    def resting_bytes(self) -> int:
        return sum(self.rest.matrices.values())

    @property
    def copies_bytes(self) -> int:
        """Of all weights in the compute type."""
        return self.rest.num_values * self.compute_bytes

    @cached_property
    def layer_elements(self) -> float:
        """Of one layer, as a mean."""
        return sum(self._stage_elements(layer_stage(i)) for i in range(self.spec.num_layers)) / self.spec.num_layers

    @cached_property
    def layer_bytes(self) -> float:
        return sum(self.rest.stage_bytes(layer_stage(i)) for i in range(self.spec.num_layers)) / self.spec.num_layers

    @cached_property
    def head_elements(self) -> int:
        own = self._stage_elements(HEAD)
        return own + (self.spec.vocab_size * self.spec.embed_size if self.spec.tied_head else 0)

    @cached_property
    def head_bytes(self) -> int:
        return self.rest.stage_bytes(HEAD) + (self.rest.matrices[TABLE] if self.spec.tied_head else 0)

    def _stage_elements(self, stage: str) -> int:
        return sum(math.prod(shape) for shape in stage_tensor_shapes(self.spec, stage).values() if len(shape) > 1)

    @cached_property
    def ring_bytes(self) -> int:
        """Of the ring through which weights of other tiers come."""
        return staging_bytes(self.rest, int(self.limits[self.home]))

    @property
    def cache_bytes(self) -> float:
        """Of one key's or value's element at rest."""
        cache = self.precision.cache
        return self.compute_bytes if cache is None else cache.bytes_per_value(self.compute_bytes)

    @property
    def taken_cache_bytes(self) -> float:
        """The same of what decoding brings over a link: sparse attention leaves most values where they are."""
        cache = self.precision.cache
        return self.compute_bytes if cache is None else cache.taken_bytes_per_value(self.compute_bytes)

    @property
    def row_bytes(self) -> int:
        """Of a sequence's newest tokens, which a packed cache keeps as they are beside the computing."""
        cache = self.precision.cache
        return 0 if cache is None else cache.tail_copies * cache.tail_tokens * self.kv_elements * self.compute_bytes

    @property
    def kv_elements(self) -> int:
        """Of one position in all layers."""
        return 2 * self.spec.num_layers * self.spec.kv_size

    @cached_property
    def workspace(self) -> Workspace:
        spec = self.spec
        direct = self.compute_bytes != 4 or self.hardware.gpu is not None or spec.attn_softcap is not None
        return Workspace(spec, self.compute_bytes, direct, self.precision.cache)

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
