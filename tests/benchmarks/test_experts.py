"""`bench experts`: what its ratios are made of, and shapes that are four times the memory."""

from __future__ import annotations

import gguf
import pytest

from flexgen_helm.benchmarks import experts, llama_cpp_task
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.models.config import expert_of
from flexgen_helm.planner.placement import StorageSizes


def record(decode_s: float, read: int, routed: int, latency_s: float = 20.0) -> dict:
    return {
        "decode_s": decode_s,
        "latency_s": latency_s,
        "experts": {"used": 16.0, "routed_bytes": routed, "read_bytes": read, "wasted_bytes": 0},
    }


@pytest.mark.parametrize("resident_s, disk_bytes_s, slower", [(2.0, 1e9, 10 / 4), (8.0, 1e9, 10 / 4), (20.0, 1e9, 5.0)])
def test_a_pass_is_compared_with_the_slower_of_memory_and_disk(resident_s, disk_bytes_s, slower):
    """40 GB in 4 passes take the disk 10 s each at 1 GB/s, and the pass took 4: then the disk was faster than that."""
    workload = experts.Workload()
    many = record(12.0, 40 * 10**9, 40 * 10**9, latency_s=40.0)
    records = {"few": record(16.0, 50, 40), "many": many, "most": {**many, "decode_s": 24.0}}
    result = experts.assemble(workload, 100, disk_bytes_s, records, resident_s, (None, None), [], ["a note"])
    assert result["ratios"]["slower_of_memory_and_disk_over_measured"] == pytest.approx(slower)
    assert result["ratios"]["bytes_of_used_experts_over_read"] == pytest.approx(0.8)
    assert result["ratios"]["bytes_of_all_experts_over_read"] == pytest.approx(100 * 17 / 50)
    assert result["notes"][-1] == "a note" and "accelerate_over_ours" not in result["ratios"]
    peers = {"latency_s": 30.0}, {"latency_s": 10.0}
    theirs = [{"rows": 8, "pass_s": 2.0}, {"rows": 256, "pass_s": 8.0}]
    result = experts.assemble(workload, 100, disk_bytes_s, records, resident_s, peers, theirs, [])
    assert result["ratios"]["accelerate_over_ours"] == 3.0 and len(result["rows"]) == 9
    # 1,024 sequences in passes of 8 s, against 256.
    assert result["ratios"]["tokens_per_s_over_llama_cpp_each_at_its_best_block"] == 4.0
    assert result["ratios"]["llama_cpp_over_ours_at_8_sequences"] == 2.0


def test_the_weights_are_four_times_the_memory_and_most_are_experts(tmp_path):
    workload = experts.Workload()
    config = open_checkpoint(
        experts.write_config(workload, workload.layers, tmp_path / "model"), weights="dummy"
    ).config
    sizes = StorageSizes(config).matrices
    assert sum(sizes.values()) >= 4 * workload.group_bytes > 4 * workload.limit_bytes
    assert sum(size for name, size in sizes.items() if expert_of(name)) > 0.9 * sum(sizes.values())


def test_llama_cpp_gets_the_same_shapes(tmp_path):
    """Read back by the gguf package."""
    workload = experts.QUICK
    model = experts.write_config(workload, workload.layers, tmp_path / "model")
    file = tmp_path / "model.gguf"
    written = llama_cpp_task.write_gguf(model, str(file))
    reader = gguf.GGUFReader(file)
    config = open_checkpoint(model, weights="dummy").config
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == config.num_parameters
    assert written["bytes"] == file.stat().st_size
    if llama_cpp_task.missing() is None:
        assert llama_cpp_task.decode_pass_s(file, (2, 4, 2), None, tmp_path) > 0
