"""Matrices that a file of the checkpoint has as they are used are read from there: no second copy,
the same answers.
"""

import os
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm import Engine, MemoryLimits
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.errors import CheckpointError, MemoryLimitError
from flexgen_helm.offload.weights_at_rest import WeightsAtRest
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.quant.precisions import PRECISIONS
from tests.helpers.offload import MIB, offloaded, with_expert_slots, workload
from tests.helpers.parity import assert_same
from tests.helpers.small_disks import small_disk

ON_DISK = "3x2,0,0,0,100,0,100"


@pytest.fixture
def copy(tiny, tmp_path):
    """copy(variant) -> a folder with the model, which a test may change."""

    def make(variant):
        return shutil.copytree(tiny(variant).path, tmp_path / "model")

    return make


def engine_of(path, folder, **options):
    options = {
        "limits": MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB),
        "schedule": "zigzag",
        **options,
    }
    return Engine.from_pretrained(path, policy=ON_DISK, offload_dir=folder, **options)


def written(folder):
    """Names of weight files."""
    return sorted(path.name for path in folder.glob("weights-*/*") if path.name.endswith(".weight"))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("variant", ["llama", "phi3", "mixtral", "qwen3-moe"])
def test_no_weight_file_is_written_and_the_answers_are_those_in_memory(
    tiny, tmp_path, monkeypatch, variant, device
):
    with_expert_slots(monkeypatch, 3)
    with Engine.from_pretrained(tiny(variant).path) as engine:
        expected = engine.run(workload())
    with offloaded(tiny, variant, tmp_path, ON_DISK, schedule="zigzag", device=device) as engine:
        assert_same(engine.run(workload()), expected)
        assert engine.last_run["achieved_placement"]["weights"]["disk"] == 1.0
    assert written(tmp_path) == []


def test_another_disk_gets_weight_files_of_its_own(tiny, tmp_path):
    """It was named for its speed. The inverse of the test above."""
    with small_disk(tmp_path / "small", 4 * MIB) as folder:
        with Engine.from_pretrained(tiny("llama").path) as engine:
            expected = engine.run(workload())
        with offloaded(tiny, "llama", folder, ON_DISK, schedule="zigzag") as engine:
            assert_same(engine.run(workload()), expected)
        assert len(written(folder)) == len([n for n in engine.placement.weights])


def test_values_are_checked_once_and_again_for_other_weights(copy, tmp_path, monkeypatch):
    reads = Counter()
    honest = SafetensorsCheckpoint._read_tiles

    def counted(self, name):
        reads[name] += 1
        return honest(self, name)

    monkeypatch.setattr(SafetensorsCheckpoint, "_read_tiles", counted)
    path = copy("llama")
    matrices = {
        name for name, shape in SafetensorsCheckpoint(path).shapes.items() if len(shape) == 2
    }
    for expected in (1, 0):
        reads.clear()
        engine_of(path, tmp_path / "offload").close()
        assert {reads[name] for name in matrices} == {expected}
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, 0] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite"):
        engine_of(path, tmp_path / "offload")
    # what was refused is not taken for checked
    with pytest.raises(CheckpointError, match="not finite"):
        engine_of(path, tmp_path / "offload")


def test_a_file_that_changes_during_a_run_ends_it(copy, tmp_path):
    path = copy("llama")
    with engine_of(path, tmp_path / "offload") as engine:
        engine.run(workload())
        (file,) = path.glob("*.safetensors")
        with file.open("r+b") as opened:
            opened.seek(-2, os.SEEK_END)
            opened.write(b"\1\2")
        with pytest.raises(CheckpointError, match="has changed"):
            engine.run(workload())
        file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(CheckpointError, match="has changed"):
            engine.run(workload())


def test_a_header_of_odd_length_is_no_place_to_compute_from(copy, tmp_path):
    """Elements would begin at odd addresses. Such matrices get weight files."""
    path = copy("llama")
    (file,) = path.glob("*.safetensors")
    with engine_of(path, tmp_path / "one") as engine:
        expected = engine.run(workload())
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes(
        (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    )
    with engine_of(path, tmp_path / "two") as engine:
        assert_same(engine.run(workload()), expected)
    assert written(tmp_path / "two") and not written(tmp_path / "one")


def test_weights_at_rest_need_no_room(tiny, tmp_path):
    """A directory's limit that the weights exceed: in 16 bits nothing is written there, in 8 bits
    they are.
    """
    path = tiny("llama").path
    at_rest = WeightsAtRest(SafetensorsCheckpoint(path), PRECISIONS["fp16"], tmp_path)
    packed = WeightsAtRest(SafetensorsCheckpoint(path), PRECISIONS["8bit"], tmp_path)
    sizes, packed_sizes = (
        StorageSizes(at_rest._checkpoint.config, PRECISIONS[p]).matrices for p in ("fp16", "8bit")
    )
    assert at_rest.num_bytes(sizes, with_written=False) == sum(sizes.values())
    assert packed.num_bytes(packed_sizes, with_written=True) == 0
    limits = MemoryLimits(cpu=64 * MIB, disk=4096)
    engine_of(path, tmp_path, limits=limits).close()
    with pytest.raises(MemoryLimitError, match="disk"):
        engine_of(path, tmp_path, limits=limits, precision="8bit")
    assert packed.num_bytes(packed_sizes, with_written=True) == 0
    engine_of(path, tmp_path, precision="8bit").close()
    assert packed.num_bytes(packed_sizes, with_written=True) == sum(packed_sizes.values())
    assert packed.num_bytes(packed_sizes, with_written=False) == 0


def test_room_of_weights_is_no_room_for_a_cache(tiny, tmp_path):
    """A limit of the directory holds for all that is written there, whatever the checkpoint's own
    files have.
    """
    for policy, on_disk in (("3x2,0,100,0,0,0,100", 0), (ON_DISK, 1)):
        options = {
            "limits": MemoryLimits(cpu=64 * MIB, disk=4096),
            "schedule": "zigzag",
            "offload_dir": tmp_path,
        }
        with Engine.from_pretrained(tiny("llama").path, policy=policy, **options) as engine:
            disk = engine._tiers.ledgers["disk"]
            assert disk.free == 4096 and bool(disk.in_use) == bool(on_disk)
