"""Signals and the end of a process that has a service."""

import os
import signal
import subprocess
import threading

import pytest

from flexgen_helm.service import process
from flexgen_helm.service.service import Service
from tests.helpers.fake_engine import FakeLoader
from tests.helpers.forks import python
from tests.helpers.paths import ROOT

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def handlers():
    """Puts the handlers back that the test replaces."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before):
        signal.signal(number, handler)


def test_sigint_stops_the_service_and_does_what_it_did_before(handlers):
    service, seen = Service(FakeLoader()), []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    process.interrupt_on_signals(service.interrupt)
    handler = signal.getsignal(signal.SIGINT)
    process.interrupt_on_signals(service.interrupt)
    assert signal.getsignal(signal.SIGINT) is handler  # chained once
    signal.raise_signal(signal.SIGINT)
    assert service._interrupted.is_set() and seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.interrupt_on_signals(service.interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a background job stays one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=process.interrupt_on_signals, args=(service.interrupt,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_does_not_disturb_the_last_writes(handlers, monkeypatch):
    """The process has decided to end; the response cache is being written."""
    closed = []

    def close():
        for number in NUMBERS:
            signal.raise_signal(number)
        closed.append(True)
        return True

    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    process.close_at_exit(close)
    assert closed == [True]


def test_a_fork_ends_at_a_signal_and_interrupts_nothing(handlers):
    """A pool of a metric ends its workers by SIGTERM."""
    service = Service(FakeLoader())
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler)
    for is_served in (False, True):
        if is_served:
            process.interrupt_on_signals(service.interrupt)
        if not (child := os.fork()):
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not service._interrupted.is_set()


# The model's thread is inside PyTorch, hears nothing, and comes back to Python while that is being
# taken down.
DEAF = """
import atexit, sys, threading
from flexgen_helm import cli
from flexgen_helm.service import process, service
from flexgen_helm.service.models import ModelArguments
from tests.helpers.fake_engine import FakeLoader

busy = threading.Event()

def make(model):
    import torch
    values = torch.randn(300, 300)
    busy.set()
    while True:
        values @ values

service.SHUTDOWN_S = 0.1
deaf = service.Service(FakeLoader(make))
atexit.register(process.close_at_exit, deaf.close)
deaf.preload(ModelArguments("m", "m"))
busy.wait()
print("said", end="")
sys.exit(cli.main(["no such command"]))
"""


def test_a_thread_that_hears_nothing_changes_no_exit_code():
    command, environment = [*python("all"), "-c", DEAF], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, "terminate" in done.stderr) == (2, "said", False)
