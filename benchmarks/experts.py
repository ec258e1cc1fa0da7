"""`bench experts`: a mixture of experts that is four times as large as memory.

The shapes are those of a shrunken Qwen3-MoE with random weights, about 8 GiB in 16 bits. The process has a memory
control group of 2 GiB where the machine has such groups. Every token needs attention and router, which stay in memory;
experts are on disk. Three blocks are measured:

- 8 sequences, of which each pass uses a part of the experts: bytes read against those of the experts that were used.
- 256 sequences, which use nearly all: throughput of decoding against the same in memory, and against the disk's rate.
- 1,024 sequences, the largest block here.

Peers under the same limit: llama.cpp with memory mapping, a GGUF file of the same shapes, and up to 256 sequences, the
most that it takes; throughput of each one's best block is compared. Accelerate's disk offload on some of the layers.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, accelerate_task, llama_cpp_task, summary
from flexgen_helm.benchmarks.common import ProcessKilled, machine, refuse_engine_flags
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.memory_group import GroupUnavailable, MemoryGroup, forget_files
from flexgen_helm.benchmarks.memory_settings import COMPUTE_BYTES
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.benchmarks.roofline import measure_rates
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.models.config import ModelConfig, expert_of
from flexgen_helm.planner.placement import StorageSizes
from flexgen_helm.report.throughput import versions


@dataclass(frozen=True)
class Workload:
    """What is measured. Its fields are written into the result.

    layers: of the mixture; peer_layers: of the smaller one for Accelerate; in_memory_layers: most layers that the
        comparison in memory has. If it has fewer, its seconds are scaled.
    limit_bytes: of the engine; group_bytes: of the process with everything in it.
    few, many, most: sequences of the three blocks, with their prompt and output tokens.
    peer: block of Accelerate; llama_cpp: blocks of llama.cpp.
    """

    layers: int = 14
    peer_layers: int = 2
    in_memory_layers: int = 14
    hidden: int = 2048
    expert_ffn: int = 768
    experts: int = 64
    per_token: int = 4
    vocabulary: int = 32000
    limit_bytes: int = 1000 << 20
    group_bytes: int = 2 << 30
    few: tuple[int, int, int] = (8, 16, 17)
    many: tuple[int, int, int] = (256, 4, 4)
    most: tuple[int, int, int] = (1024, 2, 4)
    peer: tuple[int, int, int] = (8, 16, 5)
    llama_cpp: tuple[tuple[int, int, int], ...] = ((8, 16, 5), (64, 4, 4), (256, 4, 4))
    disk_file: int = 1 << 30


QUICK = Workload(
    layers=3,
    hidden=128,
    expert_ffn=64,
    experts=16,
    vocabulary=512,
    limit_bytes=8 << 20,
    few=(2, 4, 3),
    many=(8, 2, 2),
    most=(16, 2, 2),
    peer=(2, 4, 2),
    llama_cpp=((2, 4, 2), (8, 2, 2)),
    disk_file=8 << 20,
)
BLOCKS = ("few", "many", "most")
Blocks = Mapping[str, Mapping[str, Any]]


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark; rows are seconds of one decode pass."""
    refuse_engine_flags("experts", options, "offload_dir")
    workload = QUICK if options.quick else Workload()
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        return measure(workload, Path(scratch), options.tell)


def measure(workload: Workload, scratch: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    model = write_config(workload, workload.layers, scratch / "model")
    config = open_checkpoint(model, weights="dummy").config
    total = sum(StorageSizes(config).matrices.values())
    group, notes = _group(workload)
    tell(f"{total / 2**30:.1f} GiB of weights are written once, and the disk's rate is measured")
    rates = in_own_process(measure_rates, {"folder": str(scratch), "file_bytes": workload.disk_file})
    many = workload.many
    _block(model, config, workload, scratch, (1, 2, 1), None)  # writes the weights
    records = {}
    for name in BLOCKS:
        block = getattr(workload, name)
        forget_files(scratch)
        records[name] = _block(model, config, workload, scratch, block, group)
        tell(f"{block[0]} sequences: {decode_pass_s(records[name], block):.2f} s a pass, {_bytes_text(records[name])}")
    resident_s, resident_layers = _in_memory(workload, scratch)
    tell(
        f"{many[0]} sequences in memory: {resident_s:.2f} s a pass (from {resident_layers} of {workload.layers} layers)"
    )
    theirs, own, more = _accelerate(workload, scratch, group, tell)
    llama_cpp, others = _llama_cpp(workload, model, scratch, group, tell)
    notes += [*more, *others]
    if resident_layers < workload.layers:
        notes.append(f"in memory: {resident_layers} of {workload.layers} layers, seconds scaled to all")
    return assemble(workload, total, rates["disk_bytes_s"], records, resident_s, (theirs, own), llama_cpp, notes)


def assemble(
    workload: Workload,
    total: int,
    disk_bytes_s: float,
    records: Blocks,
    resident_s: float,
    peer: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    llama_cpp: Sequence[Mapping[str, float]],
    notes: list[str],
) -> dict[str, Any]:
    """Return the result in the format of benchmarks.

    records: of the blocks, by their names in `Workload`.
    resident_s: of a decode pass of many sequences in memory.
    peer: of Accelerate and of the engine, on the layers of `Workload.peer_layers`; None where left out.
    llama_cpp: `rows` and `pass_s` of its blocks; empty where left out.
    """
    passes = {name: decode_pass_s(records[name], getattr(workload, name)) for name in BLOCKS}
    many_s = passes["many"]
    few = records["few"]["experts"]
    # A run that read faster than the measurement raises the disk's rate.
    rates = [record["experts"]["read_bytes"] / record["latency_s"] for record in records.values()]
    disk_bytes_s = max(disk_bytes_s, *rates)
    many_bytes = records["many"]["experts"]["read_bytes"] / workload.many[2]
    disk_s = many_bytes / disk_bytes_s
    rows = [
        *(
            {"label": f"decode pass of {getattr(workload, name)[0]} sequences, experts on disk", **summary([seconds])}
            for name, seconds in passes.items()
        ),
        {"label": f"decode pass of {workload.many[0]} sequences, in memory", **summary([resident_s])},
        {"label": f"decode pass of {workload.many[0]} sequences, bound of the disk", **summary([disk_s])},
    ]
    ratios = {
        "bytes_of_used_experts_over_read": few["routed_bytes"] / few["read_bytes"],
        "bytes_of_all_experts_over_read": total * workload.few[2] / few["read_bytes"],
        "slower_of_memory_and_disk_over_measured": max(resident_s, disk_s) / many_s,
    }
    if llama_cpp:
        best = max(block["rows"] / block["pass_s"] for block in llama_cpp)
        own_best = max(getattr(workload, name)[0] / seconds for name, seconds in passes.items())
        ratios["tokens_per_s_over_llama_cpp_each_at_its_best_block"] = own_best / best
        rows += [
            {"label": f"llama.cpp, decode pass of {block['rows']:g} sequences", **summary([block["pass_s"]])}
            for block in llama_cpp
        ]
        same = [block["pass_s"] for block in llama_cpp if block["rows"] == workload.few[0]]
        if same:
            ratios[f"llama_cpp_over_ours_at_{workload.few[0]}_sequences"] = same[0] / passes["few"]
    theirs, own = peer
    if theirs is not None and own is not None:
        ratios["accelerate_over_ours"] = theirs["latency_s"] / own["latency_s"]
        rows += [
            {"label": f"{name}, {workload.peer_layers} layers, whole block", **summary([record["latency_s"]])}
            for name, record in (("Accelerate", theirs), ("ours", own))
        ]
    used = few["used"] / workload.experts
    return {
        "name": "experts",
        "hardware": {**machine(), "disk_bytes_s": disk_bytes_s},
        "versions": versions(),
        "workload": {**vars(workload), "weight_bytes": total},
        "rows": rows,
        "ratios": ratios,
        "records": {name: dict(record) for name, record in records.items()},
        "notes": [
            f"{total / 2**30:.1f} GiB of weights, {workload.limit_bytes / 2**30:.2f} GiB for the engine's memory",
            f"{workload.few[0]} sequences use {used:.0%} of a layer's experts on average over prefill and decode; read "
            f"were {few['read_bytes'] / few['routed_bytes']:.2f} of the bytes of the used ones",
            *notes,
        ],
    }


def write_config(workload: Workload, layers: int, folder: Path) -> str:
    """Write the folder of a model without weights."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": workload.vocabulary,
        "hidden_size": workload.hidden,
        "intermediate_size": workload.hidden,
        "moe_intermediate_size": workload.expert_ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": workload.hidden // 64,
        "num_key_value_heads": max(1, workload.hidden // 512),
        "head_dim": 64,
        "num_experts": workload.experts,
        "num_experts_per_tok": workload.per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def decode_pass_s(record: Mapping[str, Any], block: tuple[int, int, int]) -> float:
    return float(record["decode_s"]) / max(1, block[2] - 1)


def _bytes_text(record: Mapping[str, Any]) -> str:
    experts = record["experts"]
    return f"{experts['read_bytes'] / 1e9:.2f} GB read, {experts['routed_bytes'] / 1e9:.2f} GB of used experts"


def _block(
    model: str,
    config: ModelConfig,
    workload: Workload,
    scratch: Path,
    block: tuple[int, int, int],
    group: Callable[[], AbstractContextManager[MemoryGroup | None]] | None,
    resident: bool = False,
) -> dict[str, Any]:
    """Run one block in its own process, with what every token needs in memory and the experts on disk."""
    rows, prompt, output = block
    storage = StorageSizes(config)
    sizes = storage.matrices
    always = sum(size for name, size in sizes.items() if expert_of(name) is None)
    share = 100.0 if resident else math.ceil(1e4 * always / sum(sizes.values())) / 100
    engine = {
        "device": "cpu",
        "policy": f"{rows}x1,0,{share},0,100,0,100",
        "schedule": "zigzag",
        "offload_dir": str(scratch / "ours"),
    }
    # In memory, half of the limit may be the compute dtype's copies: the same conversion is measured on both sides.
    limit = sum(sizes.values()) + (1 << 30) if resident else workload.limit_bytes
    arguments = {"model": model, "engine": engine, "limits": {"cpu": limit}, "rows": rows}
    with nullcontext() if group is None else group() as entered:
        record = in_own_process(run_engine, {**arguments, "prompt": prompt, "output": output}, entered)
        if entered is not None:
            record["group_peak_bytes"] = entered.peak
    return record


def _group(workload: Workload) -> tuple[Callable[[], MemoryGroup] | None, list[str]]:
    try:
        MemoryGroup(workload.group_bytes).close()
    except GroupUnavailable as error:
        return None, [f"no memory control group: {error}"]
    return lambda: MemoryGroup(workload.group_bytes), []


def _in_memory(workload: Workload, scratch: Path) -> tuple[float, int]:
    """Return the seconds of a decode pass in memory, and the layers that were measured: as many as fit."""
    layer = 2 * 3 * workload.experts * workload.hidden * workload.expert_ffn
    room = psutil.virtual_memory().available / 2 / (layer * COMPUTE_BYTES / 2)
    layers = max(1, min(workload.layers, workload.in_memory_layers, int(room)))
    model = write_config(workload, layers, scratch / "resident")
    config = open_checkpoint(model, weights="dummy").config
    record = _block(model, config, workload, scratch, workload.many, None, resident=True)
    return decode_pass_s(record, workload.many) * workload.layers / layers, layers


def _accelerate(
    workload: Workload, scratch: Path, group: Callable[[], MemoryGroup] | None, tell: Callable[[str], None]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[str]]:
    """Return the records of Accelerate and of the engine on a mixture of fewer layers, and notes on what is missing."""
    reason = accelerate_task.missing()
    if reason is not None:
        return None, None, [f"SKIPPED, Accelerate: {reason}"]
    model = write_config(workload, workload.peer_layers, scratch / "peer")
    config = open_checkpoint(model, weights="dummy").config
    folder = scratch / "accelerate"
    folder.mkdir()
    in_own_process(accelerate_task.write_weights, {"model": model, "folder": str(folder)})
    rows, prompt, output = workload.peer
    arguments = {"model": model, "folder": str(folder), "rows": rows, "prompt": prompt, "output": output}
    few_layers = replace(workload, layers=workload.peer_layers)
    _block(model, config, few_layers, scratch, (1, 2, 1), None)
    forget_files(scratch)
    own = _block(model, config, few_layers, scratch, workload.peer, group)
    notes = []
    for times in (1, 2, 4):
        limit = times * workload.group_bytes
        try:
            with nullcontext() if group is None else MemoryGroup(limit) as entered:
                forget_files(scratch)
                theirs = in_own_process(accelerate_task.generate, arguments, entered, accelerate_task.ENVIRONMENT)
        except ProcessKilled:
            notes.append(f"Accelerate needs more than {limit / 2**30:g} GiB for a layer's experts: ended by the kernel")
            tell(notes[-1])
            continue
        notes.append(f"Accelerate was measured in {limit / 2**30:g} GiB, on {workload.peer_layers} layers in float32")
        tell(f"Accelerate, {workload.peer_layers} layers: {theirs['latency_s']:.1f} s; ours: {own['latency_s']:.1f} s")
        return theirs, own, notes
    return None, own, notes


def _llama_cpp(
    workload: Workload,
    model: str,
    scratch: Path,
    group: Callable[[], MemoryGroup] | None,
    tell: Callable[[str], None],
) -> tuple[list[dict[str, float]], list[str]]:
    """Return what llama.cpp takes for its blocks, and notes."""
    reason = llama_cpp_task.missing()
    if reason is not None:
        return [], [f"SKIPPED, llama.cpp with memory mapping: {reason}"]
    file = scratch / "model.gguf"
    in_own_process(llama_cpp_task.write_gguf, {"model": model, "file": str(file)})
    found = []
    for block in workload.llama_cpp:
        forget_files(scratch)
        with nullcontext() if group is None else group() as entered:
            found.append({"rows": block[0], "pass_s": llama_cpp_task.decode_pass_s(file, block, entered, scratch)})
        tell(f"llama.cpp, {block[0]} sequences: {found[-1]['pass_s']:.2f} s a pass")
    file.unlink()
    return found, [f"llama.cpp {llama_cpp_task.version()}, in 16 bits, memory-mapped"]
