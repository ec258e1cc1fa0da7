"""llama.cpp's server as a peer of `bench clients`, by a program that speaks its protocol."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.benchmarks import Options, clients, llama_cpp
from flexgen_helm.benchmarks.helm_runs import HelmRun
from flexgen_helm.benchmarks.llama_cpp import PeerRun, compare, serve, unsupported
from flexgen_helm.errors import FlexgenError, UsageError

# Answers with the sum of the ids; the first look at its health is too early. Prompt [0] is refused, as is a model
# file that is not there.
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "--version" in sys.argv:
    sys.exit(print("version: 9999 (fake)", file=sys.stderr))
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("loading", flags["-m"], flush=True)
if not os.path.exists(flags["-m"]):
    sys.exit("no such model")
looks = []
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        looks.append(self.path)
        self.reply(503 if len(looks) < 3 else 200, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(flags["-m"] + ".log", "a") as file:
            file.write(json.dumps([self.path, body]) + "\\n")
        if body["prompt"] == [0]:
            return self.reply(500, {"error": "refused"})
        self.reply(200, {"content": str(sum(body["prompt"]))})
    def log_message(self, *arguments): ...
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file for a fake server that is in PATH."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    (tmp_path / "model.gguf").touch()
    return tmp_path / "model.gguf"


def request(**changes: object) -> dict[str, object]:
    return {"prompt": "the quick", "max_tokens": 5, "stop_sequences": ["\n"], "temperature": 0.0, "num_completions": 1,
            "echo_prompt": False, **changes}  # fmt: skip


def test_answers_come_in_the_order_of_the_requests(model, tmp_path):
    prompts = [[i, 1] for i in range(40)]
    found = serve(model, prompts, [request(max_tokens=1 + i) for i in range(40)], 8, tmp_path / "log")
    assert found.texts == [str(i + 1) for i in range(40)] and 0 < found.ready_s < found.seconds
    # The longest prompt with its answer has 42 tokens.
    assert found.flags[:4] == ["-np", "8", "-c", str(8 * 256)]
    sent = [json.loads(line) for line in Path(f"{model}.log").read_text().splitlines()]
    assert {path for path, _ in sent} == {"/completion"}
    for _, body in sent:
        assert body["n_predict"] == body["prompt"][0] + 1 and body["stop"] == ["\n"]
        assert body["temperature"] == 0 and body["cache_prompt"] is True


def test_a_server_that_fails_is_shown_with_its_log(model, tmp_path):
    with pytest.raises(FlexgenError, match=r"(?s)500.*loading"):
        serve(model, [[0]], [request()], 1, tmp_path / "log")
    with pytest.raises(FlexgenError, match=r"(?s)not ready, exit code 1.*no such model"):
        serve(tmp_path / "nothing", [[1]], [request()], 1, tmp_path / "log")


def test_what_the_server_cannot_give_is_said():
    assert unsupported([request()]) is None
    for changes in ({"echo_prompt": True}, {"max_tokens": 0}):
        assert "log-probabilities" in str(unsupported([request(), request(**changes)]))
    for changes in ({"temperature": 0.5}, {"num_completions": 2}):
        assert "greedy" in str(unsupported([request(**changes)]))


def test_the_better_number_of_slots_is_compared_and_equal_answers_are_counted(model):
    ours = HelmRun(10.0, 1.0, {}, ["a", "b", "c"], [], ready_s=6.0)
    served = {
        1: [PeerRun(30.0, 2.0, ["a", "b", "c"])],
        8: [PeerRun(s, 2.0, ["a", "x", "c"]) for s in (14.0, 20.0)],
    }
    found = compare("task", ours, {"label": "task: ours", "median": 10.0}, served)
    assert [row["median"] for row in found["rows"]] == [30.0, 17.0]
    # Of both sides the time after the model was loaded: 15 s in the middle, and 4 s.
    assert found["ratios"] == {"against_llama_cpp": 1.7, "against_llama_cpp_after_start_up": 15.0 / 4.0}
    assert found["scores"] == {"equal_completions": 2, "completions": 3}
    assert found["versions"]["llama.cpp"] == "9999 (fake)"
    with pytest.raises(ValueError):  # an answer is missing
        compare("task", ours, {"label": "", "median": 1.0}, {1: [PeerRun(1.0, 0.5, ["a"])]})


def test_without_the_program_the_peer_is_skipped_visibly(model, tmp_path, monkeypatch):
    assert llama_cpp.missing() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    told: list[str] = []
    with pytest.raises(UsageError, match=r"SKIPPED, llama.cpp: llama-server is not in PATH; install"):
        clients.run(Options(tasks=("natural",), peers=("llama.cpp",), tell=told.append))
    assert "SKIPPED" in told[0]


@pytest.mark.slow
@pytest.mark.skipif(llama_cpp.missing() is not None, reason="llama-server is not in PATH")
def test_llama_cpp_itself_answers(wheel_model, tmp_path):
    """Greedy answers of the same file of weights: the first tokens, before roundings part."""
    prompts = [[504, 2726, 314], [504, 3575, 282, 4649, 314]]
    asked = [request(max_tokens=3, stop_sequences=[]) for _ in prompts]
    found = serve(wheel_model, prompts, asked, 2, tmp_path / "log")
    with Engine.from_pretrained(wheel_model) as engine:
        ours = engine.run([GenerationRequest(prompt_token_ids=ids, max_tokens=3) for ids in prompts])
        assert found.texts == [result.completions[0].text for result in ours]
    assert llama_cpp.version()
