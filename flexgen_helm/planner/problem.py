"""What a cost is computed for: model, machine, workload, precision, limits, and the habits of the engine. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.config import EMBED_TABLE, HEAD, ModelConfig, layer_stage, stage_tensor_shapes
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.constants import BLOCK_SEQUENCES, COPIES_SHARE, MARGIN_BYTES, MARGIN_SHARE, MAX_BATCH_TOKENS
from flexgen_helm.planner.memory import staging_bytes
from flexgen_helm.planner.placement import StorageSizes, Tier
from flexgen_helm.planner.policy import Schedule
from flexgen_helm.planner.workload import Workload
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.quant.precisions import Precision

# Name of the profile of the machine at hand.
MEASURED = "measured"


def without_margin(free: float, total: float) -> int:
    """What may be used of `free` bytes on a tier of `total`."""
    return max(0, int(free - max(MARGIN_BYTES, MARGIN_SHARE * total)))


@dataclass(frozen=True)
class EngineTraits:
    """Habits of an engine that its costs follow from.

    weights_locked, cache_locked: host memory of weights and cache is page-locked. disk_cache_on_host: attention on
    the host covers a cache on the disk too. converts_per_batch: weights are brought to the compute type for every
    batch of a pass, not once. max_batch_tokens: prompt tokens of one batch, however many sequences it has.
    group_rows: rows of one call of decoding's attention, 0 for all of a batch. page_cache: files are read through the
    operating system's page cache. staging: 'ring' as `policy.memory` plans it,
    or 'layers', FlexGen's: two halves of a layer on the gpu, a layer on the host.
    """

    pinned_weights: bool = True
    pinned_cache: bool = True
    disk_cache_on_host: bool = False
    converts_per_batch: bool = True
    max_batch_tokens: int = MAX_BATCH_TOKENS
    decode_sequences: int = BLOCK_SEQUENCES
    page_cache: bool = False
    staging: Literal["ring", "layers"] = "ring"


OUR_ENGINE = EngineTraits()


@dataclass(frozen=True)
class BlockShape:
    """A block: sequences of a batch, batches, and the order of the work."""

    gpu_batch_size: int
    num_gpu_batches: int
    schedule: Schedule

    @property
    def num_sequences(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches


@dataclass(frozen=True)
class PlanningProblem:
    """Everything but the policy. compute_bytes: of an element of what products take. limits: bytes a tier; stages:
    machines of a pipeline, each with these limits and an equal share of the layers. endless: the workload's lengths
    go on for ever, so that one block tells the rate."""

    config: ModelConfig
    hardware: HardwareProfile
    workload: Workload
    precision: Precision
    compute_bytes: int
    limits: Mapping[Tier, float]
    engine: EngineTraits = OUR_ENGINE
    overlap: bool = True
    cpu_attention: bool = True
    stages: int = 1
    endless: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= self.config.num_layers:
            raise UsageError(f"{self.config.num_layers} layers cannot be spread over {self.stages} pipeline stages")

    @property
    def compute_tier(self) -> Tier:
        return "cpu" if self.hardware.gpu is None else "gpu"

    @property
    def overlap_share(self) -> float:
        return self.hardware.overlap if self.overlap else 0.0

    @cached_property
    def copies_fit(self) -> bool:
        """Whether weights that all rest beside the computing rest in its type (see `policy.memory`)."""
        return self.engine.staging == "ring" and self.copies_bytes <= COPIES_SHARE * self.limits[self.compute_tier]

    @cached_property
    def dtype(self) -> str:
        """The type of products, by its size."""
        sixteen = [name for name in self.hardware.compute_processor.matmul_flops if name != "float32"]
        return sixteen[0] if self.compute_bytes == 2 and sixteen else "float32"

    @cached_property
    def storage(self) -> StorageSizes:
        return StorageSizes(self.config, self.precision)

    # Weights: all that rest; and of those what passes every time (layers and head), for a table's rows are gathered.
    @cached_property
    def stored_bytes(self) -> int:
        return sum(self.storage.matrices.values())

    @property
    def copies_bytes(self) -> int:
        """Of all weights in the compute type."""
        return self.storage.num_values * self.compute_bytes

    @cached_property
    def layer_elements(self) -> float:
        """Of one layer, as a mean."""
        return sum(self._stage_elements(layer_stage(i)) for i in range(self.config.num_layers)) / self.config.num_layers

    @cached_property
    def layer_bytes(self) -> float:
        return (
            sum(self.storage.stage_bytes(layer_stage(i)) for i in range(self.config.num_layers))
            / self.config.num_layers
        )

    @cached_property
    def head_elements(self) -> int:
        own = self._stage_elements(HEAD)
        return own + (self.config.vocab_size * self.config.embed_size if self.config.tied_head else 0)

    @cached_property
    def head_bytes(self) -> int:
        return self.storage.stage_bytes(HEAD) + (self.storage.matrices[EMBED_TABLE] if self.config.tied_head else 0)

    def _stage_elements(self, stage: str) -> int:
        return sum(math.prod(shape) for shape in stage_tensor_shapes(self.config, stage).values() if len(shape) > 1)

    @cached_property
    def ring_bytes(self) -> int:
        """Of the ring through which weights of other tiers come."""
        return staging_bytes(self.storage, int(self.limits[self.compute_tier]))

    @property
    def cache_bytes(self) -> float:
        """Of one key's or value's element at rest."""
        cache = self.precision.cache
        return self.compute_bytes if cache is None else cache.bytes_per_value(self.compute_bytes)

    @property
    def fetched_cache_bytes(self) -> float:
        """The same of what decoding brings over a link: sparse attention leaves most values where they are."""
        cache = self.precision.cache
        return self.compute_bytes if cache is None else cache.fetched_bytes_per_value(self.compute_bytes)

    @property
    def window_bytes(self) -> int:
        """Of a sequence's newest tokens, which a packed cache keeps as they are beside the computing."""
        return cache_sizes(self.config, self.precision.cache, self.compute_bytes, on_disk=False).window_bytes

    @property
    def kv_elements(self) -> int:
        """Of one position in all layers."""
        return 2 * self.config.num_layers * self.config.kv_size

    @cached_property
    def workspace(self) -> Workspace:
        config = self.config
        direct = self.compute_bytes != 4 or self.hardware.gpu is not None or config.attn_softcap is not None
        return Workspace(config, self.compute_bytes, direct, self.precision.cache)

    def visible_positions(self, context: float) -> float:
        """Positions that a token sees of `context`, as a mean over the layers: some have a window."""
        windows = self.config.windows
        if not windows:
            return context
        return sum(context if window is None else min(context, window) for window in windows) / len(windows)


def layer_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    return [shape for shape in stage_tensor_shapes(config, layer_stage(0)).values() if len(shape) > 1]


def layer_matrices(config: ModelConfig) -> int:
    return len(layer_shapes(config))
