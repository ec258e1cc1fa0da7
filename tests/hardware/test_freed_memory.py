"""Freed memory that glibc keeps goes back to the system when it would break the promise."""

import subprocess
import sys

import pytest

from flexgen_helm.hardware import freed_memory
from flexgen_helm.hardware.freed_memory import UNCOUNTED_BYTES, ResidentMemory

MIB = 1 << 20


class Process:
    """Resident bytes of which `gaps` can be returned."""

    def __init__(self, monkeypatch):
        self.used, self.gaps, self.returned = 500 * MIB, 0, 0
        monkeypatch.setattr(freed_memory, "resident_bytes", lambda: self.used + self.gaps)
        monkeypatch.setattr(freed_memory, "return_freed_memory", self.give_back)

    def give_back(self):
        self.gaps, self.returned = 0, self.returned + 1


def test_gaps_are_returned_when_they_exceed_the_promise(monkeypatch):
    process = Process(monkeypatch)
    resident = ResidentMemory(100 * MIB)
    process.used += 120 * MIB  # within limit and workspace
    process.gaps = UNCOUNTED_BYTES - MIB
    resident.hold(20 * MIB)
    assert not process.returned
    process.gaps += 2 * MIB
    resident.hold(20 * MIB)
    assert process.returned == 1 and process.gaps == 0


def test_what_others_take_is_not_returned_again_and_again(monkeypatch):
    process = Process(monkeypatch)
    resident = ResidentMemory(100 * MIB)
    process.used += 400 * MIB  # HELM has read its data set
    for _ in range(100):
        resident.hold(0)
    assert process.returned == 1
    process.gaps = UNCOUNTED_BYTES
    resident.hold(0)
    assert process.returned == 2, "gaps are noticed as before"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_gaps_between_blocks_are_resident_until_then():
    """300 MiB in blocks of which every second one is freed: half of them stay resident, and then
    go.
    """
    code = """
import torch
from flexgen_helm.hardware.freed_memory import keep_freed_memory, resident_bytes, ResidentMemory
keep_freed_memory()
resident = ResidentMemory(180 << 20)
before = resident_bytes()
blocks = [torch.ones(1 << 18) for _ in range(300)]
del blocks[::2]
kept = resident_bytes() - before
resident.hold(0)
print(kept >> 20, (resident_bytes() - before) >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    kept, left = map(int, done.stdout.split())
    assert kept > 290 and left < 190
