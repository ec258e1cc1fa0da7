"""Place the weights of an opened model, and load them: which layers a rank of a pipeline has, how
many bytes each tier has room for, and on which tier each weight rests.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.device import dtype_name
from flexgen_helm.engine.machine_profile import EngineProfile
from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.rank import Rank
from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.files import existing_folder, require_writable
from flexgen_helm.hardware.host_memory import host_memory
from flexgen_helm.hardware.threads import ThreadGovernor
from flexgen_helm.kernels.vector_products import multiplies_as_stored
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.offload.copy_engine import CudaCopyEngine
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.offload.rate_limit import DiskRates, RateLimit
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.offload.weights import TieredWeights
from flexgen_helm.offload.weights_at_rest import WeightsAtRest
from flexgen_helm.paths import state_dir
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.planner import Planner
from flexgen_helm.planner.policy import Choices
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.progress import Message, report
from flexgen_helm.system_errors import GIVEN_FOLDERS
from flexgen_helm.tiers import TIERS, MemoryLimits, Tier, limit_flag, without_margin
from flexgen_helm.units import exact_size, size


@dataclass(frozen=True)
class PlacedModel:
    """Where the weights of a model rest, or will once they are loaded.

    planner: plans the runs of the whole model.
    part: the layers of this rank.
    placement: the tier of each of its weights.
    tiers: whose memory the weights are loaded into.
    """

    planner: Planner
    part: ModelConfig
    placement: Placement
    tiers: TransferManager

    def load_weights(self, model: OpenedModel, threads: ThreadGovernor | None) -> TieredWeights:
        """Load the weights into their tiers, which are closed after an error.

        threads: choose those that load, and are given back; None where a device computes.
        """
        try:
            weights = TieredWeights(
                model.checkpoint, self.tiers, self.placement, model.dtype, threads
            )
            weights.batch_invariant = model.options.batch_invariant
            return weights
        except BaseException:
            self.tiers.close()
            raise
        finally:
            if threads is not None:
                threads.release()


def place_model(model: OpenedModel, rank: Rank) -> PlacedModel:
    """Place the weights of a rank on tiers within the limits.

    Raises `MemoryLimitError` with the missing bytes, and `UsageError` for an offload folder that
    cannot be written.
    """
    options, config, device = model.options, model.checkpoint.config, model.device
    folder = offload_folder(options)
    at_rest = WeightsAtRest(model.checkpoint, model.precision, folder)
    capacities = tier_capacities(options.limits, folder, rank.local_size)
    if device.type == "cuda":
        converts = model.precision.packs or model.dtype != model.checkpoint.storage_dtype
        workspace = Workspace(
            config, model.dtype.itemsize, "gpu", model.precision.cache, converts=converts
        )
        capacities["gpu"] = gpu_capacity(options.limits.gpu, device, workspace)

    def with_weight_files(sizes: Mapping[str, int]) -> dict[Tier, int]:
        """Count the disk's room for these matrices that their weight files take already."""
        written = at_rest.num_bytes(sizes, with_written=options.limits.disk is None)
        return {**capacities, "disk": capacities["disk"] + written}

    matrices = StorageSizes(config, model.precision).matrices
    if rank.size == 1:  # of several, none knows yet which layers it has
        beyond_memory = sum(matrices.values()) - capacities["gpu"] - capacities["cpu"]
        in_files = at_rest.num_bytes(matrices, with_written=True)
        require_room(folder, beyond_memory - in_files)
    planner = _planner(model, with_weight_files(matrices), folder)
    counts = None if rank.size == 1 else options.pipeline_layers
    part = config.part(divide_layers(config, rank.size, counts)[rank.number])
    planner.take_layers(part)
    placement = planner.place(model.name)
    # Files of matrices that are placed elsewhere give the disk no room.
    limits = with_weight_files(placement.bytes_on("disk"))
    ledgers = {tier: Ledger(tier, limits[tier]) for tier in TIERS}
    disk = None if options.disk_gb_s is None else DiskRates(*map(RateLimit, options.disk_gb_s))
    tiers = TransferManager(
        device, model.compute_tier, ledgers, model.link, folder, options.overlap, disk
    )
    if isinstance(model.link, CudaCopyEngine):
        model.link.limit_device_memory(
            math.inf if options.limits.gpu is None else options.limits.gpu
        )
    return PlacedModel(planner, part, placement, tiers)


def _planner(model: OpenedModel, capacities: Mapping[Tier, int], folder: Path) -> Planner:
    """Return the planner of the whole model on this machine; capacities: bytes of each tier."""
    options, storage_dtype = model.options, model.checkpoint.storage_dtype
    machine = Machine(
        capacities,
        model.compute_tier,
        dtype_name(model.dtype),
        options.overlap,
        options.cpu_attention,
        dtype_name(storage_dtype)
        if model.compute_tier == "cpu" and multiplies_as_stored(storage_dtype)
        else None,
    )
    return Planner(
        model.checkpoint.config,
        model.precision,
        machine,
        Choices(options.fixed_policy, options.fixed_schedule, options.max_latency),
        EngineProfile(capacities, folder, options, model.link),
    )


def offload_folder(options: EngineConfig) -> Path:
    """Return the folder of the disk tier, and remember a named one for errors of the system.

    Raises `UsageError` for one that was named and cannot be written.
    """
    if options.offload_dir is None:
        return state_dir() / "offload"
    folder = GIVEN_FOLDERS["--offload-dir"] = Path(options.offload_dir)
    require_writable(folder, "offload_dir")
    return folder


def require_room(folder: Path, num_bytes: int) -> None:
    """Raise `MemoryLimitError` where the disk of a folder has less room than the weights need that
    fit nowhere else.
    """
    if num_bytes > (free := shutil.disk_usage(existing_folder(folder)).free):
        raise MemoryLimitError(
            f"{folder} has {size(free)} free, and weights need {size(num_bytes)} there: make room, "
            "name another folder with --offload-dir, or raise --cpu-memory"
        )


def tier_capacities(limits: MemoryLimits, folder: Path, num_sharers: int = 1) -> dict[Tier, int]:
    """Return the bytes of each tier for one process: the given limit, otherwise what is free, less
    a margin.

    A limit may exceed what is free in host memory, which some systems grant as it is used.

    limits: of this process.
    num_sharers: processes that share what the machine has free, this one included.
    """
    memory = host_memory()
    _warn_beyond("cpu", limits.cpu, memory.available)
    capacities: dict[Tier, int] = {
        "gpu": 0,
        "cpu": without_margin(memory.available, memory.total) // num_sharers,
        # the least margin: a share of a large disk would be more than the room that many have
        "disk": without_margin(shutil.disk_usage(existing_folder(folder)).free, 0) // num_sharers,
    }
    return {
        tier: capacities[tier] if (limit := getattr(limits, tier)) is None else limit
        for tier in TIERS
    }


def gpu_capacity(limit: int | None, device: torch.device, workspace: Workspace) -> int:
    """Return the bytes of a GPU for weights and caches: the limit, else what is free less a margin.

    What computing needs is taken off.
    """
    free, total = torch.cuda.mem_get_info(device)
    _warn_beyond("gpu", limit, free)
    room = workspace.room_beside(free if limit is None else min(limit, free))
    return min(without_margin(free, total), room) if limit is None else room


def _warn_beyond(tier: Tier, limit: int | None, free: int) -> None:
    if limit is not None and limit > free:
        report(
            Message(
                f"{limit_flag(tier)} allows {exact_size(limit)} and {exact_size(free)} are free "
                "now: lower it, or end other programs"
            )
        )


def divide_layers(
    config: ModelConfig, num_ranks: int, counts: Sequence[int] | None = None
) -> list[range]:
    """Return the layers of each rank: those that `counts` gives, else shares that take about as
    long to decode.

    The head counts by its operations, so the last rank has fewer layers. Raises `UsageError` if a
    rank had no layer.
    """
    layers = config.num_layers
    if counts is None:
        if layers < num_ranks:
            raise UsageError(
                f"{layers} layers cannot be divided among {num_ranks} ranks; start fewer processes"
            )
        counts = _balanced(
            layers, num_ranks, config.head_flops_per_token * layers / config.linear_flops_per_token
        )
    elif len(counts) != num_ranks or sum(counts) != layers or min(counts) < 1:
        raise UsageError(
            f"--pipeline-layers {','.join(map(str, counts))} does not fit {layers} layers and "
            f"{num_ranks} ranks; give {num_ranks} numbers with the sum {layers}"
        )
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts))]


def _balanced(layers: int, num_ranks: int, head: float) -> list[int]:
    """Return layers by rank whose largest share is smallest; head: what the last rank has besides,
    in layers.
    """
    before = num_ranks - 1
    if not before:
        return [layers]
    last = min(
        range(1, layers - before + 1),
        key=lambda count: max(count + head, -(-(layers - count) // before)),
    )
    share, more = divmod(layers - last, before)
    return [share + (rank < more) for rank in range(before)] + [last]
