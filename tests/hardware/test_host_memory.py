"""Freed memory that glibc keeps goes back to the system when it would break the promise."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

from flexgen_helm.hardware import host_memory
from flexgen_helm.hardware.host_memory import UNCOUNTED_BYTES, ResidentMemory

MIB = 1 << 20


class Process:
    """Resident bytes of which `gaps` can be returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.gaps, self.returned = 500 * MIB, 0, 0
        monkeypatch.setattr(host_memory, "resident_bytes", lambda: self.used + self.gaps)
        monkeypatch.setattr(host_memory, "return_freed_memory", self.give_back)

    def give_back(self) -> None:
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


@pytest.mark.parametrize("has_file", [True, False])
def test_the_reading_is_psutils_also_in_a_fork(has_file, monkeypatch):
    if not has_file:  # as on a system without this file

        def missing(*given):
            raise FileNotFoundError

        monkeypatch.setattr(host_memory.os, "open", missing)
    host_memory._reader.cache_clear()
    own = psutil.Process().memory_info().rss
    assert abs(host_memory.resident_bytes() - own) < 8 * MIB
    if has_file and hasattr(os, "fork"):
        child = os.fork()
        if not child:
            before = host_memory.resident_bytes()
            more = np.ones(200 * MIB, np.uint8)
            os._exit(0 if host_memory.resident_bytes() - before > len(more) // 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
    monkeypatch.undo()
    host_memory._reader.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_gaps_between_blocks_are_resident_until_then():
    """300 MiB in blocks of which every second one is freed: half of them stay resident, and then go."""
    code = """
import torch
from flexgen_helm.hardware.host_memory import ResidentMemory, keep_freed_memory, resident_bytes
keep_freed_memory()
resident = ResidentMemory(180 << 20)
before = resident_bytes()
blocks = [torch.ones(1 << 18) for _ in range(300)]
del blocks[::2]
kept = resident_bytes() - before
resident.hold(0)
print(kept >> 20, (resident_bytes() - before) >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 290 and left < 190
