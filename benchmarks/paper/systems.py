"""The systems of the paper's tables, as their released code manages memory and transfers.

They override what `PlanningProblem` says about this engine; all equations stay those of
`planner.cost_model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flexgen_helm.hardware.profile import HardwareProfile, Link
from flexgen_helm.models.config import layer_stage
from flexgen_helm.planner.affine import CD, CG, HC, HD, WC, WD, Affine, affine
from flexgen_helm.planner.policy import BlockShape
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.precisions import PAPER_GROUPS, PRECISIONS, Precision
from flexgen_helm.tiers import Tier


class CompressedTables(Precision):
    """FlexGen compresses every matrix: embedding table and head too, which our precisions keep in
    16 bits.
    """

    def format_of(self, tensor: str) -> GroupFormat | None:
        return self.weights


COMPRESSED = CompressedTables("FlexGen (c)", PAPER_GROUPS, cache=PRECISIONS["paper-4bit"].cache)
COMPRESSED_WEIGHTS = CompressedTables("FlexGen (w)", PAPER_GROUPS)


def with_page_cache(hardware: HardwareProfile) -> HardwareProfile:
    """Return the machine with the rates of a disk whose files go through a page cache that is
    free.
    """
    disk = hardware.disk
    read, write = disk.read_bytes_s * disk.page_cache, disk.write_bytes_s * disk.page_cache
    return replace(hardware, disk=replace(disk, read_bytes_s=read, write_bytes_s=write))


# Bytes of memory traffic with which plain operations of PyTorch dequantize an element: from the
# three compressed rows.
_TORCH_BYTES = 260 / 9


def with_torch_dequantization(hardware: HardwareProfile) -> HardwareProfile:
    """Return the machine as FlexGen uses it, which has no kernel for its compressed weights and
    cache.
    """
    gpu = hardware.gpu
    if gpu is None:
        return hardware
    return replace(
        hardware, gpu=replace(gpu, dequantize_elements_s=gpu.memory_bytes_s / _TORCH_BYTES)
    )


@dataclass(frozen=True)
class PaperProblem(PlanningProblem):
    """FlexGen and DeepSpeed: page-locked weights, pageable cache and hidden states, no chunked
    prefill.

    FlexGen stages half a layer (attention or feed-forward) at a time. The host attends to a cache
    on the disk too.
    """

    max_batch_tokens: int = 1 << 40

    @property
    def window_tokens(self) -> int:
        return 0

    @property
    def copies_fit(self) -> bool:
        return False

    @property
    def ring_bytes(self) -> float:
        return math.inf  # no stage is loaded twice in a pass

    @property
    def host_attention_tiers(self) -> tuple[Tier, ...]:
        return ("cpu", "disk") if super().host_attention_tiers else ()

    def link_rates(self, link: Link, tier: Tier) -> tuple[float, float]:
        return link.to_gpu_bytes_s, link.pageable_to_gpu_bytes_s

    def fetched_positions(self, tier: Tier, attended: float, stored: float) -> float:
        return attended

    def conversions(self, batches: float) -> float:
        return 1.0

    def decode_steps(self, batches: float, sequences: float, resident: bool) -> float:
        return batches

    def staging_memory(
        self, shape: BlockShape, sequences: float, resident: bool
    ) -> dict[Tier, tuple[Affine, ...]]:
        """The half of a layer in use, and the next one."""
        config, work, prompt = self.config, self.compute_bytes, self.workload.mean_prompt
        layer = self.layer_bytes
        shapes = [shape for _, shape in config.stage_tensors(layer_stage(0)) if len(shape) > 1]
        states = prompt * config.hidden_size * shape.gpu_batch_size * work
        per_element = states / config.hidden_size
        ffn = per_element * max(
            4 * config.hidden_size, config.hidden_size + max(rows for rows, *_ in shapes)
        )
        scores = per_element * (2 * config.hidden_size + config.num_heads * prompt)
        converted = (
            0.0 if self.precision.weights is None else self.layer_elements / len(shapes) * work
        )
        fetched = {WC: layer, WD: layer, HC: states, HD: states}
        from_disk = affine(0.0, {WD: layer, HD: states})
        positions = 0 if shape.schedule.is_single_pass else self.workload.longest
        cache = sequences * positions * self.kv_elements * self.cache_bytes
        batch_of_layer = affine(
            0.0, {CD: cache / config.num_layers / max(1, shape.num_gpu_batches)}
        )
        return {
            "gpu": (affine(ffn + converted, fetched), affine(converted, {**fetched, CG: scores})),
            "cpu": (from_disk, from_disk + batch_of_layer),
        }

    def workspace_bytes(self, shape: BlockShape, sequences: float) -> float:
        return 0.0  # counted by `staging_memory`, within the limit


@dataclass(frozen=True)
class AccelerateProblem(PaperProblem):
    """Accelerate, and FlexGen with `--pin-weight 0`: weights are pageable as well."""

    def link_rates(self, link: Link, tier: Tier) -> tuple[float, float]:
        return link.pageable_to_gpu_bytes_s, link.pageable_to_gpu_bytes_s


SYSTEMS: dict[str, type[PlanningProblem]] = {
    "flexgen": PaperProblem,
    "flexgen-pageable": AccelerateProblem,
    "deepspeed": PaperProblem,
    "accelerate": AccelerateProblem,
    "ours": PlanningProblem,
}
