"""Programs in forks of a process that has imported their packages: one starts in 0.1 s instead of 2
to 8.

    subprocess.run([*python("all"), "-c", code], ...)    in place of [sys.executable, "-c", code]

The command is a launcher that hands its folder, variables, and descriptors to the process of
`PACKAGES[...]`, passes signals on, and ends as the fork ends. A fork is a process of its own in
every other way: memory, files, locks, exit code, output. Killed, the launcher takes the fork with
it, a moment later. What imports bring, how long a start takes, how much memory a process has, and
what is set before Python starts is tested with `sys.executable`.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.paths import ROOT

_PLAN = (
    "flexgen_helm.cli",
    "flexgen_helm.cli.app",
    "flexgen_helm.cli.batch",
    "flexgen_helm.cli.divergence",
    "flexgen_helm.cli.plan",
    "flexgen_helm.cli.run",
    "flexgen_helm.cli.verify",
    "flexgen_helm.engine.machine_profile",
    "flexgen_helm.planner.plan",
    "scipy.optimize",
    "pandas",
    "rich.console",
    "rich.table",
    "pydantic.types",
)
# Not `helm.benchmark.run`: which of HELM's programs a process is, is said by whether it has
# imported that one.
_HELM = (
    "helm.benchmark.config_registry",
    "helm.benchmark.run_spec_factory",
    "helm.benchmark.runner",
    "helm.proxy.services.remote_service",
    "helm.benchmark.metrics.basic_metrics",
    "helm.benchmark.metrics.evaluate_reference_metrics",
    "helm.benchmark.scenarios.simple_scenarios",
    "flexgen_helm.plugin",
    "flexgen_helm.plugin.helm_patches",
    "flexgen_helm.cli",
    "pydantic.types",
)
_TORCH = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "flexgen_helm.engine.engine",
    "flexgen_helm.cli",
)
# Name -> what its processes have imported.
# Few, as each imports its packages once more.
PACKAGES = {"plan": _PLAN, "all": (*_PLAN, *_HELM, *_TORCH)}
# Those that fork and that this process has started.
SERVERS: list[subprocess.Popen[str]] = []
# The variable that names the folder of this run's sockets, and the pipe there that closes when the
# run ends.
_FOLDER, _RUN = "TEST_FORKS", "run"
_LAUNCHER = str(Path(__file__).with_name("fork_launcher.py"))


def share() -> str:
    """Make a folder by which this process and its workers share what forks, until this process
    ends.
    """
    folder = tempfile.TemporaryDirectory(prefix="forks")
    run = f"{folder.name}/{_RUN}"
    os.mkfifo(run)
    writer = os.open(run, os.O_RDWR)
    os.environ[_FOLDER] = folder.name
    atexit.register(folder.cleanup)
    atexit.register(os.close, writer)
    return folder.name


@cache
def python(packages: str) -> tuple[str, ...]:
    """The beginning of a command, in place of `sys.executable`; the first who asks starts what
    forks.
    """
    folder = os.environ.get(_FOLDER) or share()
    path = os.path.join(folder, packages)
    with open(f"{folder}/lock", "w") as lock, open(f"{folder}/{_RUN}") as run:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.forks", path, packages], cwd=ROOT, text=True,
                stdin=run, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            SERVERS.append(server)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
    return sys.executable, "-I", "-S", _LAUNCHER, path


# ---- in the process that forks ----


def import_packages(packages: str) -> None:
    """Import what every fork would import; let HELM read its YAML files by libyaml, which saves a
    fork a second.
    """
    for name in PACKAGES[packages]:
        importlib.import_module(name)
    if "helm.benchmark.run_spec_factory" in sys.modules:
        import yaml
        from helm.benchmark.run_spec import discover_run_spec_functions

        discover_run_spec_functions()
        yaml.SafeLoader = yaml.CSafeLoader


def _serve(path: str, packages: str) -> None:
    import_packages(packages)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    # else collections of each fork copy the pages of all that is imported: half a second of its
    # time
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    chosen = selectors.DefaultSelector()
    chosen.register(listener, selectors.EVENT_READ)
    chosen.register(0, selectors.EVENT_READ)  # closed when the tests end
    print("ready", flush=True)
    while True:
        for key, _ in chosen.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                child = _start(connection)
                if child is None:
                    connection.close()
                    continue
                descriptor = os.pidfd_open(child)
                chosen.register(descriptor, selectors.EVENT_READ, (child, connection))
                chosen.register(connection, selectors.EVENT_READ, (child, None))
            elif key.fd == 0:
                return
            elif key.data[1] is None:  # a launcher is gone
                if key.fileobj.fileno() < 0:  # closed, as its fork is gone, too
                    continue
                os.kill(key.data[0], signal.SIGKILL)
                chosen.unregister(key.fileobj)
            else:
                child, connection = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                chosen.unregister(key.fd)
                os.close(key.fd)
                if connection in chosen.get_map():
                    chosen.unregister(connection)
                    with suppress(OSError):  # killed at the same moment
                        connection.sendall(code.to_bytes(4, "big", signed=True))
                connection.close()


def _start(connection: socket.socket) -> int | None:
    """Fork a program; None if its launcher was killed before it had said which."""
    with suppress(OSError):
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as file:
            content = file.read(size := int.from_bytes(head, "big"))
        child = os.fork() if content and len(content) == size else None
        if child == 0:
            _be(json.loads(content), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):  # killed since then: its end of the connection says so
            connection.sendall((child or 0).to_bytes(4, "big"))
        return child
    return None


def _be(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the program, and end as Python ends it."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 4096)
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        random.seed()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _ended(order["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _ended(arguments: list[str]) -> int:
    """Run the program; return its exit code, or minus the signal by which Python ends itself."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    code, sys.argv, sys.path[0] = (
        (compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]], "")
        if kind == "-c"
        else (compile(Path(kind).read_bytes(), kind, "exec"), arguments, str(Path(kind).parent))
    )
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind != "-c":
        main.__file__ = kind
    exec(code, main.__dict__)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
