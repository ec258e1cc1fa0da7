"""Threads follow the cores that other programs leave free; the user's own choice wins."""

import os
import subprocess
import sys
import time

import pytest
import torch

from flexgen_helm.hardware import threads
from flexgen_helm.hardware.threads import CpuTimes, ThreadGovernor, busy_cores, read_cpu_times


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "_WINDOW_S", 0.0)
    for name in threads._USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Machine:
    """Counters that advance a second a reading; `busy` and `ours` are cores in use."""

    def __init__(self):
        self.busy = self.ours = self.at = self.all_s = self.own_s = 0.0

    def __call__(self):
        self.at, self.all_s = self.at + 1, self.all_s + self.busy + self.ours
        self.own_s += self.ours
        return CpuTimes(self.at, self.all_s, self.own_s)


@pytest.mark.parametrize("busy, expected", [(0.3, 4), (0.67, 3), (1.9, 2), (9.0, 1)])
def test_threads_are_the_cores_that_are_free(four_cores, busy, expected):
    machine = Machine()
    governor = ThreadGovernor(machine)
    machine.busy, machine.ours = busy, 4 - busy
    governor.adapt()
    assert torch.get_num_threads() == expected
    machine.busy = 0.0
    governor.adapt()
    assert torch.get_num_threads() == 4  # and come back


def test_a_small_change_does_not_swing_the_number(four_cores):
    machine = Machine()
    governor = ThreadGovernor(machine)
    numbers = []
    for machine.busy in (1.0, 0.9, 0.6, 0.4, 0.3, 0.5, 0.4):
        governor.adapt()
        numbers.append(torch.get_num_threads())
    assert numbers == [3] * 7


def test_threads_are_given_back_and_never_exceeded(four_cores):
    torch.set_num_threads(2)
    machine = Machine()
    governor = ThreadGovernor(machine)
    governor.adapt()
    assert torch.get_num_threads() == 2  # though four cores are free
    machine.busy = 3.0
    governor.adapt()
    assert torch.get_num_threads() == 1
    governor.release()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", threads._USER_VARIABLES)
def test_what_the_user_has_set_wins(four_cores, monkeypatch, name):
    monkeypatch.setenv(name, "4")
    machine = Machine()
    governor = ThreadGovernor(machine)
    machine.busy = 4.0
    governor.adapt()
    assert torch.get_num_threads() == 4


def test_a_program_that_computes_is_seen_by_the_real_counters():
    earlier = read_cpu_times()
    program = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        earlier = read_cpu_times()
        time.sleep(1.0)
        later = read_cpu_times()
        busy.kill()
    assert busy_cores(earlier, later) > 0.3
    assert later.own_s - earlier.own_s < 0.5


@pytest.mark.slow
def test_own_work_is_not_taken_for_that_of_others():
    """The inverse: a process that computes itself leaves the counters of others as they are."""
    program = (
        "import time\nfrom flexgen_helm.hardware.threads import read_cpu_times\n"
        "a = read_cpu_times()\nbegan = time.process_time()\nwhile time.process_time() < began + 1: "
        "pass\n"
        "b = read_cpu_times()\nprint((b.own_s - a.own_s) / (time.process_time() - began))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert 0.7 < float(done.stdout) < 1.3, done.stderr
