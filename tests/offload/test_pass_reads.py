"""What progress says of a pass: its layer, what it has read of how many bytes, and how fast the
disk is.
"""

import itertools

import pytest

from flexgen_helm import Engine
from flexgen_helm.offload import transfer_stats
from flexgen_helm.offload.transfer_stats import PassReads, TransferStats
from flexgen_helm.request import GenerationRequest


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(transfer_stats, "time", clock)
    return clock


def test_the_rate_is_that_of_the_last_reports(clock):
    stats = TransferStats()
    reads = PassReads(stats, 10**12, 0)
    assert reads.progress(1)["read_bytes_s"] == 0
    rates = []
    for gb_s in (2, 0.5):
        for _ in range(40):
            clock.now += 0.1
            stats.count_bytes("disk_to_cpu", "weights", int(gb_s * 0.08e9))
            stats.count_bytes("disk_to_cpu", "cache", int(gb_s * 0.02e9))
            rates.append(reads.progress(1)["read_bytes_s"] / 1e9)
    assert rates[39] == pytest.approx(2) and rates[79] == pytest.approx(0.5), "of all that is read"
    assert rates[39:79] == sorted(rates[39:79], reverse=True)


def test_weights_that_are_read_ahead_count_for_the_next_pass(clock):
    """A dense model: each pass reads 100 bytes, 10 of them before the pass before has ended."""
    stats = TransferStats()
    reads = PassReads(stats, 100, 10)
    seen = []
    for number in range(1, 4):
        for read in (0, 50, 60 if number == 1 else 50):
            stats.count_bytes("disk_to_cpu", "weights", read)
            fields = reads.progress(number)
            seen.append((fields["read_bytes"], fields["pass_bytes"]))
    first, later = [(0, 100), (50, 100), (100, 100)], [(10, 100), (60, 100), (100, 100)]
    assert seen == first + later + later


def test_a_pass_of_a_mixture_is_expected_to_read_what_the_one_before_has_read(clock):
    stats = TransferStats()
    reads = PassReads(stats, 100, 5)
    stats.count_bytes("disk_to_cpu", "weights", 100)
    assert reads.progress(1) == {"read_bytes": 100, "pass_bytes": 100, "read_bytes_s": 100 / 1e-9}
    expected = []
    for number in range(2, 5):
        expected.append(reads.progress(number)["pass_bytes"])
        stats.count_bytes("disk_to_cpu", "weights", 20 + number)
    assert expected == [100, 22, 23]
    # Reports are rarer than quick passes: 24 bytes, and of the next two 30 in all.
    stats.count_bytes("disk_to_cpu", "weights", 30)
    assert reads.progress(7) == {"read_bytes": 0, "pass_bytes": 18, "read_bytes_s": 199 / 1e-9}


@pytest.mark.parametrize("schedule", ["zigzag", "row"])
def test_an_engine_says_where_its_pass_is_and_what_it_has_read(
    tiny, tmp_path, monkeypatch, schedule
):
    monkeypatch.setattr("flexgen_helm.engine.run._REPORT_EVERY_S", 0.0)
    requests = [
        GenerationRequest(prompt_token_ids=[3 + n] * 9, max_tokens=4, ignore_eos=True)
        for n in range(6)
    ]
    seen = []
    options = {
        "policy": "3x2,0,0,0,100,0,100",
        "schedule": schedule,
        "device": "cpu",
        "offload_dir": tmp_path,
    }
    with Engine.from_pretrained(tiny("llama").path, **options) as engine:
        engine.run(requests, progress=seen.append)
        read, layers = (
            engine.last_run["bytes"]["disk_to_cpu"]["weights"],
            engine.model_config.num_layers,
        )
        on_disk = sum(engine.placement.bytes_on("disk").values())
    assert [p.num_passes for p in seen] == sorted(p.num_passes for p in seen) and seen[
        -1
    ].num_passes == 4
    for _, reports in itertools.groupby(seen, key=lambda p: p.num_passes):
        reports = list(reports)
        visited, amounts = [p.layer for p in reports], [p.read_bytes for p in reports]
        assert {*visited} == {*range(1, layers + 1)} and {p.num_layers for p in reports} == {layers}
        assert (visited == sorted(visited)) == (schedule == "zigzag"), (
            "row takes a batch through all layers first"
        )
        assert amounts == sorted(amounts) and amounts[-1] <= reports[-1].pass_bytes
    assert seen[0].pass_bytes == on_disk and read > 2 * on_disk
    with Engine.from_pretrained(tiny("llama").path, device="cpu") as engine:
        engine.run(requests, progress=seen.append)
    assert seen[-1].pass_bytes == seen[-1].read_bytes == seen[-1].read_bytes_s == 0
