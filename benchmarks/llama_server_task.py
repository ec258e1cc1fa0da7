"""llama.cpp's server as a peer of `bench clients`: the same GGUF file, and the same prompts as token ids over HTTP.

It is `llama-server` in PATH, one of llama.cpp's programs, or the one in the wheel `xllamacpp`. It keeps each slot's
last prompt, so that a prompt that begins in the same way is computed from where it differs.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil

from flexgen_helm.benchmarks import llama_server
from flexgen_helm.benchmarks.common import log_tail
from flexgen_helm.benchmarks.llama_cpp_task import version
from flexgen_helm.benchmarks.llama_server import MODULE
from flexgen_helm.benchmarks.peer_runs import Peer, PeerRun
from flexgen_helm.errors import FlexgenError

PROGRAM = "llama-server"
# Requests that it computes at a time; the better one counts.
SLOTS = (1, 8)
_START_S, _ANSWER_S, _END_S = 120.0, 3600.0, 10.0


def missing() -> str | None:
    """Say why this peer cannot be measured here; None if it can."""
    if program():
        return None
    return f"{PROGRAM} is not in PATH; install llama.cpp, which brings it, or `pip install {MODULE}`"


def program() -> list[str]:
    """Return the command of the server, without its flags; empty where there is none."""
    if which(PROGRAM):
        return [PROGRAM]
    return [sys.executable, "-m", llama_server.__name__] if find_spec(MODULE) else []


def unsupported(requests: Sequence[Mapping[str, Any]]) -> str | None:
    """Say which of HELM's requests the server cannot answer, or not so that answers can be compared; None if none."""
    if any(request["echo_prompt"] or not request["max_tokens"] for request in requests):
        return "llama.cpp's server gives no log-probabilities of a prompt"
    if any(request["temperature"] or request["num_completions"] != 1 for request in requests):
        return "only greedy requests for one completion are compared with llama.cpp's server"
    return None


def flags(slots: int, tokens: int) -> list[str]:
    """Return the server's flags; tokens: the longest prompt with its answer."""
    threads = psutil.cpu_count(logical=False) or 1
    room = 256 * (tokens // 256 + 1)
    return ["-np", str(slots), "-c", str(slots * room), "-t", str(threads)]


def serve(
    file: Path, prompts: Sequence[Sequence[int]], requests: Sequence[Mapping[str, Any]], slots: int, log: Path
) -> PeerRun:
    """Start a server, send it HELM's `requests`, and end it; prompts: token ids of each.

    Raises `FlexgenError` with the end of the server's log if it ends, or answers with an error.
    """
    tokens = max(len(ids) + request["max_tokens"] for ids, request in zip(prompts, requests))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = flags(slots, tokens)
    command = [*program(), "-m", str(file), "--host", "127.0.0.1", "--port", str(port), *chosen]
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            _wait_until_ready(server, url)
            ready_s = time.perf_counter() - began
            with ThreadPoolExecutor(2 * slots) as pool:  # a slot never waits for this program
                texts = list(pool.map(lambda ids, request: _complete(url, ids, request), prompts, requests))
            return PeerRun(time.perf_counter() - began, ready_s, texts, chosen)
        except (OSError, KeyError, ValueError) as error:
            raise FlexgenError(f"{PROGRAM} failed ({error}):\n{log_tail(log)}") from error
        finally:
            server.terminate()
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()


def peer() -> Peer:
    return Peer("llama_cpp", "llama.cpp's server", {"llama.cpp": version(program())})


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"{url}/health", timeout=_START_S):
                return
        except URLError:  # not listening yet, or 503 while it loads the model
            time.sleep(0.05)
    raise OSError(f"not ready, exit code {server.poll()}")


def _complete(url: str, ids: Sequence[int], request: Mapping[str, Any]) -> str:
    body = {
        "prompt": list(ids),
        "n_predict": request["max_tokens"],
        "stop": list(request["stop_sequences"]),
        "temperature": 0,
        "cache_prompt": True,
    }
    sent = Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(sent, timeout=_ANSWER_S) as answer:
        return str(json.loads(answer.read())["content"])
