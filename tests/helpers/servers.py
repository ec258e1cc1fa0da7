"""`flexgen-helm serve` in a process of its own, for tests that ask it over HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

from tests.helpers.forks import python
from tests.helpers.paths import ROOT

# What is set in the module before the command runs, so that a test need not wait as long as a user
# does.
_PROGRAM = """
import sys
from flexgen_helm.harnesses import openai_server as server
{settings}
from flexgen_helm.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Served:
    """A server that answers: its process, and what it has printed."""

    def __init__(self, process, port, lines):
        self.process, self.port, self.lines = process, port, lines
        self.url = f"http://127.0.0.1:{port}/v1"

    @property
    def output(self):
        return "".join(self.lines)

    def request(self, method, path, body=None, headers=None, timeout=60):
        """Return status and JSON of an answer; body: bytes as they are, anything else as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if content is not None else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, content, {**given, **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if answer.getheader(
                "Content-Type"
            ) == "application/json" else text
        finally:
            connection.close()

    def complete(self, **body):
        """Return the body of an answer that must be one."""
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def stop(self, number=signal.SIGINT):
        """Return the seconds that the server takes to end."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(30)
        return time.monotonic() - began


@contextmanager
def serving(folder, home, *flags, settings="", key=None, cwd=ROOT):
    """Serve a model on a free port until the block ends.

    settings: statements about `server`, the module. key: in the environment.
    """
    environment = {**os.environ, "FLEXGEN_HELM_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment |= {} if key is None else {"FLEXGEN_HELM_SERVE_KEY": key}
    program = _PROGRAM.format(settings=settings)
    command = [
        *python("all"),
        "-c",
        program,
        "serve",
        str(folder),
        "--port",
        "0",
        "--device",
        "cpu",
        *flags,
    ]
    process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)
    lines = []
    found, stderr = threading.Event(), process.stderr
    assert stderr is not None

    def read():
        for line in stderr:
            lines.append(line)
            if line.startswith("serving "):
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(120), lines
        match = re.search(r"^serving .* at http://\S+:(\d+)/v1;", "".join(lines), re.MULTILINE)
        assert match, lines
        yield Served(process, int(match[1]), lines)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
        reader.join(5)
