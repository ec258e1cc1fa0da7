"""A limit of the device's memory holds for all that the process allocates there, and for all of its
engines.
"""

import re

import pytest
import torch

from flexgen_helm import Engine, MemoryLimits
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload import copy_engine
from flexgen_helm.progress import Message, observed_by
from tests.cuda.engine_runs import MIB, assert_close, requests, run

GIVEN = 768 * MIB


def opened(tiny, **limits):
    return Engine.from_pretrained(tiny("llama").path, device="cuda", limits=MemoryLimits(**limits))


def test_engines_of_a_process_have_their_limits_together(tiny, cuda_device):
    """The workspace is within them. A cap of the program stays where no limit is given."""
    allocator = cuda_device.memory[0]
    torch.cuda.set_per_process_memory_fraction(0.75)
    opened(tiny).close()
    assert allocator.allowed == int(0.75 * allocator.total)
    with opened(tiny, gpu=GIVEN) as engine:
        assert engine.ledger.limit < GIVEN == allocator.allowed
        with opened(tiny, gpu=600 * MIB):
            assert allocator.allowed == GIVEN + 600 * MIB
        assert allocator.allowed == GIVEN
        with opened(tiny):
            assert allocator.allowed == allocator.total
        assert allocator.allowed == GIVEN
    assert allocator.allowed == allocator.total


def test_what_exceeds_the_limit_is_computed_in_smaller_batches(tiny, cuda_device, monkeypatch):
    monkeypatch.setattr(copy_engine, "_LEAST_LIMIT", 0)
    asked = requests(48, 100, 1)
    for limit in (GIVEN, 2 * MIB):  # the first run also measures the products, once in a process
        cuda_device.memory[0].peak = 0
        results, record = run(
            tiny("opt").path, asked, torch.float16, limits=MemoryLimits(gpu=limit)
        )
        assert (
            record["halvings"] == (2 if limit < GIVEN else 0)
            and cuda_device.memory[0].peak <= limit
        )
        assert_close(tiny("opt"), results, torch.float16)


@pytest.mark.parametrize("gpu", [1 << 10, 64 * MIB])
def test_a_small_limit_works_or_names_one_that_does(tiny, cuda_device, gpu):
    try:
        engine = opened(tiny, gpu=gpu)
    except MemoryLimitError as error:
        assert gpu < MIB
        engine = opened(
            tiny,
            gpu=int(
                re.search(r"runs with .*?([\d,]+) bytes\) or more", str(error))[1].replace(",", "")
            ),
        )
    with engine:
        assert [result.error for result in engine.run(requests(2))] == [None] * 2


def test_a_limit_beyond_what_is_free_is_said_and_not_taken(tiny, cuda_device):
    seen = []
    taken = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    with observed_by(seen.append), opened(tiny, gpu=1 << 40, cpu=1 << 50) as engine:
        assert engine.ledger.limit < cuda_device.memory[0].total - taken.nbytes
    said = [event.text for event in seen if isinstance(event, Message)]
    for flag, allowed in (("--cpu-memory", "1,048,576 GiB"), ("--gpu-memory", "1,024 GiB")):
        assert (
            sum(text.startswith(f"{flag} allows {allowed}") and "lower it" in text for text in said)
            == 1
        ), said
