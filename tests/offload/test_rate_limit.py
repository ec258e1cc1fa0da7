"""Simulated links and disks: a transfer takes no less than its bytes, one waits for the other, and
errors pass.
"""

import time
from threading import Thread

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.offload.copy_engine import SimulatedCopyEngine
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.rate_limit import DiskRates, RateLimit
from flexgen_helm.shared_sizes import ALIGNMENT
from tests.helpers.offload import tiers_of

SIZE = 16 * ALIGNMENT
# Of 16 pages.
SECONDS = 0.04


def seconds(*actions):
    """All at a time."""
    threads = [Thread(target=action) for action in actions]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def test_files_of_a_disk_share_its_rate_and_directions_do_not(tmp_path):
    rates = DiskRates(RateLimit(SIZE / SECONDS / 1e9), RateLimit(SIZE / (2 * SECONDS) / 1e9))
    files = [DirectFile(tmp_path / name, SIZE, create=True, rates=rates) for name in "ab"]
    content, buffers = (
        torch.arange(SIZE, dtype=torch.int64).to(torch.uint8),
        [pages(SIZE), pages(SIZE)],
    )
    buffers[0].copy_(content)
    assert seconds(*(lambda file=file: file.write(0, buffers[0]) for file in files)) >= 4 * SECONDS
    assert (
        seconds(*(lambda file=file, to=to: file.read(0, to) for file, to in zip(files, buffers)))
        >= 2 * SECONDS
    )
    assert torch.equal(buffers[1], content) and torch.equal(buffers[0], content)
    # The machine's own disk is faster, so it was the limit that took the time.
    plain = [DirectFile(file.path, SIZE, create=False) for file in files]
    assert min(seconds(lambda: plain[0].read(0, buffers[0])) for _ in range(5)) < SECONDS
    for file in (*files, *plain):
        file.close()


def test_a_link_takes_the_time_of_its_bytes():
    engine, source = (
        SimulatedCopyEngine(SIZE / SECONDS / 1e9, None),
        torch.ones(SIZE, dtype=torch.uint8),
    )
    start = time.perf_counter()
    assert torch.equal(engine.to_device(source), source)
    assert time.perf_counter() - start >= SECONDS


def test_a_transfer_that_fails_holds_nothing_up():
    limit = RateLimit(1e-9)
    with pytest.raises(OSError, match="broken"), limit.transfer(1 << 40):
        raise OSError("broken")
    with limit.transfer(0):
        pass


def test_an_engine_on_a_slow_disk_gives_the_same_bits_and_takes_its_time(tiny, tmp_path):
    model = tiny("llama").path
    requests = [GenerationRequest(prompt_token_ids=[3, 5, 7], max_tokens=3, echo_logprobs=True)]

    def run(**more):
        limits = MemoryLimits(gpu=64 << 20)
        options = {"device": "sim", "policy": "1x1,0,0,0,0,0,0", "offload_dir": tmp_path}
        with Engine.from_pretrained(model, limits=limits, **options, **more) as engine:
            (result,) = engine.run(requests)
            return result.completions[0], engine.last_run

    plain, _ = run()
    slow, record = run(disk_gb_s=(0.05, 0.05))
    assert slow == plain
    moved = sum(record["bytes"]["disk_to_cpu"].values())
    assert moved > 0 and record["latency_s"] >= moved / 0.05e9


def test_operations_of_transfers_run_on_their_thread_alone(tmp_path):
    """A second team of OpenMP's threads would let all of them sleep between the operations of the
    engine.
    """
    main = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        manager = tiers_of(tmp_path)
        inside = [
            manager.submit(name, torch.get_num_threads).result() for name in ("weights", "cache in")
        ]
        assert (inside, torch.get_num_threads()) == ([1, 1], 4)
    finally:
        torch.set_num_threads(main)
