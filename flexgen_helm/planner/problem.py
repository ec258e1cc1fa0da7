"""The planning problem: everything that a cost follows from, except the policy. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import PRODUCT_BY_WEIGHT, Curve, HardwareProfile, Link
from flexgen_helm.models.config import (
    EMBED,
    EMBED_TABLE,
    HEAD,
    ModelConfig,
    expert_of,
    layer_stages,
    stage_names,
)
from flexgen_helm.planner.affine import CACHE, Affine, affine
from flexgen_helm.planner.cache_sizes import state_bytes
from flexgen_helm.planner.expert_use import expected_experts
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.policy import BlockShape
from flexgen_helm.planner.staging import StagingSizes, loader_buffer_bytes, staging_sizes
from flexgen_helm.planner.storage_sizes import StorageSizes, storage_sizes
from flexgen_helm.planner.weight_placement import keeps_copies
from flexgen_helm.planner.workload import Workload
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.quant.formats import StoredFormat
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.shared_sizes import (
    BLOCK_SEQUENCES,
    LARGE_BLOCK_SEQUENCES,
    MAX_BATCH_TOKENS,
    MAX_TRANSFER_BYTES,
    STREAMED_BATCH_TOKENS,
)
from flexgen_helm.tiers import Tier, without_margin


@lru_cache(maxsize=8)  # scenarios of a suite, and machines that are compared, have the same model
def matrix_kinds(config: ModelConfig) -> Mapping[str, str]:
    """Return what each matrix is: 'layer', 'head', 'embedding', of which rows are gathered, or the
    name of its expert.
    """
    kinds = {}
    for stage in stage_names(config):
        kind = {EMBED: "embedding", HEAD: "head"}.get(stage, "layer")
        for name, shape in config.stage_tensors(stage):
            if len(shape) > 1:
                kinds[name] = (
                    "head"
                    if name == EMBED_TABLE and borrows_table(config)
                    else expert_of(name) or kind
                )
    return kinds


def borrows_table(config: ModelConfig) -> bool:
    """Return whether the head multiplies with the embedding's table."""
    return config.tied_head and config.has_embedding


def between_elements(config: ModelConfig) -> float:
    """Return the elements that a layer reads and writes of a token between its products, on
    average.

    Two norms (4 times the hidden states), two sums (6), the check of every value (1); queries and
    keys rotated, keys and values stored (each read and written); gate and up. For each expert of a
    token besides: its hidden state gathered (2) and its result weighed (2) and added (3).
    """
    inner = [
        3 * config.ffn_size
        if (moe := config.moe(layer)) is None
        else moe.per_token * (3 * config.widest_ffn + 7 * config.hidden_size)
        for layer in range(config.num_layers)
    ]
    heads = 2 * (config.q_size + config.kv_size) + 4 * config.kv_size
    return 11 * config.num_streams * config.hidden_size + heads + sum(inner) / config.num_layers


@dataclass(frozen=True)
class PlanningProblem:
    """Model, machine, workload, precision, limits and engine.

    compute_bytes: of an element in the compute dtype.
    limits: bytes by tier.
    ranks: machines of a pipeline, of which this one has its limits and 1 / ranks of the layers; not
        always whole, because layers may not divide evenly.
    endless: the workload repeats without end, so that one block gives the rate.
    max_batch_tokens: prompt tokens of one batch, however many sequences it has.
    pins_host_memory: the driver pins what crosses the link; False where it was seen to refuse.
    expert_skew: how unevenly tokens select experts (`expected_experts`); 0 where no run has
        counted.
    storage_dtype: of weights in 16 bits.
    """

    config: ModelConfig
    hardware: HardwareProfile
    workload: Workload
    precision: Precision
    compute_bytes: int
    limits: Mapping[Tier, float]
    overlap: bool = True
    cpu_attention: bool = True
    ranks: float = 1
    endless: bool = False
    max_batch_tokens: int = MAX_BATCH_TOKENS
    pins_host_memory: bool = True
    expert_skew: float = 0.0
    storage_dtype: str = "float16"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= self.config.num_layers:
            raise UsageError(
                f"{self.config.num_layers} layers cannot be spread over {self.ranks} pipeline "
                "stages"
            )

    # --- The machine ---
    @cached_property
    def machine(self) -> Machine:
        limits = {tier: int(limit) for tier, limit in self.limits.items()}
        dtype = "float32" if self.compute_bytes == 4 else "float16"
        as_stored = self.storage_dtype if self.multiplies_as_stored else None
        return Machine(
            limits, self.compute_tier, dtype, self.overlap, self.cpu_attention, as_stored
        )

    @property
    def multiplies_as_stored(self) -> bool:
        """Whether products on the host read weights in 16 bits as they rest."""
        return self.hardware.gpu is None and self.hardware.cpu.multiplies_as_stored

    @property
    def compute_tier(self) -> Tier:
        return "cpu" if self.hardware.gpu is None else "gpu"

    @property
    def places_experts(self) -> bool:
        """Whether a mixture is placed for runs of all lengths: their passes read what is
        offloaded.
        """
        return self.endless and self.config.experts is not None

    @property
    def overlap_share(self) -> float:
        """Share of the shorter resources' time that hides behind the longest."""
        return self.hardware.overlap if self.overlap else 0.0

    @cached_property
    def product_dtype(self) -> str:
        """Key of the processor's rates of products in the compute dtype."""
        half = [name for name in self.hardware.compute_processor.matmul_flops if name != "float32"]
        return half[0] if self.compute_bytes == 2 and half else "float32"

    @cached_property
    def product_flops(self) -> Curve:
        """Rate of products by rows of x."""
        curves = self.hardware.compute_processor.matmul_flops
        if self.multiplies_as_stored and self.precision.weights is None:
            product = PRODUCT_BY_WEIGHT.get(self.storage_dtype, self.product_dtype)
            return curves.get(product, curves[self.product_dtype])
        return curves[self.product_dtype]

    def capacity(self, tier: Tier) -> float:
        """Bytes of a tier that the machine has."""
        hardware = self.hardware
        if tier == "gpu":
            return float(hardware.gpu.memory_bytes) if hardware.gpu else 0.0
        return float(hardware.cpu.memory_bytes if tier == "cpu" else hardware.disk.bytes)

    def largest_limit(self, tier: Tier) -> float:
        """Bytes of a tier that leave the machine its margin, on a disk the least one of what is
        free.
        """
        capacity = self.capacity(tier)
        return without_margin(capacity, capacity if tier != "disk" else 0)

    def usable(self, tier: Tier) -> float:
        """Bytes of a tier that a plan may fill: a limit above the capacity does not count."""
        return min(self.limits[tier], self.capacity(tier))

    # --- Weights. A pass loads layers and head; of the embedding table it only gathers rows. ---
    @cached_property
    def storage(self) -> StorageSizes:
        return storage_sizes(self.config, self.precision)

    @cached_property
    def layer_format(self) -> StoredFormat | None:
        """Format of most matrices of the layers; None for 16 bits."""
        formats = Counter(
            self.precision.format_of(name)
            for name in self.storage.matrices
            if name.startswith("layers.")
        )
        return formats.most_common(1)[0][0]

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(self.storage.matrices.values())

    @cached_property
    def copies_bytes(self) -> int:
        """Bytes of all weights where they are kept in the compute dtype."""
        return self.storage.num_values * self.compute_bytes

    @cached_property
    def layer_elements(self) -> float:
        """Weights of a layer, on average."""
        return sum(map(self._stage_elements, layer_stages(self.config))) / self.config.num_layers

    @cached_property
    def between_elements(self) -> float:
        return between_elements(self.config)

    @cached_property
    def layer_bytes(self) -> float:
        """Bytes of a layer as stored, on average."""
        return (
            sum(self.storage.stages[stage].num_bytes for stage in layer_stages(self.config))
            / self.config.num_layers
        )

    @cached_property
    def layer_matrices(self) -> float:
        """Matrices of a layer without its experts, on average."""
        names = (
            name
            for stage in layer_stages(self.config)
            for name, shape in self.config.stage_tensors(stage)
            if len(shape) > 1 and expert_of(name) is None
        )
        return sum(1 for _ in names) / self.config.num_layers

    # --- Experts. A pass reads those that its tokens select; figures of a layer are means over all
    # layers. ---
    @cached_property
    def layer_expert_bytes(self) -> float:
        """Bytes of a layer's experts as stored."""
        return (
            sum(self.storage.stages[stage].expert_bytes for stage in layer_stages(self.config))
            / self.config.num_layers
        )

    @cached_property
    def layer_expert_elements(self) -> float:
        """Weights of a layer's experts."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        layers = self.config.num_layers
        with_experts = sum(self.config.moe(layer) is not None for layer in range(layers))
        return with_experts * experts.count * self.config.expert_elements / layers

    def experts_used(self, tokens: float) -> float:
        """Share of a layer's experts that `tokens` tokens select, on average; 1 without experts."""
        experts = self.config.experts
        if experts is None:
            return 1.0
        return (
            expected_experts(experts.count, experts.per_token, tokens, self.expert_skew)
            / experts.count
        )

    @cached_property
    def expert_flops_per_token(self) -> float:
        """FLOPs of all layers' experts for one token."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        return (
            2
            * self.layer_expert_elements
            * self.config.num_layers
            * experts.per_token
            / experts.count
        )

    def expert_rows(self, tokens: float) -> float:
        """Tokens of one product with an expert, of a batch of `tokens` tokens."""
        experts = self.config.experts
        if experts is None:
            return tokens
        return tokens * experts.per_token / (experts.count * self.experts_used(tokens))

    def most_passes(self, shape: BlockShape) -> int:
        """Return how often a block's prompts may be divided so that tokens whose experts are
        offloaded have room.

        A pass has three times as many tokens of prompts as sequences may decode along.
        """
        divides = self.config.experts is not None and shape.schedule.reads_once
        return max(1, int(self.workload.mean_computed / 3)) if divides else 1

    @cached_property
    def batch_tokens(self) -> int:
        """Prompt tokens of one batch: fewer where experts are offloaded."""
        streams = (
            self.config.experts is not None
            and self.stored_bytes > self.ranks * self.limits[self.compute_tier]
        )
        return (
            min(self.max_batch_tokens, STREAMED_BATCH_TOKENS) if streams else self.max_batch_tokens
        )

    @cached_property
    def offloads_only_experts(self) -> bool:
        """Whether the compute tier has room for half as much again as what every token needs."""
        dense_bytes = self.stored_bytes - self.layer_expert_bytes * self.config.num_layers
        return (
            self.config.experts is not None
            and 1.5 * dense_bytes / self.ranks <= self.limits[self.compute_tier]
        )

    @cached_property
    def head_elements(self) -> int:
        """Weights that the head multiplies with, the table that it borrows included."""
        table = self.config.vocab_size * self.config.embed_size if borrows_table(self.config) else 0
        return self._stage_elements(HEAD) + table if self.config.has_head else 0

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of these as stored."""
        table = self.storage.matrices[EMBED_TABLE] if borrows_table(self.config) else 0
        return self.storage.stages[HEAD].num_bytes + table if self.config.has_head else 0

    def _stage_elements(self, stage: str) -> int:
        """Values of a stage's matrices."""
        return sum(
            math.prod(shape) for _, shape in self.config.stage_tensors(stage) if len(shape) > 1
        )

    # --- KV cache ---
    @property
    def kv_elements(self) -> int:
        """Keys and values of one position in all layers that store them."""
        return 2 * self.config.num_cache_layers * self.config.kv_size

    @property
    def read_kv_elements(self) -> int:
        """Keys and values of one position that all layers read: some read those of another."""
        return 2 * self.config.num_attention_layers * self.config.kv_size

    @property
    def cache_bytes(self) -> float:
        """Bytes of a key's or value's element as stored."""
        cache = self.precision.cache
        return self.compute_bytes if cache is None else cache.bytes_per_value(self.compute_bytes)

    @property
    def fetched_cache_bytes(self) -> float:
        """The same, averaged over what decoding fetches: sparse attention leaves most values
        out.
        """
        cache = self.precision.cache
        return (
            self.compute_bytes
            if cache is None
            else cache.bytes_per_value(self.compute_bytes, cache.value_share)
        )

    @cached_property
    def window_tokens(self) -> int:
        """Tokens of a residual window, which rests beside what is quantized; 0 without one."""
        return 0 if self.precision.cache is None else self.precision.cache.window_tokens

    def window_bytes(self, elements: float, tokens: float | None = None) -> float:
        """Bytes of so many tokens of a residual window, or of all; elements: of a token's keys and
        values.
        """
        copies = 0 if self.precision.cache is None else self.precision.cache.window_copies
        return (
            (self.window_tokens if tokens is None else tokens)
            * copies
            * elements
            * self.compute_bytes
        )

    def older_positions(self, context: float) -> float:
        """Positions of `context` that decoding reads quantized, on average, or all without a
        residual window.
        """
        cache, visible = self.precision.cache, self.visible_positions(context)
        if cache is None or not self.window_tokens:
            return visible
        return max(0.0, visible - (cache.residual_window + self.window_tokens) / 2)

    def visible_positions(self, context: float) -> float:
        """Positions of `context` that a token sees, averaged over layers with and without a
        window.
        """
        windows = self.config.windows
        if not windows:
            return context
        return sum(context if window is None else min(context, window) for window in windows) / len(
            windows
        )

    @property
    def attention_pairs(self) -> float:
        """Computed prompt tokens x positions they see, per sequence and layer (the full square, as
        kernels compute).
        """
        workload = self.workload
        return workload.mean_computed * self.visible_positions(
            workload.mean_pairs / workload.mean_computed
        )

    # --- What this engine does. `benchmarks.paper` overrides these members to describe other
    # engines. ---
    @cached_property
    def copies_fit(self) -> bool:
        """Whether fully resident weights are kept in the compute dtype."""
        return keeps_copies(self.storage, self.machine)

    @cached_property
    def staging(self) -> StagingSizes:
        """Memory through which offloaded weights reach the compute tier."""
        return staging_sizes(self.storage, int(self.limits[self.compute_tier]))

    @cached_property
    def ring_bytes(self) -> float:
        """Bytes of the staging ring for offloaded weights; a larger layer is loaded again for every
        batch.
        """
        return self.staging.ring

    @property
    def host_attention_tiers(self) -> tuple[Tier, ...]:
        """Offloaded tiers whose cache the host attends to in decoding, so that it is not
        fetched.
        """
        on_host = (
            self.cpu_attention and self.hardware.gpu is not None and self.precision.cache is None
        )
        return ("cpu",) if on_host else ()

    def link_rates(self, link: Link, tier: Tier) -> tuple[float, float]:
        """Bytes per second of weights on `tier` to the gpu, and of caches there.

        Weights on the disk are read into pinned memory, caches into other memory.
        """
        pinned, pageable = link.to_gpu_bytes_s, link.pageable_to_gpu_bytes_s
        if not self.pins_host_memory:
            return pageable, pageable
        return pinned, pageable if tier == "disk" else pinned

    def fetched_positions(self, tier: Tier, attended: float, stored: float) -> float:
        """Positions of a sequence's cache that a decode step fetches to the gpu.

        attended: that it attends to, on average.
        stored: that its slot has. From half of them on, pinned memory is fetched whole: one copy
            without gaps is faster (`kv_cache.fetched_storage`).
        """
        return stored if tier == "cpu" and attended > stored / 2 else attended

    def conversions(self, batches: float) -> float:
        """Times that one pass over `batches` batches converts a weight to the compute dtype."""
        return batches

    def decode_steps(self, batches: float, sequences: float, resident: bool) -> float:
        """Launches of one decode pass in one layer: each cache block attends by itself.

        resident: all weights are on the compute tier, and then as a rule the cache is, whose blocks
            are larger there.
        """
        return batches + math.ceil(
            sequences / (LARGE_BLOCK_SEQUENCES if resident else BLOCK_SEQUENCES)
        )

    def staging_memory(
        self, shape: BlockShape, sequences: float, resident: bool
    ) -> dict[Tier, tuple[Affine, ...]]:
        """Bytes by tier besides what is stored there: alternatives, each of which must fit.

        sequences: of the block.
        resident: all weights are on the compute tier.
        """
        staging_bytes = 0 if resident else self.ring_bytes + self.staging.experts
        if not resident and self.hardware.gpu is None:
            staging_bytes += self._loader_buffer_bytes
        vector_bytes = self.storage.vector_bytes(self.compute_bytes) / self.ranks
        staging = affine(vector_bytes + staging_bytes)
        if not shape.schedule.is_single_pass:
            staging += affine(sequences * state_bytes(self.config) / self.ranks)
        # Two layers of an offloaded cache block: the one in use and the next.
        cache_bytes = self.workload.longest * self.kv_elements * self.compute_bytes
        slot_bytes = cache_bytes + self.window_bytes(self.kv_elements)
        block_bytes = 2 * min(BLOCK_SEQUENCES, shape.gpu_batch_size) * slot_bytes
        for tier, column in CACHE.items():
            if tier not in (self.compute_tier, *self.host_attention_tiers):
                staging[column] += block_bytes / self.config.num_cache_layers
        if resident or self.hardware.gpu is None:
            return {self.compute_tier: (staging,)}
        return {self.compute_tier: (staging,), "cpu": (affine(self._loader_buffer_bytes),)}

    @cached_property
    def _loader_buffer_bytes(self) -> int:
        return loader_buffer_bytes(self.storage, self.hardware.gpu is not None)

    @cached_property
    def workspace(self) -> Workspace:
        converts = self.precision.packs or self.compute_bytes > 2
        return Workspace(
            self.config,
            self.compute_bytes,
            self.compute_tier,
            self.precision.cache,
            converts=converts,
        )

    def workspace_bytes(self, shape: BlockShape, sequences: float) -> float:
        """Bytes that computing takes on the compute tier besides what its limit counts.

        sequences: of the block.
        """
        workload, workspace = self.workload, self.workspace
        most = max(self.batch_tokens, workload.longest_prompt)
        prompt_tokens = int(min(shape.gpu_batch_size * workload.mean_computed, most))
        decoding = min(sequences, shape.gpu_batch_size)
        largest = max(
            workspace.layer(prompt_tokens, int(workload.longest_prompt), 0),
            workspace.layer(int(decoding), 1, int(decoding * workload.longest)),
        )
        return largest + MAX_TRANSFER_BYTES
