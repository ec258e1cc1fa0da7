"""All weights of a model on their tiers, and the operators of a stage (embedding, layer, head) that
the decoder gets.

Vectors are resident in the compute dtype. A resident matrix has its storage format (`matrices`), or
the compute dtype if there is room, which products need not convert. Of an offloaded table only the
rows that a batch looks up are fetched. An offloaded matrix takes three steps:

    load      checkpoint -> disk -> matrices         once
    stream    matrices -> prefetcher -> staging      in every pass, ahead of its use
    compute   weights -> linear                      waits until its rows are in the staging ring

Offloaded experts are brought whole, after the router has chosen them (`offload.experts`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.concurrency import stop_point
from flexgen_helm.hardware.threads import ThreadGovernor
from flexgen_helm.kernels.amx import amx_matmuls
from flexgen_helm.models.config import (
    EMBED,
    EMBED_TABLE,
    HEAD,
    HEAD_MATRIX,
    expert_number,
    expert_of,
    stage_names,
    tensor_shapes,
)
from flexgen_helm.models.decoder import StageWeights, TableRows
from flexgen_helm.models.routing import RowExperts
from flexgen_helm.offload.experts import Expert, ExpertStreamer
from flexgen_helm.offload.linear import dequantize_tiled, join_rows, tiled_linear
from flexgen_helm.offload.matrices import (
    DiskMatrix,
    GatheredMatrix,
    MatrixLoader,
    OffloadedMatrix,
    buffered_rows,
)
from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.prefetcher import (
    StagingRing,
    StreamedMatrix,
    StreamedRows,
    WeightPrefetcher,
    fits,
    ring_bytes,
)
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.staging import gather_bytes
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.progress import ProgressPhase, report
from flexgen_helm.quant.dequantization import dequantize_into
from flexgen_helm.quant.formats import StoredFormat
from flexgen_helm.scheduling.stage_visits import StageVisit
from flexgen_helm.shared_sizes import ALL_EXPERTS_FROM, NUM_LOADERS, aligned
from flexgen_helm.tiers import Tier

# Most and fewest bytes of a unit that is loaded: enough for the full rate of disk and link; smaller
# ones only if they let a whole stage fit into the staging ring.
_MAX_UNIT_BYTES, _MIN_UNIT_BYTES = 32 << 20, 1 << 20


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of the model on its tier.

    rows, width: of the unpacked matrix.
    fmt: how it is packed; None if it is not.
    resident: on the compute device; None if it is offloaded.
    offloaded: None if it is resident.
    expert: the expert whose matrix it is, if that is offloaded.
    order: which row of the matrix is each output [rows]; None if all are in order.
    """

    rows: int
    width: int
    fmt: StoredFormat | None
    resident: Tensor | None = None
    offloaded: OffloadedMatrix | None = None
    expert: str | None = None
    order: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored."""
        stored = self.resident if self.resident is not None else self.offloaded
        assert stored is not None
        return stored.dtype


class TieredWeights:
    """The weights of a model, each matrix on the tier that its placement names.

    tensors: by canonical name.
    stacks: resident matrices of all experts of a layer, as `MatrixLoader.stacks`.
    dtype: the compute dtype.
    streamer: of offloaded experts; None if there are none.
    batch_invariant: the order of a product's sums does not depend on the number of rows.

    While loading, one more tensor is in memory; weight files are written in tiles.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tiers: TransferManager,
        placement: Placement,
        dtype: torch.dtype,
        threads: ThreadGovernor | None = None,
    ) -> None:
        """placement: of the layers to load.

        dtype: the compute dtype, which has all values of 16-bit dtypes.
        threads: chooses the threads that quantize; None where a device computes.

        Raises `MemoryLimitError`, `CheckpointError` and `OffloadError`, and then holds nothing.
        """
        self._config, self._tiers, self.dtype = placement.model.config, tiers, dtype
        self.batch_invariant = False
        self.tensors: dict[str, Weight] = {}
        # closed in reverse: the prefetcher, then each matrix before its claim
        self._resources = ExitStack()
        self._prefetcher: WeightPrefetcher | None = None
        self.streamer: ExpertStreamer | None = None
        self._experts: dict[str, Expert] = {}  # the offloaded ones
        # offloaded matrices besides experts, by stage
        self._streamed: dict[str, list[StreamedMatrix]] = {}
        loader = MatrixLoader(
            checkpoint, tiers, placement.model.precision, dtype, placement.streams_weights
        )
        self.stacks = loader.stacks
        self._resources.callback(loader.close)
        try:
            self._load(loader, placement, threads)
            self._group_experts()
            if any(weight.offloaded and not weight.expert for weight in self.tensors.values()):
                self._prefetcher = self._start_prefetcher(placement.staging.ring)
            if self._experts:
                self.streamer = self._start_streamer(placement.staging.experts)
            self._streamed = {
                stage: self._streamed_matrices(stage, placement.staging.ring)
                for stage in self._stages
            }
            self._shared_stages = {
                stage
                for stage, experts in self._stage_experts.items()
                if not self._experts.keys().isdisjoint(experts)
                and fits(self._streamed[stage], placement.staging.ring)
            }
            if buffers := self._loader_buffer_bytes():
                self._claim("cpu", "buffers", buffers)
        except BaseException:
            self.close()
            raise

    def _load(
        self, loader: MatrixLoader, placement: Placement, threads: ThreadGovernor | None
    ) -> None:
        """Bring each tensor to its tier."""
        shapes, tiers = tensor_shapes(self._config), self._tiers
        # In bytes of 16 bits, whatever the format: a packed matrix takes no less time.
        done, total = 0, sum(2 * prod(shape) for shape in shapes.values())
        for name, shape in shapes.items():
            stop_point()
            report(ProgressPhase(loader.phase, done=done, total=total))
            done += 2 * prod(shape)
            if threads is not None:
                threads.adapt()
            tier = placement.weights.get(name, tiers.compute_tier)
            if tier == tiers.compute_tier or len(shape) == 1:
                self.tensors[name] = self._load_resident(
                    loader, name, shape, placement.compute_copies
                )
            else:
                self._claim(tier, "weights", loader.num_bytes(name))
                matrix = loader.to_disk(name) if tier == "disk" else loader.to_host(name)
                fmt, expert, order = loader.format_of(name), expert_of(name), loader.order(name)
                self.tensors[name] = Weight(shape[0], shape[-1], fmt, None, matrix, expert, order)
        report(ProgressPhase("load", done=total, total=total))
        if self._config.tied_head and self._config.has_head:
            self.tensors[HEAD_MATRIX] = self.tensors[EMBED_TABLE]

    def _group_experts(self) -> None:
        """Group the offloaded matrices of experts by expert, and the names of all experts by stage,
        in the order of their numbers.
        """
        by_expert: dict[str, dict[str, OffloadedMatrix]] = {}
        for name, weight in self.tensors.items():
            if weight.offloaded and weight.expert:
                by_expert.setdefault(weight.expert, {})[name] = weight.offloaded
        self._experts = {expert: Expert(matrices) for expert, matrices in by_expert.items()}
        self._stages = stage_names(self._config)
        self._stage_experts = {
            stage: sorted(
                {
                    expert
                    for name, _ in self._config.stage_tensors(stage)
                    if (expert := expert_of(name))
                },
                key=expert_number,
            )
            for stage in self._stages
        }

    @property
    def are_converted(self) -> bool:
        """Whether a product brings its weights to the compute dtype, from another dtype or
        packed.
        """
        # A packed matrix is of bytes.
        return any(
            weight.dtype != self.dtype
            for name, weight in self.tensors.items()
            if not _is_table(name) and (weight.resident is None or weight.resident.dim() > 1)
        )

    def prefetch(self, visits: Generator[StageVisit, None, None]) -> None:
        """Begin to load what the next visits need, as far ahead as the staging ring has room. Does
        not block.

        visits: of the rest of a pass, and of the next pass if one is certain to follow; each call
            takes some more.
        """
        prefetcher = self._prefetcher
        while prefetcher is not None and (prefetcher.wants_more or prefetcher.has_expected):
            visit = next(visits, None)
            if visit is None:
                return
            stage = self._stages[visit.stage]
            if not self._streamed[stage]:
                continue
            # a visit of the next pass, while those of this one fill the ring
            may_wait = visit.uses is None and not prefetcher.wants_more
            if may_wait or not prefetcher.start(stage, self._streamed[stage], visit.uses):
                visits.close()  # with this visit: the next pass announces it again
                return

    def shares_experts(self, stage: str) -> bool:
        """Whether the batches of a visit use a stage together, so that each of its offloaded
        experts is read once.

        What else the stage needs must stay in the staging ring meanwhile.
        """
        return stage in self._shared_stages

    def holds_experts(self, stage: str) -> bool:
        """Whether all experts of a stage rest on a device."""
        return self._tiers.device.type != "cpu" and self._experts.keys().isdisjoint(
            self._stage_experts[stage]
        )

    @contextmanager
    def stage(self, name: str, is_repeated: bool = False) -> Iterator[StageWeights]:
        """Use a stage once, in the order of the visits. Its products wait for their matrices and
        raise load errors.

        is_repeated: several batches use it together.
        """
        prefetcher = self._prefetcher if self._streamed[name] else None
        with (
            nullcontext()
            if prefetcher is None
            else prefetcher.using(name, is_repeated) as streamed_rows
        ):
            yield _StageView(self, name, streamed_rows, is_repeated)
        if self.streamer is not None:
            self.streamer.finish()

    def cancel(self) -> None:
        """Forget all prefetches, after an error in a pass; waits for loads that are under way."""
        if self._prefetcher is not None:
            self._prefetcher.cancel()
        if self.streamer is not None:
            self.streamer.cancel()

    def use_experts(self, stage: str, numbers: Sequence[int], num_tokens: int) -> None:
        """Begin to load experts of a stage, by number, for `num_tokens` tokens; and those of the
        next behind them.

        The next stage is taken to need all of its own if this one needs nearly all.
        """
        experts = self._stage_experts[stage]
        wanted = [experts[number] for number in numbers]
        following = self._stages.index(stage) + 1
        offloaded = [name for name in wanted if name in self._experts]
        routed_bytes = sum(self._experts[name].num_bytes for name in offloaded)
        self._tiers.stats.count_experts(num_tokens, len(wanted), routed_bytes)
        if self.streamer is not None:
            needs_all = len(wanted) >= ALL_EXPERTS_FROM * len(experts)
            expected = (
                self._stage_experts[self._stages[following]]
                if needs_all and following < len(self._stages)
                else []
            )
            self.streamer.use(offloaded, [name for name in expected if name in self._experts])

    def close(self) -> None:
        """Release all memory and files; harmless when called again."""
        self.tensors.clear()
        self.stacks.clear()
        self._experts.clear()
        self._streamed.clear()
        self._prefetcher = self.streamer = None
        self._resources.close()

    def _claim(self, tier: Tier, kind: str, num_bytes: int) -> None:
        ledger = self._tiers.ledgers[tier]
        self._resources.callback(ledger.release, ledger.claim(kind, num_bytes))

    def _load_resident(
        self, loader: MatrixLoader, name: str, shape: tuple[int, ...], compute_copies: bool
    ) -> Weight:
        """Load a tensor to the compute device; with `compute_copies` also a matrix in the compute
        dtype.
        """
        fmt, keeps_format = loader.format_of(name), len(shape) > 1 and not compute_copies
        dtype = torch.float32 if self._config.has_float32(name) else self.dtype
        num_bytes = loader.num_bytes(name) if keeps_format else prod(shape) * dtype.itemsize
        self._claim(self._tiers.compute_tier, "weights", num_bytes)
        if keeps_format:
            resident = loader.to_device(name)
        elif fmt is None:
            resident = loader.to_device(name, dtype)
        else:
            packed = loader.to_device(name)
            resident, fmt = dequantize_tiled(packed, fmt, shape[0], shape[1], self.dtype), None
        return Weight(shape[0], shape[-1], fmt, resident, order=loader.order(name))

    def _start_streamer(self, expert_bytes: int) -> ExpertStreamer:
        slot_bytes = max(expert.num_bytes for expert in self._experts.values())
        shape = max(1, min(len(self._experts), expert_bytes // slot_bytes)), slot_bytes
        slots = self._staging_memory(prod(shape)).view(shape)
        streamer = ExpertStreamer(self._experts, slots, self._tiers)
        self._resources.callback(streamer.cancel)
        return streamer

    def _start_prefetcher(self, capacity: int) -> WeightPrefetcher:
        ring = StagingRing(capacity, self._staging_memory(aligned(capacity)))
        prefetcher = WeightPrefetcher(ring, self._tiers)
        self._resources.callback(prefetcher.cancel)
        return prefetcher

    def _staging_memory(self, num_bytes: int) -> Tensor:
        """Claim and allocate memory of the compute device."""
        self._claim(self._tiers.compute_tier, "staging", num_bytes)
        copy_engine = self._tiers.copy_engine
        return (
            pages(num_bytes)
            if copy_engine is None
            else copy_engine.device_memory((num_bytes,), torch.uint8)
        )

    def _loader_buffer_bytes(self) -> int:
        """Return the bytes of the loaders' buffers in host memory: each loader has one to gather
        rows in, and one for what it brings from the disk to a device.
        """
        loaders = NUM_LOADERS if self._tiers.overlap else 1
        offloaded = [
            (weight.offloaded, weight.expert)
            for weight in self.tensors.values()
            if weight.offloaded
        ]
        gathered = loaders * max(
            (
                gather_bytes(matrix.num_bytes)
                for matrix, _ in offloaded
                if isinstance(matrix, GatheredMatrix)
            ),
            default=0,
        )
        if self._tiers.copy_engine is None:
            return gathered
        experts = [matrix.buffer_bytes(matrix.shape[0]) for matrix, expert in offloaded if expert]
        streamed: list[int] = []
        if any(isinstance(matrix, DiskMatrix) and not expert for matrix, expert in offloaded):
            streamed = [
                ring_bytes(min(matrix.tile_rows, buffered_rows(matrix.row_bytes)), matrix.row_bytes)
                for matrices in self._streamed.values()
                for matrix in matrices
            ]
        return gathered + loaders * (max(streamed, default=0) + max(experts, default=0))

    def _streamed_matrices(self, stage: str, capacity: int) -> list[StreamedMatrix]:
        """Return the offloaded matrices of a stage, in units that suit a staging ring of `capacity`
        bytes.

        Three units fit into the ring, so that one is used while others are loaded. Units are halved
        if that lets the whole stage fit, because a stage that does not fit is loaded again for
        every batch.
        """
        unit_bytes = max(1, min(_MAX_UNIT_BYTES, capacity // 3 - ring_bytes(0, 0)))
        largest = matrices = self._cut(stage, unit_bytes)
        while not fits(matrices, capacity):
            unit_bytes //= 2
            if unit_bytes < _MIN_UNIT_BYTES:
                return largest
            matrices = self._cut(stage, unit_bytes)
        return matrices

    def _cut(self, stage: str, unit_bytes: int) -> list[StreamedMatrix]:
        """Return the offloaded matrices of a stage without its experts, cut into units of at most
        `unit_bytes`, in the decoder's order.
        """
        names = [
            name
            for name, shape in self._config.stage_tensors(stage)
            if len(shape) > 1 and not _is_table(name)
        ]
        if stage == HEAD and self._config.tied_head:
            names.append(HEAD_MATRIX)
        streamed = []
        for name in names:
            weight = self.tensors[name]
            if (matrix := weight.offloaded) and not weight.expert:
                rows, row_bytes = matrix.shape[0], matrix.row_bytes
                short_name = name.removeprefix(f"{stage}.").removesuffix(".weight")
                tile_rows = max(1, min(rows, unit_bytes // row_bytes))
                streamed.append(
                    StreamedMatrix(short_name, rows, row_bytes, tile_rows, matrix.fetch)
                )
        return streamed


class _StageView(StageWeights):
    """One use of one stage.

    streamed_rows: of its offloaded matrices; None if there are none.
    """

    def __init__(
        self,
        weights: TieredWeights,
        stage: str,
        streamed_rows: StreamedRows | None,
        is_repeated: bool,
    ) -> None:
        self._weights, self._tensors, self._stage = weights, weights.tensors, stage
        self._streamed_rows = streamed_rows
        self.repeatable = streamed_rows is None or is_repeated
        self.holds_experts = weights.holds_experts(stage)

    def use_experts(self, experts: Sequence[int], num_tokens: int) -> None:
        self._weights.use_experts(self._stage, experts, num_tokens)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{self._stage}.{name}.weight"], self.vector(f"{name}.bias")
        if weight.order is None:
            return self._product(name, weight, x, bias)
        y = self._product(name, weight, x, None).index_select(1, weight.order)
        return y if bias is None else y.add_(bias)

    def _product(self, name: str, weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with a matrix whose rows are in the order in which they rest."""
        fmt, out_size, invariant = weight.fmt, weight.rows, self._weights.batch_invariant
        packed = None if fmt is None else (fmt, out_size)
        if weight.resident is not None:
            return tiled_linear(x, weight.resident, bias, packed, invariant)
        if weight.expert is not None:
            assert self._weights.streamer is not None
            matrix = self._weights.streamer.matrix(weight.expert, f"{self._stage}.{name}.weight")
            return tiled_linear(x, matrix, bias, packed, invariant)
        assert self._streamed_rows is not None
        units = self._streamed_rows(name)
        stripe_rows = 1 if fmt is None else fmt.stripe_rows

        def parts() -> Iterator[tuple[int, Tensor]]:
            for first_stripe, rows in units:
                first = first_stripe * stripe_rows
                # the last stripe is padded
                count = min(rows.shape[0] * stripe_rows, out_size - first)
                part = None if bias is None else bias[first : first + count]
                stored = None if fmt is None else (fmt, count)
                yield first, tiled_linear(x, rows, part, stored, invariant)

        return join_rows(parts(), x, out_size)

    def expert_linear(self, experts: RowExperts, name: str, x: Tensor) -> Tensor:
        stack = self._weights.stacks.get(f"{self._stage}.{name}.weight")
        if stack is None:
            return super().expert_linear(experts, name, x)
        stacked = torch.arange(len(stack), device=x.device)
        # rows are in the order of their experts' numbers
        ends = torch.searchsorted(experts.numbers, stacked, right=True, out_int32=True)
        return torch.nn.functional.grouped_mm(x, stack.mT, offs=ends)

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        matrices = [self._tensors[f"{self._stage}.{name}.weight"] for name in names]
        plain = [weight for weight in matrices if weight.fmt is None and weight.order is None]
        resident = [weight.resident for weight in plain if weight.resident is not None]
        products = None
        if len(resident) == len(names):
            products = amx_matmuls(x, resident, self._weights.batch_invariant)
        if products is None:
            return super().linears(names, x)
        for name, y in zip(names, products):
            if (bias := self.vector(f"{name}.bias")) is not None:
                y.add_(bias)
        return products

    def vector(self, name: str) -> Tensor | None:
        weight = self._tensors.get(f"{self._stage}.{name}")
        return None if weight is None else weight.resident

    def lookup(self, name: str, rows: TableRows) -> Tensor:
        table = self._tensors[f"{self._stage}.{name}.weight"]
        if table.resident is not None:
            stored = table.resident.index_select(0, rows.on_device)
        else:
            assert table.offloaded is not None
            stored = table.offloaded.gather(rows.on_host)
        if table.fmt is None:
            return stored.to(self._weights.dtype)
        # A row is a stripe of its own (`Precision.tables`).
        out = torch.empty(
            (stored.shape[0], table.width), dtype=self._weights.dtype, device=stored.device
        )
        return dequantize_into(stored, table.fmt, out)


def _is_table(name: str) -> bool:
    """Return whether rows of the matrix are looked up, rather than multiplied."""
    return name.startswith(f"{EMBED}.") and "project" not in name
