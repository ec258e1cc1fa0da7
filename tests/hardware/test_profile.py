"""Profiles: curves, files, the shipped machines, and a real measurement of this one."""

import json
import math
from dataclasses import replace

import pytest

from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import Curve, HardwareProfile, load_profile, shipped_profiles


def test_a_curve_goes_through_its_points_and_is_flat_beyond_them():
    curve = Curve(((1, 10.0), (4, 40.0), (64, 20.0)))
    assert [curve.at(size) for size in (0.5, 1, 4, 64, 1e9)] == pytest.approx([10, 10, 40, 20, 20])
    assert curve.at(2) == pytest.approx(20)  # straight in logarithms
    assert curve.best == 40


@pytest.mark.parametrize(
    "points", [(), ((4, 1), (1, 1)), ((1, 1), (1, 2)), ((1, 0),), ((1, math.inf),)]
)
def test_a_curve_that_makes_no_sense_is_refused(points):
    with pytest.raises(ValueError, match="points"):
        Curve(points)


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_machines_survive_a_round_trip_and_say_where_their_figures_come_from(name):
    profile = load_profile(name)
    assert profile.name == name and profile.sources
    restored = HardwareProfile.from_json(json.loads(json.dumps(profile.to_json(), allow_nan=False)))
    assert restored == profile


# What the data sheets allow at most: (bytes a second of memory, 16-bit operations a second, of the
# link).
PEAKS = {
    "t4": (320e9, 65e12, 15.75e9),
    "rtx3090": (936e9, 142e12, 31.5e9),
    "a100": (2.04e12, 312e12, 31.5e9),
    "h100": (3.35e12, 990e12, 63e9),
    "h200": (4.8e12, 990e12, 63e9),
}


@pytest.mark.parametrize("name", sorted(PEAKS))
def test_no_shipped_rate_exceeds_the_data_sheet(name):
    profile = load_profile(name)
    memory, operations, link = PEAKS[name]
    assert profile.gpu.memory_bytes_s <= memory and profile.gpu.attention_bytes_s <= memory
    assert all(curve.best <= operations for curve in profile.gpu.matmul_flops.values())
    assert max(profile.link.to_gpu_bytes_s, profile.link.to_cpu_bytes_s) <= link
    assert profile.link.pageable_to_gpu_bytes_s <= profile.link.to_gpu_bytes_s


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.pop("cpu"), "cpu missing"),
        (lambda d: d.update(speed=3), "speed not known"),
        (lambda d: d["disk"].update(read_bytes_s=-1), "at least 0"),
        (lambda d: d["disk"].update(read_bytes_s=0), "more than 0"),
        (lambda d: d["disk"].update(read_bytes_s="fast"), "a number"),
        (lambda d: d.update(overlap=5), "overlap: a number from 0 to 1 is expected"),
        (lambda d: d.update(overlap=None), "overlap: a number from 0 to 1 is expected"),
        (lambda d: d["link"].update(duplex=1.5), "duplex: a number from 0 to 1 is expected"),
        (lambda d: d["disk"].update(bytes=10**400), "at least 0"),
        (lambda d: d["gpu"].update(memory_bytes=0.5), "more than 0"),
        (lambda d: d.update(sources=[]), "sources"),
        (lambda d: d.update(name=None), "name"),
        (
            lambda d: d["cpu"].update(matmul_flops={"float32": [[4, 1], [1, 1]]}),
            "by type are expected",
        ),
        (lambda d: d.update(link=None), "both a gpu and a link"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_by_figure(change, words, tmp_path):
    data = load_profile("t4").to_json()
    change(data)
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=words):
        load_profile(str(file))


def test_an_unknown_machine_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(UsageError, match=r"t5.*t4.*measured"):
        load_profile("t5")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        load_profile(str(tmp_path / "broken.json"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(UsageError, match="it is no text"):
        load_profile(str(tmp_path / "model.gguf"))


def test_products_run_in_the_faster_of_16_bits_and_float32():
    gpu = load_profile("t4").gpu
    assert gpu.compute_dtype("float16") == "float16"
    assert gpu.compute_dtype("bfloat16") == "float16"  # a T4 has no bfloat16
    assert gpu.compute_dtype("bfloat16", float16_suffices=False) == "float32"
    emulated = replace(gpu, matmul_flops={**gpu.matmul_flops, "bfloat16": Curve(((1, 1.0),))})
    assert emulated.compute_dtype("bfloat16") == "float16"
    assert load_profile("a100").gpu.compute_dtype("bfloat16") != "float32"
    assert (
        replace(gpu, matmul_flops={"float32": Curve(((1, 1.0),))}).compute_dtype("float16")
        == "float32"
    )
