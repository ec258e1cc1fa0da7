"""A program in a fork is a program: what `subprocess` sees of it is the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.forks import python

WAYS: dict[str, Callable[[], tuple[str, ...]]] = {"cold": lambda: (sys.executable,), "fork": lambda: python("plan")}
SAID = """
import atexit, os, sys, threading, time
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
print(sys.argv, os.getcwd(), os.environ["OWN"], sys.path[0], __name__, sys.stdin.read())
print("an error", file=sys.stderr)
"""
ENDS = {
    "sys.exit(3)": 3, "sys.exit('words')": 1, "sys.exit()": 0, "pass": 0, "os._exit(7)": 7, "1 / 0": 1,
    "raise KeyboardInterrupt": -2, "os.kill(os.getpid(), 9)": -9, "os.kill(os.getpid(), 15)": -15, "os.abort()": -6,
}  # fmt: skip


def test_arguments_folder_variables_input_and_output(tmp_path: Path) -> None:
    done = subprocess.run(
        [*python("plan"), "-c", SAID, "one", "two words"], cwd=tmp_path, env={"OWN": "x"}, input="typed",
        capture_output=True, text=True,
    )  # fmt: skip
    said = f"['-c', 'one', 'two words'] {tmp_path} x  __main__ typed\na thread\nat the end\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "an error\n")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", ENDS)
def test_how_it_ends(way: str, code: str) -> None:
    done = subprocess.run([*WAYS[way](), "-c", f"import os, sys; {code}"], capture_output=True, text=True)
    assert done.returncode == ENDS[code]
    assert ("words" in done.stderr) == ("words" in code) and ("ZeroDivisionError" in done.stderr) == ("/" in code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_it(number: int) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [*python("plan"), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        program = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(20) == -number
        limit = time.monotonic() + 20
        while is_alive(program) and time.monotonic() < limit:
            time.sleep(0.01)
        assert not is_alive(program)


def is_alive(program: psutil.Process) -> bool:
    """A zombie has ended; its parent has not looked yet."""
    try:
        return program.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
