"""The cost model: seconds and bytes of a block, from a policy, a machine and a workload (the
paper's appendix).

Once block shape and schedule are fixed, everything is linear in the nine placement fractions. So a
cost is an affine form (`planner.affine`), and one set of equations serves the prediction for a
policy and the search's linear program:

    pass  = e max(resources, channels) + (1 - e) sum(resources)
    block = prefill pass + (n - 1) decode passes

The resources are computing, link in, link out, disk read and disk write. The channels are link and
disk with both directions together. e is the share of overlap (0 without).
docs/explanation/cost_model.md has the equations in words. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flexgen_helm.models.config import EMBED_TABLE
from flexgen_helm.planner.affine import CACHE, CD, HD, HIDDEN, ONE, WD, WEIGHTS, Affine, affine
from flexgen_helm.planner.policy import BlockShape
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import ZIGZAG, Schedule
from flexgen_helm.quant.formats import BlockFormat, StoredFormat
from flexgen_helm.shared_sizes import MAX_BATCH_TOKENS, PREFILL_LANES
from flexgen_helm.tiers import TIERS, Tier

RESOURCES = ("compute", "to_gpu", "to_cpu", "disk_read", "disk_write")
# Both directions of the disk or the link together, which bound a pass from below too.
CHANNELS = ("disk", "link")
# Seconds of one pass as affine forms: of `RESOURCES`, of `CHANNELS`, and of the parts that
# 'compute' consists of.
PassTimes = Mapping[str, Affine]
# Factor by which the tokens of a pass may exceed the mean: prompts and batches are not divided.
_LARGEST_PASS = 1.02
# Batches beyond a whole number that are a rounding error of the division.
_ROUNDING = 1e-9


def pass_seconds(times: PassTimes, fractions: Affine, overlap: float) -> float:
    """Evaluate a pass: its longest resource, and what does not hide behind it."""
    seconds = [float(times[name] @ fractions) for name in RESOURCES]
    longest = max(*seconds, *(float(times[name] @ fractions) for name in CHANNELS))
    return overlap * longest + (1 - overlap) * sum(seconds)


@dataclass(frozen=True)
class WeightReads:
    """What passes read of the weights on one tier, as coefficients of the tier's share: as if it
    had all.

    layer_bytes: of matrices of layers that every token needs.
    expert_bytes: of experts, of which a pass reads those that its tokens select.
    head_bytes: of the head, with the table that it borrows; of another embedding only rows are
        gathered.
    matrices, experts: transfers of the first two.
    """

    layer_bytes: float = 0.0
    expert_bytes: float = 0.0
    head_bytes: float = 0.0
    matrices: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class BlockCosts:
    """Costs of a block.

    shape, resident, reads: what they are of, as given to `block_costs`.
    sequences: of the block; for schedules without blocks, of the workload.
    decode_passes: of the block.
    memory: bytes by tier; each form must stay within the tier's limit.
    workspace: bytes by tier that computing takes besides; they count against the machine's memory,
        not the limit.
    """

    shape: BlockShape
    resident: bool
    reads: Mapping[Tier, WeightReads] | None
    sequences: float
    prefill: PassTimes
    decode: PassTimes
    decode_passes: float
    memory: Mapping[Tier, tuple[Affine, ...]]
    workspace: Mapping[Tier, float]


def block_costs(
    problem: PlanningProblem,
    shape: BlockShape,
    resident: bool = False,
    reads: Mapping[Tier, WeightReads] | None = None,
) -> BlockCosts:
    """Write down the equations of one block.

    resident: all weights are on the compute tier, so nothing is staged for them.
    reads: what passes read of each tier where weights are placed already; None if every tier has
        its share of all.
    """
    if shape.schedule.reads_once:
        return _block_by_layers(problem, shape, resident, reads)
    # Each batch passes all layers by itself: a block of one batch, as many times.
    sequences = float(shape.num_sequences)
    single_batch = BlockShape(shape.gpu_batch_size, 1, ZIGZAG, sequences / shape.num_gpu_batches)
    whole = replace(problem, ranks=1) if problem.ranks > 1 else problem
    batch = _block_by_layers(whole, single_batch, resident, reads)
    prefill_turns, decode_turns = _turns(problem.ranks, shape.num_gpu_batches)
    return replace(
        batch,
        shape=shape,
        sequences=sequences,
        prefill=_repeated(batch.prefill, prefill_turns),
        decode=_repeated(batch.decode, decode_turns),
        memory=_stored_memory(problem, single_batch, shape.gpu_batch_size, 1, resident),
    )


def _block_by_layers(
    problem: PlanningProblem,
    shape: BlockShape,
    resident: bool,
    reads: Mapping[Tier, WeightReads] | None,
) -> BlockCosts:
    """Return the costs of a block whose batches all pass a layer before the next one.

    A pipeline divides them into lanes, which reach a rank in turn.
    """
    workload, schedule = problem.workload, shape.schedule
    sequences = float(shape.num_sequences)
    if schedule.is_single_pass and not problem.endless:
        sequences = float(workload.num_sequences)
    # A `_PassCost` computes one lane's share of the block, and reads the weights for it.
    lanes = min(problem.ranks, shape.num_gpu_batches)
    if schedule.is_single_pass and problem.ranks > 1:
        lanes = PREFILL_LANES * problem.ranks
    decode = _PassCost(
        problem,
        shape.gpu_batch_size,
        sequences / lanes,
        prefill=False,
        converts=not (resident and problem.copies_fit),
        slot_positions=_slot_positions(problem, schedule),
        resident=resident,
        reads=reads,
    )
    prefill = replace(decode, sequences=sequences / lanes / shape.passes, prefill=True)
    return BlockCosts(
        shape,
        resident,
        reads,
        sequences,
        _repeated(prefill.times(), shape.passes * _turns(problem.ranks, lanes)[0]),
        decode.times(),
        0.0 if schedule.is_single_pass else workload.mean_output - 1,
        _stored_memory(problem, shape, sequences, lanes, resident),
        dict.fromkeys(TIERS, 0.0)
        | {problem.compute_tier: problem.workspace_bytes(shape, sequences)},
    )


def _repeated(times: PassTimes, count: float) -> PassTimes:
    return {name: count * form for name, form in times.items()}


def _turns(ranks: float, lanes: float) -> tuple[float, float]:
    """Return how many passes of one lane a pass of all lanes lasts, for prefill and for decoding.

    Prefill fills and drains the pipeline (the paper's 'Extension to Multiple GPUs'). Decoding does
    not, but needs a lane for each rank.
    """
    return (lanes + ranks - 1) / ranks, max(lanes, ranks) / ranks


@dataclass(frozen=True)
class _PassCost:
    """One pass of all layers and the head over `sequences` sequences.

    batch_sequences: sequences of one batch.
    converts: weights are stored in another type than products take.
    slot_positions: that a sequence's cache has.
    resident, reads: see `block_costs`.
    """

    problem: PlanningProblem
    batch_sequences: int
    sequences: float
    prefill: bool
    converts: bool
    slot_positions: float
    resident: bool
    reads: Mapping[Tier, WeightReads] | None = None

    @cached_property
    def tokens(self) -> float:
        """Tokens that the pass computes."""
        return self.sequences * (self.problem.workload.mean_computed if self.prefill else 1.0)

    @cached_property
    def batches(self) -> float:
        batch_tokens = float(self.batch_sequences)
        if self.prefill:
            batch_tokens = min(
                batch_tokens * self.problem.workload.mean_computed, self.problem.batch_tokens
            )
        return max(1.0, math.ceil(self.tokens / max(1.0, batch_tokens) - _ROUNDING))

    @cached_property
    def attended_elements(self) -> float:
        """Keys and values that decoding tokens attend to, on average over the block's passes."""
        problem = self.problem
        return problem.read_kv_elements * self.sequences * problem.visible_positions(self.context)

    @property
    def context(self) -> float:
        """Positions of a decoding sequence, on average over the block's passes."""
        return self.problem.workload.mean_prompt + self.problem.workload.mean_output / 2

    def times(self) -> PassTimes:
        """Return the seconds of the pass by resource, channel and part of computing."""
        disk, link = self.problem.hardware.disk, self.problem.hardware.link
        parts = self._compute_parts()
        to_gpu, to_cpu = self._link_times()
        read, write = self._disk_times()
        times = dict(zip(RESOURCES, (sum(parts.values(), affine()), to_gpu, to_cpu, read, write)))
        # Both directions of a channel together take at least (in + out) / (2 duplex).
        times["disk"] = (read + write) / (2 * disk.duplex)
        times["link"] = (to_gpu + to_cpu) / (2 * (link.duplex if link is not None else 1.0))
        return times | parts

    def _compute_parts(self) -> dict[str, Affine]:
        """Cost products, conversions and attention."""
        config, hardware = self.problem.config, self.problem.hardware
        products_s, convert_s = self._product_seconds()
        attention, host_attention = self._attention_seconds()
        slowdown = 1 / (hardware.prefill_share if self.prefill else hardware.decode_share)
        # Shares that were learnt may exceed 1 where the machine was busy when it was measured, but
        # no product is faster than the fastest.
        operations = config.linear_flops_per_token * self.tokens
        operations += config.head_flops_per_token * self.sequences * self._head_positions
        roofline_s = operations / self.problem.product_flops.best
        forms = {
            "products": affine(max(products_s, roofline_s / slowdown)),
            "convert": affine(convert_s),
            "attention": attention,
            "host_attention": host_attention,
        }
        return {name: slowdown * form for name, form in forms.items()}

    @property
    def _head_positions(self) -> float:
        """Positions of a sequence that pass the head: its last one, and those of a prompt that is
        scored.
        """
        return 1.0 + (self.problem.workload.mean_scored if self.prefill else 0.0)

    def _product_seconds(self) -> tuple[float, float]:
        """Return the seconds of products with what surrounds them, and of converting weights.

        Products are bound by operations or by reading the weights.
        """
        problem, config, hardware = self.problem, self.problem.config, self.problem.hardware
        processor, batches, rate = hardware.compute_processor, self.batches, problem.product_flops
        expert_rows = problem.expert_rows(self.tokens / self._expert_batches)
        expert_flops = problem.expert_flops_per_token
        layer_flops = (config.linear_flops_per_token - expert_flops) * self.tokens
        layers_s = layer_flops / rate.at(self.tokens / batches)
        layers_s += expert_flops * self.tokens / rate.at(min(expert_rows, MAX_BATCH_TOKENS))
        head_positions = self.sequences * self._head_positions
        head_rows = min(self.sequences, self.batch_sequences) * self._head_positions
        head_s = config.head_flops_per_token * head_positions / rate.at(head_rows)
        dense = (problem.layer_elements - problem.layer_expert_elements) * config.num_layers
        used_experts = self._expert_reads * problem.layer_expert_elements * config.num_layers
        tiles = max(1, math.ceil(expert_rows / MAX_BATCH_TOKENS))
        convert_s, read_bytes = 0.0, 0.0
        for elements, fmt, products in (
            (dense, problem.layer_format, batches),
            (used_experts, problem.layer_format, tiles),
            (problem.head_elements, problem.precision.format_of(EMBED_TABLE), batches),
        ):
            converted_s, product_bytes = self._conversion_and_reading(elements, fmt, products)
            convert_s += converted_s
            read_bytes += products * product_bytes
        products_s = max(layers_s + head_s, read_bytes / processor.memory_bytes_s)
        steps = (
            batches
            if self.prefill
            else problem.decode_steps(batches, self.sequences, self.resident)
        )
        steps *= config.num_layers
        # an expert takes the interpreter as long as a layer
        if config.experts is not None and hardware.gpu is None:
            steps += tiles * used_experts / config.expert_elements
        between_bytes = self.tokens * problem.between_elements * problem.compute_bytes
        between_s = between_bytes / processor.layer_bytes_s
        return products_s + (steps * processor.step_s + config.num_layers * between_s), convert_s

    def _attention_seconds(self) -> tuple[Affine, Affine]:
        """Return the seconds of attention on the compute device, and on a host beside it."""
        problem, cache, hardware = self.problem, self.problem.precision.cache, self.problem.hardware
        processor, attention, host_attention = hardware.compute_processor, affine(), affine()
        if self.prefill:
            operations = problem.config.attention_flops(1, 1) * self.sequences
            attention[ONE] = operations * problem.attention_pairs / processor.attention_flops
            if cache is not None and cache.is_quantized:
                attention[ONE] += problem.kv_elements * self.tokens / processor.quantize_elements_s
            return attention, host_attention
        attended_bytes = self.attended_elements * problem.compute_bytes
        for tier in TIERS:
            on_host = tier in problem.host_attention_tiers
            form, device = (host_attention, hardware.cpu) if on_host else (attention, processor)
            form[CACHE[tier]] += attended_bytes / device.attention_bytes_s
        if cache is not None and cache.is_quantized:
            fetched = self.attended_elements * cache.fetched_share
            attention[ONE] += fetched / processor.dequantize_elements_s
        return attention, host_attention

    def _conversion_and_reading(
        self, elements: float, fmt: StoredFormat | None, products: float
    ) -> tuple[float, float]:
        """Return the seconds of converting some weights in a pass, and the bytes that one product
        with all of them reads.

        elements: how many weights.
        fmt: their format; None for 16 bits.
        products: how often the pass multiplies with each weight. A CPU multiplies few rows by
            packed weights as they are, which takes as long as dequantizing.
        """
        problem, compute_bytes = self.problem, self.problem.compute_bytes
        processor = problem.hardware.compute_processor
        conversions = problem.conversions(products) if self.converts else 0.0
        if isinstance(fmt, BlockFormat) and problem.multiplies_as_stored:
            return 0.0, elements * fmt.block_bytes / fmt.block_values
        if fmt is not None:
            return (
                conversions * elements / processor.dequantize_elements_s,
                elements * compute_bytes,
            )
        if problem.multiplies_as_stored:
            return 0.0, 2 * elements
        return (
            conversions * elements / processor.upcast_elements_s if compute_bytes > 2 else 0.0,
            elements * compute_bytes,
        )

    def _link_times(self) -> tuple[Affine, Affine]:
        """Return the seconds of the link to the gpu, and back."""
        problem, config, link = self.problem, self.problem.config, self.problem.hardware.link
        to_gpu, to_cpu = affine(), affine()
        if link is None:
            return to_gpu, to_cpu
        # Hidden states cross through a buffer, and new keys and values are spread over their slots
        # from one: copies within the host, as of pageable memory.
        store_rate = link.pageable_to_cpu_bytes_s
        offloaded: tuple[Tier, ...] = ("cpu", "disk")
        for tier in offloaded:
            weights_rate, in_rate = problem.link_rates(link, tier)
            to_gpu[WEIGHTS[tier]] += self._weight_bytes(tier) / weights_rate
            to_gpu[WEIGHTS[tier]] += self._weight_transfers(tier) * link.transfer_s
            to_gpu[HIDDEN[tier]] += self._hidden_bytes / link.pageable_to_gpu_bytes_s
            to_cpu[HIDDEN[tier]] += self._hidden_bytes / store_rate
            to_cpu[CACHE[tier]] += (
                self._new_cache_bytes / store_rate + self._cache_transfers * link.transfer_s
            )
            if self.prefill:
                continue
            if tier in problem.host_attention_tiers:  # queries go there, outputs come back
                queries = (
                    config.num_attention_layers
                    * self.sequences
                    * config.q_size
                    * problem.compute_bytes
                )
                to_cpu[CACHE[tier]] += queries / store_rate
                to_gpu[CACHE[tier]] += queries / in_rate
            else:
                positions = problem.fetched_positions(
                    tier, problem.older_positions(self.context), self.slot_positions
                )
                elements = problem.read_kv_elements
                fetched = elements * positions * problem.fetched_cache_bytes + problem.window_bytes(
                    elements
                )
                to_gpu[CACHE[tier]] += (
                    self.sequences * fetched / in_rate + self._cache_transfers * link.transfer_s
                )
        return to_gpu, to_cpu

    def _disk_times(self) -> tuple[Affine, Affine]:
        """Return the seconds of reading the disk, and of writing."""
        disk = self.problem.hardware.disk
        read_s, write_s = 1 / disk.read_bytes_s, 1 / disk.write_bytes_s
        cache_access_s = self._cache_transfers * disk.access_s
        weights_s = (
            self._weight_bytes("disk") * read_s + self._weight_transfers("disk") * disk.access_s
        )
        read = affine(0.0, {WD: weights_s})
        read[HD] = self._hidden_bytes * read_s
        if not self.prefill:
            problem, elements = self.problem, self.problem.read_kv_elements
            ring, workload = problem.window_tokens, problem.workload
            # A file has the window of the prompt until the answer fills another, half of it on
            # average.
            newest = (
                min(workload.mean_prompt, ring)
                + min(workload.mean_output, ring**2 / workload.mean_output) / 2
            )
            stored = elements * problem.older_positions(self.context) * problem.cache_bytes
            stored += problem.window_bytes(elements, newest)
            read[CD] = self.sequences * stored * read_s + cache_access_s
        write = affine(
            0.0,
            {
                HD: self._hidden_bytes * write_s,
                CD: self._new_cache_bytes * write_s + cache_access_s,
            },
        )
        return read, write

    def _weight_bytes(self, tier: Tier) -> float:
        """Bytes that the pass would read of a tier with all weights."""
        problem, layers = self.problem, self.problem.config.num_layers
        dense_bytes = problem.layer_bytes - problem.layer_expert_bytes
        if self.reads is not None:
            reads = self.reads[tier]
            layer_bytes, head_bytes = reads.layer_bytes, reads.head_bytes
            expert_bytes = reads.expert_bytes
        elif problem.offloads_only_experts:  # whatever share is offloaded, it is of experts
            layer_bytes, expert_bytes, head_bytes = 0.0, float(problem.stored_bytes), 0.0
        else:
            layer_bytes, expert_bytes = dense_bytes * layers, problem.layer_expert_bytes * layers
            head_bytes = problem.head_bytes
        loaded = self._expert_reads * expert_bytes
        for stage_bytes, num_bytes in (
            (dense_bytes, layer_bytes),
            (problem.head_bytes, head_bytes),
        ):
            loaded += num_bytes * self._loads(stage_bytes)
        return loaded

    def _loads(self, stage_bytes: float) -> float:
        """Loads of a stage in a pass: one, but one for every batch if it is larger than the
        ring.
        """
        return 1 if stage_bytes <= self.problem.ring_bytes else self.batches

    @property
    def _expert_batches(self) -> float:
        """Batches that use experts each by itself: those of a pass, but all together if experts are
        offloaded.
        """
        return self.batches if self.resident else 1.0

    @cached_property
    def _expert_reads(self) -> float:
        """Reads of an expert in a pass."""
        return self._expert_batches * self.problem.experts_used(self.tokens / self._expert_batches)

    def _weight_transfers(self, tier: Tier) -> float:
        """Transfers of matrices and experts with which a tier with all weights would load the
        layers.
        """
        problem, experts = self.problem, self.problem.config.experts
        loads = self._loads(problem.layer_bytes - problem.layer_expert_bytes)
        if self.reads is not None:
            return loads * self.reads[tier].matrices + self._expert_reads * self.reads[tier].experts
        transfers = 0.0 if experts is None else self._expert_reads * experts.count
        if not problem.offloads_only_experts:
            transfers += loads * problem.layer_matrices
        return transfers * problem.config.num_layers

    @property
    def _cache_transfers(self) -> float:
        """Transfers of an offloaded cache: of each layer and batch keys, values, and a residual
        window.
        """
        return (
            (2 + (self.problem.window_tokens > 0))
            * self.problem.config.num_attention_layers
            * self.batches
        )

    @property
    def _new_cache_bytes(self) -> float:
        """Bytes of the keys and values that the pass stores."""
        problem, elements = self.problem, self.problem.kv_elements
        newest = min(self.tokens, self.sequences * problem.window_tokens)
        return elements * self.tokens * problem.cache_bytes + problem.window_bytes(elements, newest)

    @property
    def _hidden_bytes(self) -> float:
        """Bytes of the hidden states, which leave and return between any two layers if they are
        offloaded.
        """
        config = self.problem.config
        return config.num_layers * self.tokens * config.hidden_elements * self.problem.compute_bytes


def _slot_positions(problem: PlanningProblem, schedule: Schedule) -> float:
    """Return the positions of cache that are allocated for a sequence."""
    workload = problem.workload
    # the first token is drawn from the prompt's own pass
    if schedule.is_single_pass or workload.mean_output == 1:
        return 0
    return workload.longest


def _stored_memory(
    problem: PlanningProblem, shape: BlockShape, sequences: float, lanes: float, resident: bool
) -> dict[Tier, tuple[Affine, ...]]:
    """Return the bytes of weights, cache, waiting hidden states and staging on each tier at the end
    of prefill; of alternatives each must fit.

    sequences: of the block.
    lanes: of a pipeline, which divide the block.
    resident: all weights are on the compute tier.
    """
    config, workload, ranks = problem.config, problem.workload, problem.ranks
    positions = _slot_positions(problem, shape.schedule)
    cache = sequences * positions * problem.kv_elements * problem.cache_bytes / ranks
    window = sequences * problem.window_bytes(problem.kv_elements) / ranks if positions else 0.0
    # a file has the prompt's window and the answer's
    caches = dict.fromkeys(TIERS, cache + window) | {"disk": cache + 2 * window}
    waiting_tokens = sequences * workload.mean_computed
    is_one_batch = shape.num_gpu_batches == 1 and waiting_tokens <= problem.batch_tokens
    # Prompts of one batch do not wait; while it decodes, its sequences have a token each.
    if is_one_batch and not shape.schedule.is_single_pass:
        waiting_tokens = sequences
    token_bytes = config.hidden_elements * problem.compute_bytes
    staging = problem.staging_memory(shape, sequences, resident)
    # tokens whose experts are computed together: with those of earlier passes, which decode
    gathered = 0.0
    if config.experts is not None and not resident:
        gathered = (
            _LARGEST_PASS
            * sequences
            / lanes
            * (workload.mean_computed / shape.passes + (shape.passes > 1))
        )
    waiting = dict.fromkeys(TIERS, waiting_tokens)
    # on the compute tier they are among the copies
    if gathered and not shape.schedule.is_single_pass:
        waiting = dict.fromkeys(TIERS, waiting_tokens / shape.passes) | {problem.compute_tier: 0.0}
    memory: dict[Tier, tuple[Affine, ...]] = {}
    for tier in TIERS:
        copies = resident and problem.copies_fit and tier == problem.compute_tier
        weights = (problem.copies_bytes if copies else problem.stored_bytes) / ranks
        hidden = waiting[tier] * token_bytes
        gathered_bytes = (
            config.waiting_copies * gathered * token_bytes if tier == problem.compute_tier else 0.0
        )
        stored = affine(
            gathered_bytes,
            {WEIGHTS[tier]: weights, CACHE[tier]: caches[tier], HIDDEN[tier]: hidden},
        )
        memory[tier] = tuple(stored + form for form in staging.get(tier, (affine(),)))
    return memory
