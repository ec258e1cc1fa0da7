"""First use from many threads: one import at a time, one load per key; work ahead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from flexgen_helm.concurrency import computed_ahead, single_flight

THREADS = 32
# What `transformers` does: the module that others may see unfinished is replaced at the end of its
# import.
REPLACES_ITSELF = """
import sys, time, types
time.sleep(0.2)
sys.modules[__name__] = types.SimpleNamespace(Name=1, __spec__=__spec__)
"""
IMPORT_NAME = """
import sys, threading, time
from contextlib import nullcontext
from flexgen_helm.concurrency import import_lock

sys.path.insert(0, sys.argv[1])
errors = []

def request():
    try:
        with {guard}:
            from replaces_itself import Name
    except ImportError as error:
        errors.append(error)

first = threading.Thread(target=request)
first.start()
while "replaces_itself" not in sys.modules: time.sleep(0.001)
later = [threading.Thread(target=request) for _ in range(7)]
for thread in later: thread.start()
for thread in [first, *later]: thread.join()
print(len(errors))
"""


def in_new_process(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


@pytest.mark.parametrize(
    ("guard", "errors"), [("import_lock('replaces_itself')", "0"), ("nullcontext()", "7")]
)
def test_a_package_that_replaces_itself_is_imported_whole(tmp_path, guard, errors):
    (tmp_path / "replaces_itself.py").write_text(REPLACES_ITSELF)
    assert in_new_process(IMPORT_NAME.format(guard=guard), tmp_path) == errors


def call_at_once(function, keys):
    """Results or errors of calls that begin together, one a thread."""
    barrier = threading.Barrier(len(keys))

    def call(key):
        barrier.wait()
        try:
            return function(key)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(call, keys))


@pytest.mark.parametrize("decorator", [single_flight, cache])
def test_one_call_per_key(decorator):
    called: list[str] = []

    @decorator
    def load(key):
        called.append(key)
        time.sleep(0.3)
        return [key]

    results = call_at_once(load, ["a", "b"] * THREADS)
    assert results == [["a"], ["b"]] * THREADS
    if decorator is cache:
        assert len(called) > 2
        return
    assert sorted(called) == ["a", "b"] and len({id(result) for result in results}) == 2
    load.cache_clear()
    assert load("a") == ["a"] and len(called) == 3
    assert load(key="a") == load(key="a") == ["a"] and len(called) == 4


def test_waiting_callers_get_the_error_and_the_next_one_tries_again():
    called: list[str] = []

    @single_flight
    def load(key):
        called.append(key)
        time.sleep(0.3)
        if len(called) == 1:
            raise OSError("no network")
        return key

    results = call_at_once(load, ["a"] * 8)
    assert len(called) == 1 and {str(error) for error in results} == {"no network"}
    assert load("a") == load("a") == "a" and len(called) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_work_ahead_keeps_its_order_after_an_error_and_in_a_fork():
    def checked(number):
        if number == 5:
            raise ValueError("five")
        return number

    found = []
    with pytest.raises(ValueError, match="five"):
        found.extend(computed_ahead(checked, range(99), 2))
    assert found == [0, 1, 2, 3, 4]
    if not (child := os.fork()):  # which has none of the threads
        signal.alarm(60)
        os._exit(list(computed_ahead(checked, range(5), 2)) != found)
    assert os.waitpid(child, 0)[1] == 0
