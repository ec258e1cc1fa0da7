"""`bench offload` and `bench ablation` on tiny models: their structure and arithmetic. Nothing here is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from unittest.mock import MagicMock

import pytest

from flexgen_helm import cli
from flexgen_helm.benchmarks import (
    KNOWN,
    Options,
    ablation,
    accelerate_task,
    engine_task,
    load,
    memory_group,
    offload,
    packed,
    peers,
    process,
)
from flexgen_helm.benchmarks.common import ProcessKilled
from flexgen_helm.benchmarks.engine_task import prompts, run_engine
from flexgen_helm.benchmarks.memory_settings import offload_setting
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import tensor_shapes
from flexgen_helm.planner.placement import StorageSizes
from flexgen_helm.planner.policy import Policy
from tests.helpers.paths import ROOT


def opt_350m():
    return open_checkpoint("opt-350m", weights="dummy").config


def record(latency, prefill, decode, rows=6, read=0, wait=0.0):
    return {
        "latency_s": latency,
        "prefill_s": prefill,
        "decode_s": decode,
        "rows": rows,
        "prompt_tokens": rows * 5,
        "output_tokens": rows * 4,
        "bytes": {"disk_to_cpu": {"weights": read, "cache": 0, "activations": 0}},
        "time_s": {"wait": wait},
        "achieved_placement": {},
        "resident_bytes": 1,
        "group_peak_bytes": 2,
        "hardware": {"device": "cpu"},
        "roofline_s": 8.0,
    }


def test_break_even():
    # 160 Gflop/s and 0.8 GB/s: a parameter of 2 bytes arrives in 2.5 ns, in which 400 operations are 200 rows' work.
    assert offload.break_even_rows(160e9, 2, 0.8e9) == pytest.approx(200)


@pytest.mark.parametrize("rows", [8, 352])
def test_the_offloaded_setting_keeps_its_limit(rows):
    config = opt_350m()
    limit, policy = offload_setting(config, rows, 64, 32, share=0.25, batches=2)
    weights = 2 * sum(prod(shape) for shape in tensor_shapes(config).values())
    cache = rows * 95 * config.num_layers * 2 * config.hidden_size * 4
    assert limit == int(0.25 * weights) + cache
    assert policy.block_size == rows and policy.cc == 1.0 and policy.wc < 0.25


def test_the_whole_block_runs_at_once(tiny, tmp_path, small_ring):
    """The limit has room for every sequence's cache: one pass of prompts, and one for each further token."""
    model = tiny("opt")
    config = open_checkpoint(model.path, weights="dummy").config
    # 2.4: a ring of whole pages for tiny matrices.
    limit, policy = offload_setting(config, 40, 4, 12, share=2.4, batches=2)
    found = run_engine(
        model=str(model.path),
        engine={"policy": str(policy), "schedule": "zigzag", "offload_dir": str(tmp_path)},
        limits={"cpu": limit},
        rows=40,
        prompt=4,
        output=12,
    )
    assert found["peak_bytes"]["cpu"] <= limit and found["output_tokens"] == 480
    # Each weight on the disk once a pass, in 12 passes; the rest are rows of tables, which are gathered.
    streamed = sum(StorageSizes(config).matrices.values()) * found["achieved_placement"]["weights"]["disk"]
    assert found["bytes"]["disk_to_cpu"]["weights"] / streamed < 18


def test_prompts_share_no_prefix():
    found = prompts(50, 4, 1000)
    assert len({ids[0] for ids in found}) == 50 and all(len(ids) == 4 for ids in found)
    assert found == prompts(50, 4, 1000)


def assemble(peer_records, notes=()):
    found = {
        offload.IN_MEMORY: [record(10.0, 4.0, 5.0), record(12.0, 4.0, 5.0), record(11.0, 6.0, 5.0)],
        offload.OFFLOADED: [record(20.0, 8.0, 10.0, read=3 * 10**9, wait=2.0)],
        offload.ROW_BY_ROW: [record(44.0, 8.0, 30.0)],
    }
    block = offload.Block(6, 3, 2, 5, 4, 100.0, 10**9, "3x2")
    rates = {"product_flops": 1e11, "disk_bytes_s": 1e9}
    return offload.assemble(offload.Workload(peer_rows=(4, 16)), block, rates, found, peer_records, notes)


def test_the_result_has_the_format_of_benchmarks():
    found = assemble({"ours": {}, "accelerate": {}}, ["SKIPPED, Accelerate: not here"])
    assert {"name", "hardware", "versions", "rows", "ratios"} <= set(found)
    assert all({"label", "median", "min", "max", "n"} <= set(row) for row in found["rows"])
    rows = {row["label"]: row for row in found["rows"]}
    assert [rows[label]["median"] for label in ("in memory", "in memory: prefill", "in memory: decode")] == [11, 4, 5]
    assert rows["offloaded"]["tokens_per_s"] == 24 / 20 and rows["offloaded"]["wait_s"] == 2.0
    assert rows["offloaded: prefill"]["tokens_per_s"] == 30 / 8
    assert rows["offloaded: decode"]["tokens_per_s"] == 18 / 10, "the first token of a row comes with its prompt"
    ratios = found["ratios"]
    assert ratios["offloaded_to_in_memory"] == 11 / 20 and ratios["offloaded_to_in_memory_decode"] == 5 / 10
    assert ratios["zigzag_to_row_by_row"] == 44 / 20
    # 8 s of operations are longer than 3 GB from a disk of 1 GB/s.
    assert ratios["roofline_fraction"] == 8 / 20
    assert not any("accelerate" in name for name in ratios) and "SKIPPED, Accelerate: not here" in found["notes"]
    json.dumps(found, allow_nan=False)


def test_each_side_is_compared_at_its_best():
    ours = {4: [record(2.0, 1.0, 1.0, rows=4)], 16: [record(4.0, 1.0, 1.0, rows=16)]}
    theirs = {4: [record(8.0, 1.0, 1.0, rows=4)], 16: [record(40.0, 1.0, 1.0, rows=16)]}
    found = assemble({"ours": ours, "accelerate": theirs})["ratios"]
    assert found["accelerate_at_batch_4"] == (16 / 2) / (16 / 8)
    assert found["accelerate_at_best_batch"] == (64 / 4) / (16 / 8)
    # a size at which one side ran out of memory has no ratio
    assert "accelerate_at_batch_4" not in peers.ratios({"ours": {}, "accelerate": theirs}, 4)


@pytest.mark.parametrize("is_installed, reason", [(True, "no memory controller here"), (False, "not installed")])
def test_without_accelerate_or_a_memory_group_the_comparison_is_skipped(monkeypatch, tmp_path, is_installed, reason):
    def refuse(limit):
        raise memory_group.GroupUnavailable("no memory controller here")

    monkeypatch.setattr(peers, "MemoryGroup", refuse if is_installed else MagicMock())
    monkeypatch.setattr(accelerate_task, "find_spec", lambda package: is_installed or None)
    messages = []
    records, notes = peers.measure(offload.Workload(), opt_350m(), tmp_path, messages.append)
    assert records == {"ours": {}, "accelerate": {}}
    assert notes == messages and notes[0].startswith("SKIPPED, Accelerate") and reason in notes[0]


def files(tmp_path, mounts, own):
    (tmp_path / "mounts").write_text(mounts)
    (tmp_path / "own").write_text(own)
    return tmp_path / "mounts", tmp_path / "own"


def test_a_group_is_a_child_of_ours_in_version_1_and_a_sibling_in_version_2(tmp_path):
    first, second = tmp_path / "memory", tmp_path / "unified"
    (first / "mine").mkdir(parents=True)
    (second / "slice" / "mine").mkdir(parents=True)
    (second / "slice" / "cgroup.subtree_control").write_text("cpu memory\n")
    v1 = f"cgroup {first} cgroup rw,relatime,memory 0 0\n"
    v2 = f"cgroup2 {second} cgroup2 rw 0 0\n"
    own = "4:memory:/mine\n0::/slice/mine\n"
    assert memory_group._parent(*files(tmp_path, v2 + v1, own)) == (first / "mine", 1)
    assert memory_group._parent(*files(tmp_path, v2, own)) == (second / "slice", 2)
    with pytest.raises(memory_group.GroupUnavailable, match="mounted"):
        memory_group._parent(*files(tmp_path, "proc /proc proc rw 0 0\n", own))
    with memory_group.MemoryGroup(5, *files(tmp_path, v1, own)) as group:
        (made,) = (first / "mine").iterdir()
        assert (made / "memory.limit_in_bytes").read_text() == "5" and group.peak is None
        command = group.enter([sys.executable, "-c", "print(7)"])
        assert subprocess.run(command, capture_output=True, text=True).stdout == "7\n"
        assert int((made / "cgroup.procs").read_text()) > 0


def crash():
    raise ValueError("the reason")


def disappear():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def add(a, b):
    return {"sum": a + b}


@pytest.mark.slow
def test_a_measurement_runs_in_its_own_process(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    assert process.in_own_process(add, {"a": 2, "b": 3}) == {"sum": 5}
    with pytest.raises(FlexgenError, match="the reason"):
        process.in_own_process(crash, {})
    with pytest.raises(ProcessKilled):
        process.in_own_process(disappear, {})


@pytest.mark.parametrize("name", KNOWN)
def test_engine_flags_that_would_be_ignored_or_change_the_workload_are_refused(name):
    with pytest.raises(UsageError, match="device|engine"):
        load(name)(Options(engine={"device": "cpu"}))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["offload", "ablation", "policy", "kernels"])
def test_the_quick_command_measures_every_side(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    flags = [] if name == "kernels" else ["--offload-dir", str(tmp_path)]
    assert cli.main(["bench", name, "--quick", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["name"] == name and result["date"] and result["notes"]
    assert all({"label", "median", "min", "max", "n"} <= row.keys() and row["median"] > 0 for row in result["rows"])
    expected = {
        "offload": {"offloaded_to_in_memory", "zigzag_to_row_by_row", "roofline_fraction", "packed_link"},
        "ablation": {"no_overlap", "no_cpu_attention", "half_on_the_disk"},
        "policy": {"chosen_to_best_of_grid", "largest_error", "median_error"},
        "kernels": {"loop_to_plain_4bit", "packed_overhead_8_tokens"},
    }
    assert expected[name] <= result["ratios"].keys() and all(ratio > 0 for ratio in result["ratios"].values())


def in_this_process(function, arguments, group=None, environment=None):
    return function(**json.loads(json.dumps(arguments)))


def test_offload_measures_every_side(tiny, tmp_path, monkeypatch, small_ring):
    monkeypatch.setattr(engine_task, "in_own_process", in_this_process)
    monkeypatch.setattr(accelerate_task, "missing", lambda: "left out by the test")
    workload = offload.Workload(
        model=str(tiny("opt").path),
        prompt=6,
        output=3,
        rows=5,
        row_batches=2,
        repeats=2,
        weights_share=1.6,
        packed=(),
    )
    messages = []
    found = offload.measure(workload, load_profile("laptop"), tmp_path, messages.append)
    rows = {row["label"]: row for row in found["rows"]}
    assert set(rows) == {
        f"{label}{phase}"
        for label in ("in memory", "offloaded", "row by row")
        for phase in ("", ": prefill", ": decode")
    }
    assert found["block"]["batch_rows"] == 5 and found["block"]["batches"] == 1
    assert rows["in memory"]["n"] == 2 and rows["in memory"]["read_gb"] == 0
    assert rows["offloaded"]["read_gb"] > 0 and rows["row by row"]["read_gb"] > rows["offloaded"]["read_gb"]
    assert any(line.startswith("SKIPPED, Accelerate: left out") for line in found["notes"])
    assert any(line.startswith("offloaded: ") for line in messages)
    json.dumps(found, allow_nan=False)


def test_both_precisions_get_the_same_limits_and_fill_them():
    config = resolve("opt-350m").entry.config
    for case in packed.CASES:
        (plain, limits), (in_4_bits, same) = (packed.setting(config, side, case) for side in ("fp16", case.precision))
        assert limits == same
        shares = [Policy.parse(text) for text in (plain, in_4_bits)]
        near = [policy.wg if case.link_gb_s else policy.wc for policy in shares]
        assert 0 <= near[0] < 0.25 and near[1] > 2 * near[0]


def test_four_bits_are_measured_against_fp16(tmp_path, monkeypatch):
    seconds = {"fp16": iter((6.0, 9.0, 3.0)), "4bit": iter((2.0, 3.0, 4.0))}

    def answer(function, arguments):
        assert arguments["warm"] and arguments["limits"]
        latency = next(seconds[arguments["engine"]["precision"]])
        return {"latency_s": latency, "output_tokens": 12, "time_s": {"wait": 0.0}, "bytes": {}}

    monkeypatch.setattr(engine_task, "in_own_process", answer)
    config = resolve("opt-350m").entry.config
    rows, ratios = packed.measure("opt-350m", config, tmp_path, 3, packed.CASES[:1], lambda line: None)
    assert [(row["label"], row["median"]) for row in rows] == [
        ("fp16, behind 0.25 GB/s", 6.0),
        ("4bit, behind 0.25 GB/s", 3.0),
    ]
    assert ratios == {"packed_link": 2.0}


def test_the_scaled_machine_keeps_the_papers_proportions():
    workload, config = ablation.Workload(), resolve("opt-125m").entry.config
    scaled = ablation.scale(workload, config, 50e9)
    link, (read, write) = scaled.link_gb_s, scaled.disk_gb_s
    assert link * 1e9 / 50e9 == pytest.approx(12.89 * 2**30 / 4.3e12)
    assert scaled.gpu_bytes / (2 * config.num_parameters) == pytest.approx(16 / 60, rel=1e-6)
    assert (read / link, write / read) == (pytest.approx(1.6e9 / (12.89 * 2**30)), pytest.approx(1.3 / 1.6))
    ours = (scaled.prompt + workload.output / 2) * 2 * config.hidden_size * 4 / (12 * config.hidden_size**2 * 2)
    theirs = (512 + 16) * 2 * 7168 * 2 / (12 * 7168**2 * 2)
    assert ours == pytest.approx(theirs, rel=0.05)


def test_ablation_has_each_ratio_with_the_papers():
    variants = ablation.variants(ablation.Workload())
    found = {variant.label: [record(10.0, 1, 1)] for variant in variants}
    found["no overlap"] = [record(20.0, 1, 1), record(16.0, 1, 1), record(40.0, 1, 1)]
    scaled = ablation.Scaled(0.2, (0.02, 0.01), 1_000_000, 5e10, 20)
    result = ablation.assemble(ablation.Workload(), found, scaled)
    rows = {row["label"]: row for row in result["rows"]}
    assert rows["all techniques"]["ratio"] == rows["all techniques"]["paper"] == 1.0
    assert rows["no overlap"]["ratio"] == 0.5 == result["ratios"]["no_overlap"]
    assert rows["no overlap"]["paper"] == 5.86 / 7.32 and rows["no overlap"]["median"] == 20 / 24
    assert "paper" not in rows["half on the disk"]
    json.dumps(result, allow_nan=False)


def test_ablation_runs_every_variant(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_task, "in_own_process", in_this_process)
    monkeypatch.setattr(ablation, "GPU_BYTES", 1e14)
    workload = ablation.Workload(str(tiny("opt").path), 2, 2, prompt=6, output=3, repeats=1, decode_flops=1e12)
    found = ablation.measure(workload, tmp_path, Options())
    rows = {row["label"]: row for row in found["rows"]}
    assert set(rows) == {variant.label for variant in ablation.variants(workload)}
    assert rows["half on the disk"]["bytes"]["disk_to_cpu"]["weights"] > 0
    assert rows["all techniques"]["bytes"]["disk_to_cpu"]["weights"] == 0
    assert rows["no cpu attention"]["bytes"]["cpu_to_gpu"]["cache"] > 0
    assert rows["all techniques"]["bytes"]["cpu_to_gpu"]["cache"] == 0
