"""A program in a fork is a program: what `subprocess` sees of it is the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.forks import python
from tests.helpers.paths import ROOT

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


@pytest.mark.parametrize("way", WAYS)
def test_arguments_folder_variables_input_and_output(way: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*WAYS[way](), "-c", SAID, "one", "two words"], cwd=tmp_path, env={"OWN": "x"}, input="typed",
        capture_output=True, text=True,
    )  # fmt: skip
    said = f"['-c', 'one', 'two words'] {tmp_path} x  __main__ typed\na thread\nat the end\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "an error\n")


@pytest.mark.parametrize("way", WAYS)
def test_scripts_and_modules(way: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside; print(sys.argv[1:], __file__, beside.__name__)")
    (tmp_path / "beside.py").write_text("if __name__ == '__main__':\n    import sys; print(sys.argv[1:])")
    for command in ([str(script), "a"], ["-m", "beside", "a"]):
        done = subprocess.run([*WAYS[way](), *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == (f"['a'] {script} beside\n" if len(command) == 2 else "['a']\n")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", ENDS)
def test_how_it_ends(way: str, code: str) -> None:
    done = subprocess.run([*WAYS[way](), "-c", f"import os, sys; {code}"], capture_output=True, text=True)
    assert done.returncode == ENDS[code]
    assert ("words" in done.stderr) == ("words" in code) and ("ZeroDivisionError" in done.stderr) == ("/" in code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("way", WAYS)
def test_a_signal_reaches_it(way: str, number: int) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [*WAYS[way](), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
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


def test_launchers_that_are_killed_at_any_moment_leave_the_next_one_its_fork() -> None:
    path = python("plan")[-1]
    order = json.dumps(
        {"arguments": ["-c", "import time; time.sleep(60)"], "folder": str(ROOT), "environment": {}}
    ).encode()
    for sent in (b"", len(order).to_bytes(4, "big"), len(order).to_bytes(4, "big") + order[:9], None):
        with socket.socket(socket.AF_UNIX) as launcher:
            launcher.connect(path)
            if sent is None:  # it is gone before it hears the number of its fork
                launcher.shutdown(socket.SHUT_RD)
                sent = len(order).to_bytes(4, "big") + order
            if sent:
                socket.send_fds(launcher, [sent[:4]], [0, 1, 2])
                launcher.sendall(sent[4:])
    assert subprocess.run([*python("plan"), "-c", "print(7)"], capture_output=True, text=True).stdout == "7\n"


def test_a_launcher_that_ends_with_its_fork_leaves_the_next_one_its_fork() -> None:
    code = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"
    with subprocess.Popen([*python("plan"), "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        fork, server = map(int, launcher.stdout.readline().split())
        os.kill(server, signal.SIGSTOP)  # so that it hears of both at once
        os.kill(fork, signal.SIGKILL)
        time.sleep(0.2)  # until it has ended
        launcher.kill()
        launcher.wait()
        os.kill(server, signal.SIGCONT)
    assert subprocess.run([*python("plan"), "-c", "print(7)"], capture_output=True, text=True).stdout == "7\n"


def test_what_runs_in_one_is_not_in_the_next() -> None:
    change = "import os, sys, flexgen_helm; flexgen_helm.own = os.environ['OWN'] = 'x'; sys.path.append('/own')"
    look = "import os, sys, flexgen_helm; print(hasattr(flexgen_helm, 'own'), 'OWN' in os.environ, '/own' in sys.path)"
    subprocess.run([*python("plan"), "-c", change], check=True, cwd=ROOT)
    done = subprocess.run([*python("plan"), "-c", look], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False False\n"


def test_the_processes_of_a_run_share_what_forks_and_it_ends_with_the_run() -> None:
    code = "from tests.helpers import forks; print(forks.python('plan')[-1], *(own.pid for own in forks.SERVERS))"
    path, alone = python("plan")[-1], {name: os.environ[name] for name in os.environ if name != "TEST_FORKS"}
    shared, own = (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True).stdout
        for environment in (None, alone)
    )
    assert shared.split() == [path]
    other, pid = own.split()
    assert other != path and not Path(other).exists()
    deadline = time.monotonic() + 30
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
