"""The cost model: seconds and bytes of a block, from a policy, a machine and a workload (the paper's appendix).

Everything is linear in the nine placement fractions once the block's shape and the schedule are fixed. So a cost is a
vector of ten coefficients (the fractions and a constant), and one set of equations serves both the evaluation of a
policy and the linear program of the search. docs/explanation/cost_model.md has the equations in words. No torch.

    pass = e max(resources) + (1 - e) sum(resources)          block = prefill pass + (n - 1) decode passes

with the resources computing, link in, link out, disk read and disk write, and e the share of overlap (0 without).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.planner.constants import BLOCK_SEQUENCES, MAX_PENDING_STORE_BYTES
from flexgen_helm.planner.placement import TIERS, Tier
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.problem import BlockShape, PlanningProblem, layer_matrices, layer_shapes

Affine = NDArray[np.float64]
# Coefficients of an affine form: weights, cache and hidden states on gpu, cpu and disk, and the constant.
WG, WC, WD, CG, CC, CD, HG, HC, HD, ONE = range(10)
WEIGHTS: Mapping[Tier, int] = {"gpu": WG, "cpu": WC, "disk": WD}
CACHE: Mapping[Tier, int] = {"gpu": CG, "cpu": CC, "disk": CD}
HIDDEN: Mapping[Tier, int] = {"gpu": HG, "cpu": HC, "disk": HD}
RESOURCES = ("compute", "to_gpu", "to_cpu", "disk_read", "disk_write")


@dataclass(frozen=True)
class ResourceTimes:
    """Seconds of one pass on every resource, as affine forms; parts: what `compute` is made of; together: bounds
    from two directions that share a channel."""

    resources: Mapping[str, Affine]
    parts: Mapping[str, Affine]
    together: tuple[Affine, ...] = ()


@dataclass(frozen=True)
class BlockCosts:
    """A block of `rows` sequences. decode_passes: of the block; memory: tier -> forms none of which may exceed its
    limit; working: tier -> bytes that computing holds beside them, which count against the machine's memory."""

    rows: float
    prefill: ResourceTimes
    decode: ResourceTimes
    decode_passes: float
    memory: Mapping[Tier, tuple[Affine, ...]]
    working: Mapping[Tier, float]


def affine(constant: float = 0.0, terms: Mapping[int, float] | None = None) -> Affine:
    coefficients = np.zeros(10)
    coefficients[ONE] = constant
    for index, coefficient in (terms or {}).items():
        coefficients[index] += coefficient
    return coefficients


def fraction_vector(policy: Policy, has_gpu: bool) -> Affine:
    """The policy as the vector that affine forms are multiplied with; without a gpu its shares are the cpu's."""
    p = policy
    if has_gpu:
        return np.array([p.wg, p.wc, p.wd, p.cg, p.cc, p.cd, p.hg, p.hc, p.hd, 1.0])
    return np.array([0.0, p.wg + p.wc, p.wd, 0.0, p.cg + p.cc, p.cd, 0.0, p.hg + p.hc, p.hd, 1.0])


def block_costs(situation: PlanningProblem, shape: BlockShape, resident: bool = False) -> BlockCosts:
    """The equations of one block. resident: all weights rest beside the computing, so nothing is staged for them."""
    workload, schedule = situation.workload, shape.schedule
    rows = float(shape.num_sequences)
    passes = workload.output - 1
    converts = not (resident and situation.copies_fit)
    if schedule == "row":
        # Batch after batch, each alone: the same terms with one batch, as many times.
        one = replace(shape, num_gpu_batches=1, schedule="zigzag")
        model = block_costs(situation, one, resident)
        times = shape.num_gpu_batches
        return replace(
            model,
            rows=rows,
            prefill=_times(model.prefill, times),
            decode=_times(model.decode, times),
        )
    if schedule == "diagonal" and passes > 0:
        # Rows of all ages: each pass takes some rows in and the others one token on. As many passes as it takes for
        # all, and the ramp; told as decode passes that carry a share of the prompts.
        entering = rows / workload.output
        terms = _sum(
            _pass(situation, shape, entering, True, converts, weights=0.0),
            _pass(situation, shape, rows, False, converts),
        )
        sequences = rows if situation.endless else float(max(shape.num_sequences, workload.num_sequences))
        ramp = 0.0 if situation.endless else workload.output - 1
        nothing = ResourceTimes({name: affine() for name in RESOURCES}, {})
        memory = _memory(situation, shape, rows, resident)
        return BlockCosts(sequences, nothing, terms, sequences / rows * workload.output + ramp, *memory)
    if schedule == "prefill-only":
        passes = 0.0
        if not situation.endless:
            rows = float(max(shape.num_sequences, workload.num_sequences))
    return BlockCosts(
        rows,
        _pass(situation, shape, rows, True, converts),
        _pass(situation, shape, rows, False, converts),
        passes,
        *_memory(situation, shape, rows, resident),
    )


def pass_seconds(terms: ResourceTimes, fractions: Affine, overlap: float) -> float:
    """Seconds of one pass: the longest resource, and what does not hide behind it."""
    spent = [float(coefficients @ fractions) for coefficients in terms.resources.values()]
    longest = max([*spent, *(float(coefficients @ fractions) for coefficients in terms.together)])
    return overlap * longest + (1 - overlap) * sum(spent)


def _pass(
    situation: PlanningProblem, shape: BlockShape, rows: float, prefill: bool, converts: bool, weights: float = 1.0
) -> ResourceTimes:
    """All layers and the head over `rows` sequences. converts: weights rest in another type than products take.
    weights: times that they are brought in (0 where another part of the same pass brings them)."""
    hardware, workload, precision = situation.hardware, situation.workload, situation.precision
    runtime, config = situation.engine, situation.config
    has_gpu = hardware.gpu is not None
    prompt, output = workload.prompt, workload.output
    new = workload.computed if prefill else 1.0  # tokens of a row that this pass computes
    context = situation.visible_positions(prompt + output / 2)
    tokens = rows * new
    batch_tokens = min(shape.gpu_batch_size * new, runtime.max_batch_tokens) if prefill else shape.gpu_batch_size
    batches = max(1.0, tokens / max(1.0, min(batch_tokens, tokens)))
    home = hardware.compute_processor
    link, disk = hardware.link, hardware.disk
    rate = home.matmul_flops[situation.dtype]
    work = situation.compute_bytes
    layers = situation.layer_elements * config.num_layers

    # Computing: products (bound by operations or by reading the weights), conversions, attention.
    layer_flops = config.linear_flops_per_token * tokens / rate.at(tokens / batches)
    head_flops = config.head_flops_per_token * rows / rate.at(min(rows, shape.gpu_batch_size))
    reading = batches * (layers + situation.head_elements) * work / home.memory_bytes_s
    steps = batches if prefill or not runtime.decode_sequences else batches + math.ceil(rows / runtime.decode_sequences)
    products = max(layer_flops + head_flops, reading * weights) + steps * config.num_layers * home.step_s
    # Weights that rest packed, or in another type than products take, become it beside them.
    converted = weights * (batches if runtime.converts_per_batch else 1.0) if converts else 0.0
    convert = affine()
    for elements, fmt in ((layers, precision.weights), (situation.head_elements, precision.tables)):
        if fmt is not None:
            convert[ONE] += converted * elements / home.dequantize_elements_s
        elif work > 2:
            convert[ONE] += converted * elements / home.upcast_elements_s
    kv_new = situation.kv_elements * tokens  # elements
    kv_read = situation.kv_elements * rows * context
    host_tiers: set[Tier] = set()  # whose cache the host attends to
    if has_gpu and not prefill and situation.cpu_attention and precision.cache is None:
        host_tiers = {"cpu", "disk"} if runtime.disk_cache_on_host else {"cpu"}
    at_home, at_host = affine(), affine()
    if prefill:
        at_home[ONE] = config.attention_flops(1, 1) * rows * _pairs(situation) / home.attention_flops
    else:
        for tier in TIERS:
            target, processor = (at_host, hardware.cpu) if tier in host_tiers else (at_home, home)
            target[CACHE[tier]] += kv_read * work / processor.attention_bytes_s
    if precision.cache is not None and precision.cache.is_quantized:
        if prefill:
            at_home[ONE] += kv_new / home.quantize_elements_s
        else:
            at_home[ONE] += kv_read * precision.cache.fetched_share / home.dequantize_elements_s
    slower = 1 / (hardware.prefill_share if prefill else hardware.decode_share)
    each = {"products": affine(products), "convert": convert, "attention": at_home, "host_attention": at_host}
    parts = {name: slower * coefficients for name, coefficients in each.items()}

    # Bytes on the links. Hidden states go out and in between stages where they rest elsewhere.
    w_bytes = weights * (situation.layer_bytes * config.num_layers + situation.head_bytes)
    if runtime.staging == "ring" and weights:
        # A stage larger than the ring comes anew for every batch.
        again = (batches - 1) * weights
        w_bytes += again * (situation.head_bytes if situation.head_bytes > situation.ring_bytes else 0)
        if situation.layer_bytes > situation.ring_bytes:
            w_bytes += again * situation.layer_bytes * config.num_layers
    c_new, c_read = kv_new * situation.cache_bytes, kv_read * situation.cache_bytes
    c_taken = kv_read * situation.fetched_cache_bytes
    h_bytes = config.num_layers * tokens * config.hidden_size * work
    w_tensors = weights * layer_matrices(config) * config.num_layers
    c_tensors = 2 * config.num_layers * batches
    to_gpu, to_cpu, read, write = affine(), affine(), affine(), affine()
    if link is not None:
        w_in = link.to_gpu_bytes_s if runtime.pinned_weights else link.pageable_to_gpu_bytes_s
        c_in = link.to_gpu_bytes_s if runtime.pinned_cache else link.pageable_to_gpu_bytes_s
        c_out = link.to_cpu_bytes_s if runtime.pinned_cache else link.pageable_to_cpu_bytes_s
        far: tuple[Tier, Tier] = ("cpu", "disk")
        for tier in far:
            to_gpu[WEIGHTS[tier]] += w_bytes / w_in + w_tensors * link.transfer_s
            to_gpu[HIDDEN[tier]] += h_bytes / c_in
            to_cpu[HIDDEN[tier]] += h_bytes / c_out
            to_cpu[CACHE[tier]] += c_new / c_out + c_tensors * link.transfer_s
            if tier in host_tiers:  # queries there, outputs back
                asked = config.num_layers * rows * config.q_size * work
                to_cpu[CACHE[tier]] += asked / c_out
                to_gpu[CACHE[tier]] += asked / c_in
            elif not prefill:
                to_gpu[CACHE[tier]] += c_taken / c_in + c_tensors * link.transfer_s
    fast = disk.page_cache if runtime.page_cache else 1.0
    read_s, write_s = 1 / (disk.read_bytes_s * fast), 1 / (disk.write_bytes_s * fast)
    read[WD] += w_bytes * read_s + w_tensors * disk.access_s
    read[HD] += h_bytes * read_s
    write[HD] += h_bytes * write_s
    write[CD] += c_new * write_s + c_tensors * disk.access_s
    if not prefill:
        read[CD] += c_read * read_s + c_tensors * disk.access_s
    computing = sum(parts.values(), affine())
    resources = {"compute": computing, "to_gpu": to_gpu, "to_cpu": to_cpu, "disk_read": read, "disk_write": write}
    # Both directions of a channel at once take at least (in + out) / (2 duplex).
    together = [(read + write) / (2 * disk.duplex)]
    if link is not None:
        together.append((to_gpu + to_cpu) / (2 * link.duplex))
    return ResourceTimes(resources, parts, tuple(together))


def _memory(
    situation: PlanningProblem, shape: BlockShape, rows: float, resident: bool
) -> tuple[dict[Tier, tuple[Affine, ...]], dict[Tier, float]]:
    """What rests on each tier, staging included, in prefill (the larger), and what computing holds beside it."""
    config, workload, precision = situation.config, situation.workload, situation.precision
    runtime, home, stages = situation.engine, situation.compute_tier, situation.stages
    work = situation.compute_bytes
    weights = situation.stored_bytes / stages
    # Positions set aside for a row: all, or with rows of all ages and a cache that grows by pages the average.
    positions = workload.longest
    if shape.schedule == "diagonal":
        positions = math.ceil(workload.longest_prompt + workload.output / 2 + 8)
    if shape.schedule == "prefill-only":
        positions = 0
    cache = rows * positions * situation.kv_elements * situation.cache_bytes / stages
    waiting = rows * workload.computed * config.hidden_size * work
    one_batch = shape.num_gpu_batches == 1 and rows * workload.computed <= runtime.max_batch_tokens
    if one_batch and shape.schedule != "prefill-only":
        waiting = rows * config.hidden_size * work
    tokens = min(shape.gpu_batch_size * workload.computed, max(runtime.max_batch_tokens, workload.longest_prompt))
    forms: dict[Tier, list[Affine]] = {}
    for tier in TIERS:
        copies = resident and situation.copies_fit and tier == home
        rests = situation.copies_bytes / stages if copies else weights
        forms[tier] = [affine(0.0, {WEIGHTS[tier]: rests, CACHE[tier]: cache, HIDDEN[tier]: waiting})]
    if precision.cache is not None and runtime.staging == "ring" and positions:
        forms[home][0][ONE] += rows * situation.window_bytes / stages
    working: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
    if runtime.staging == "ring":
        if not resident:
            forms[home][0][ONE] += situation.ring_bytes
        # Layers of groups elsewhere that are brought beside the computing: the one in use and the next.
        group = (
            2
            * min(BLOCK_SEQUENCES, shape.gpu_batch_size)
            * workload.longest
            * situation.kv_elements
            / config.num_layers
            * work
        )
        far_cache = (CC, CD) if home == "gpu" else (CD,)
        for index in far_cache:
            if not (index == CC and situation.cpu_attention):
                forms[home][0][index] += group
        decoding = int(min(rows, shape.gpu_batch_size) * workload.longest)
        working[home] = (
            max(
                situation.workspace.layer(int(tokens), int(workload.longest_prompt), 0),
                situation.workspace.layer(int(min(rows, shape.gpu_batch_size)), 1, decoding),
            )
            + 4 * MAX_PENDING_STORE_BYTES
        )
    else:
        layer = situation.layer_bytes
        states = workload.prompt * config.hidden_size * shape.gpu_batch_size * work
        ffn = max(shape_[0] for shape_ in layer_shapes(config))
        inner = states / config.hidden_size * max(4 * config.hidden_size, config.hidden_size + ffn)
        scores = states / config.hidden_size * (2 * config.hidden_size + config.num_heads * workload.prompt)
        # FlexGen's unit is the attention or the feed-forward half of a layer: the one in use, and the next.
        brought = {WC: layer, WD: layer, HC: states, HD: states}
        plain = forms["gpu"][0]
        forms["gpu"] = [plain + affine(inner, brought), plain + affine(0.0, {**brought, CG: scores})]
        if precision.weights is not None:
            extra = situation.layer_elements / layer_matrices(config) * work
            forms["gpu"] = [coefficients + affine(extra) for coefficients in forms["gpu"]]
        forms["cpu"][0] += affine(0.0, {WD: layer, HD: states})
        forms["cpu"].append(
            forms["cpu"][0] + affine(0.0, {CD: cache * stages / config.num_layers / max(1, shape.num_gpu_batches)})
        )
    return {tier: tuple(found) for tier, found in forms.items()}, working


def _pairs(situation: PlanningProblem) -> float:
    """Mean of computed tokens x positions that they see (the full square, as kernels compute it), per layer."""
    workload = situation.workload
    if not situation.config.windows:
        return workload.pairs
    return workload.computed * situation.visible_positions(workload.pairs / workload.computed)


def _times(terms: ResourceTimes, factor: float) -> ResourceTimes:
    return ResourceTimes(
        {name: factor * coefficients for name, coefficients in terms.resources.items()},
        {name: factor * coefficients for name, coefficients in terms.parts.items()},
        tuple(factor * coefficients for coefficients in terms.together),
    )


def _sum(one: ResourceTimes, other: ResourceTimes) -> ResourceTimes:
    return ResourceTimes(
        {name: coefficients + other.resources[name] for name, coefficients in one.resources.items()},
        {name: coefficients + other.parts[name] for name, coefficients in one.parts.items()},
        tuple(a + b for a, b in zip(one.together, other.together)),
    )
