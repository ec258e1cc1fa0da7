"""`flexgen-helm serve`, asked by the clients of other harnesses, and by whoever means it ill."""

import json
import random
import re
import signal
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
from helm.clients.openai_client import OpenAILegacyCompletionsClient
from helm.common.cache import BlackHoleCacheConfig
from helm.common.request import Request

from flexgen_helm import Engine, GenerationRequest, cli
from flexgen_helm.plugin.client import FlexgenClient
from tests.helpers.chat_models import add_template
from tests.helpers.servers import serving

KEY = "0123456789abcdef"
MESSAGES = [{"role": "user", "content": "the quick"}]
URL = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return add_template(tiny("llama").path, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.from_pretrained(folder) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    settings = "server.MAX_BODY_BYTES = 2**20"
    home = tmp_path_factory.mktemp("home")
    with serving(folder, home, "--served-model-name", "tiny", settings=settings) as served:
        yield served
        assert served.process.poll() is None
    assert served.process.returncode == 0 and "Traceback" not in served.output
    assert re.search(
        r"\d+ requests answered, \d+ refused; what was computed is stored\n$", served.lines[-1]
    )
    blocks = [
        re.fullmatch(r"[\d:]{8}  \d+ sequences? in .* s, [\d,]+ tokens, .* tokens/s\n", line)
        for line in served.lines
    ]
    assert any(blocks)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


# Harnesses' own clients


def near(values):
    return pytest.approx(list(values), abs=1e-5)


def test_openais_client_gets_what_the_engine_computes(client, engine):
    drawn, greedy = (
        dict(max_tokens=5, n=2, seed=4, temperature=0.9, top_p=0.9),
        dict(max_tokens=3, temperature=0),
    )
    texts, ids, said, sampled = engine.run(
        [
            GenerationRequest(prompt="the quick", max_tokens=3, echo_logprobs=True, top_logprobs=2),
            GenerationRequest(prompt_token_ids=[5, 6, 7], max_tokens=3),
            GenerationRequest(messages=MESSAGES, max_tokens=3, top_logprobs=2),
            GenerationRequest(prompt="fox", **drawn),
        ]
    )

    def complete(**body):
        return client.completions.create(model="tiny", **body).choices

    first, _ = complete(prompt=["the quick", "fox"], echo=True, logprobs=2, **greedy)
    (expected,) = texts.completions
    assert first.text == "the quick" + expected.text
    scores = [*texts.prompt_logprobs[1:], *expected.logprobs]
    assert first.logprobs.token_logprobs[1:] == near(scores)
    tops = [*texts.prompt_top_logprobs[1:], *expected.top_logprobs]
    for found, score, top in zip(first.logprobs.top_logprobs[1:], scores, tops, strict=True):
        # The most probable ones, and the token that is there.
        assert sorted(found.values())[-2:] == near(sorted(value for _, value in top))
        assert min(abs(value - score) for value in found.values()) < 1e-5
    assert complete(prompt=[5, 6, 7], **greedy)[0].text == ids.completions[0].text
    assert [choice.text for choice in complete(prompt="fox", **drawn)] == [
        one.text for one in sampled.completions
    ]
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, **greedy
    )
    (choice,), (expected,) = chat.choices, said.completions
    assert choice.message.content == expected.text
    assert [token.logprob for token in choice.logprobs.content] == near(expected.logprobs)
    for token, top in zip(choice.logprobs.content, expected.top_logprobs, strict=True):
        assert [one.logprob for one in token.top_logprobs] == near(value for _, value in top)
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve(
        "tiny"
    ).id == "tiny"


def test_a_stream_comes_in_one_piece(client):
    asked = dict(model="tiny", max_tokens=4, seed=1)
    streamed, chat = (
        dict(stream=True, stream_options={"include_usage": True}),
        client.chat.completions,
    )
    whole = chat.create(messages=MESSAGES, n=2, **asked)
    *events, last = chat.create(messages=MESSAGES, n=2, **streamed, **asked)
    assert [event.choices[0].delta.content for event in events] == [
        c.message.content for c in whole.choices
    ]
    assert last.choices == [] and last.usage == whole.usage
    (text,) = client.completions.create(prompt="the", **asked).choices
    (event,) = client.completions.create(prompt="the", stream=True, **asked)
    assert (event.choices[0].text, event.choices[0].finish_reason) == (
        text.text,
        text.finish_reason,
    )


@pytest.mark.slow  # importing the harness takes as long as all others
def test_local_completions_of_lm_evaluation_harness_scores_as_the_engine(server, engine, folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model="tiny", base_url=f"{server.url}/completions", tokenizer_backend="huggingface",
        tokenizer=str(folder), num_concurrent=4, max_length=96,
    )  # fmt: skip

    def instances(kind, arguments):
        return [Instance(kind, {}, pair, 0) for pair in arguments]

    draw, words = random.Random(3), ["the", " quick", " brown", " fox", " jumps"]
    pairs = [("".join(draw.choices(words, k=4)), draw.choice(words)) for _ in range(12)]
    # Continuations that are greedy, too.
    written = engine.run([GenerationRequest(prompt=context, max_tokens=1) for context, _ in pairs])
    texts = [result.completions[0].text for result in written]
    pairs += [
        (context, text)
        for (context, _), text in zip(pairs, texts)
        if text.strip() and text.strip().isprintable()
    ]
    scored, expected = model.loglikelihood(instances("loglikelihood", pairs)), engine.score(pairs)
    assert [logprob for logprob, _ in scored] == pytest.approx(
        [score.logprob for score in expected], abs=1e-4
    )
    assert [is_greedy for _, is_greedy in scored] == [score.is_greedy for score in expected]
    assert {True, False} == {is_greedy for _, is_greedy in scored}
    found = model.generate_until(
        instances("generate_until", [("the quick", {"until": ["x"], "max_gen_toks": 4})])
    )
    (result,) = engine.run([GenerationRequest(prompt="the quick", max_tokens=4, stop=("x",))])
    assert found == [result.completions[0].text]


def test_helms_legacy_client_gets_what_ours_gets(server, folder):
    theirs = OpenAILegacyCompletionsClient(
        BlackHoleCacheConfig(), api_key="none", base_url=server.url, openai_model_name="tiny"
    )
    ours = FlexgenClient("flexgen/tiny", path=str(folder), device="cpu", apply_chat_template=False)
    plain = Request(
        model="flexgen/tiny",
        model_deployment="flexgen/tiny",
        temperature=0.0,
        prompt="the quick",
        max_tokens=4,
    )
    for changes in (
        {},
        dict(max_tokens=0, echo_prompt=True),
        dict(stop_sequences=["e"], num_completions=2),
    ):
        expected, found = (
            client.make_request(replace(plain, **changes)) for client in (ours, theirs)
        )
        assert expected.success and found.success, found.error
        for a, b in zip(found.completions, expected.completions, strict=True):
            assert a.text == b.text and a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token.text for token in a.tokens] == [token.text for token in b.tokens]


# Who may ask, and what


@pytest.mark.parametrize(
    "headers, status, why",
    [
        ({"Host": "evil.example"}, 403, "is for the host 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:8000"}, 403, "is for the host"),
        ({"Origin": "http://evil.example"}, 403, "pages of 'http://evil.example'"),
        ({"Origin": "http://localhost:1"}, 403, "pages of"),  # another program of this machine
        ({"Content-Type": "text/plain"}, 415, "must be application/json"),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding is 'gzip'"),
    ],
)
def test_another_sites_page_is_refused(server, headers, status, why):
    found, answer = server.request("POST", URL, {"prompt": "the", "max_tokens": 1}, headers)
    assert found == status and why in answer["error"]["message"], answer


def test_own_pages_and_names_of_this_machine_are_answered(server):
    host = f"localhost:{server.port}"
    for headers in (
        {},
        {"Host": host},
        {"Host": "[::1]:80"},
        {"Host": host, "Origin": f"http://{host}"},
    ):
        assert server.request("GET", "/health", headers=headers) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "body, status, why",
    [
        (b"{not json", 400, "not JSON"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"prompt": NaN}', 400, "NaN is no number"),
        (b"[1]", 400, "must be an object"),
        (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
        (b'{"prompt": "the", "user": "' + b"x" * 2**20 + b'"}', 413, "longer than"),
        ({"prompt": [10**9]}, 400, "outside the vocabulary"),
        ({"prompt": ["the"] * 30, "n": 1000}, 400, "at most 20,000 are allowed"),
        ({"prompt": "the", "max_tokens": 10**9}, 400, "window"),
        ({"prompt": "the " * 300}, 400, "context_length_exceeded"),
        ({"prompt": "the", "stream": "yes"}, 400, "stream is"),
        ({"prompt": "the", "model": "gpt-4o"}, 404, "is not served here"),
    ],
)
def test_a_hostile_body_is_refused_by_one_sentence(server, body, status, why):
    found, answer = server.request("POST", URL, body)
    error = answer["error"]
    assert found == status and (why in error["message"] or why == error["code"]), answer
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )
    assert "\n" not in error["message"] and len(error["message"]) < 400
    assert server.request("GET", "/health")[0] == 200


def test_unknown_paths_and_methods_are_refused_in_openais_form(server):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", URL, 405),
        ("POST", "/v1/models", 405),
    ):
        found, answer = server.request(method, path)
        assert found == status and "the server has /v1/completions" in answer["error"]["message"]


def raw(server, content):
    """Send bytes over a connection; return what comes back until the server closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        received = b""
        try:
            connection.sendall(content)
            while data := connection.recv(65536):
                received += data
        except OSError:  # closed while we send
            pass
    return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_request_larger_than_any_is_refused(server):
    answer = raw(
        server, HEAD + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(200)) + b"\r\n"
    )
    assert answer == b"" or b" 400 " in answer
    answer = raw(server, HEAD + b"Content-Length: 104857600\r\n\r\n" + b" " * 100_000)
    assert b" 413 " in answer and b"longer than" in answer
    answer = raw(server, HEAD + b"Content-Length: -1\r\n\r\n")
    assert answer == b"" or b" 400 " in answer
    assert server.request("GET", "/health")[0] == 200


def test_beyond_this_machine_a_key_is_needed(folder, tmp_path, capsys):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with serving(folder, tmp_path / "home", "--host", "0.0.0.0", "--key-file", str(file)) as served:
        for wrong in (f"Bearer {KEY}x", KEY, "Bearer é", None):
            headers = {"Authorization": wrong.encode()} if wrong else {}
            status, answer = served.request("GET", "/v1/models", headers=headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        for headers in ({}, {"Host": "server.example"}):
            assert (
                served.request(
                    "GET", "/health", headers={"Authorization": f"Bearer {KEY}", **headers}
                )[0]
                == 200
            )
        (model,) = openai.OpenAI(base_url=served.url, api_key=KEY).models.list()
        assert model.id == str(folder) and KEY not in served.output
        assert cli.main(["serve", str(folder), "--port", str(served.port)]) == 2
        assert "cannot be taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, key, why",
    [
        (["--host", "0.0.0.0"], None, "a key is needed"),
        ([], "short", "has 5 characters"),
        ([], None, "cannot be read"),
        (["--host", "no host"], "short", "has 5 characters"),
        (["--host", "a..b"], KEY, "--host a..b is no address"),
    ],
)
def test_wrong_keys_and_hosts_end_in_one_sentence(
    folder, tmp_path, monkeypatch, capsys, arguments, key, why
):
    monkeypatch.delenv("FLEXGEN_HELM_SERVE_KEY", raising=False)
    if key:
        (tmp_path / "key").write_text(key)
    if arguments != ["--host", "0.0.0.0"]:
        arguments = [*arguments, "--key-file", str(tmp_path / "key")]
    assert cli.main(["serve", str(folder), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert why in line


# Waiting, leaving, ending


def rows(home):
    """Answers in the response cache."""
    count = 0
    for file in home.glob("journal/*.sqlite"):
        with sqlite3.connect(file) as connection:
            count += connection.execute("SELECT count(*) FROM answers").fetchone()[0]
    return count


def eventually(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# An answer takes as long as the test says: the file appears.
SLOW = """
from pathlib import Path
from flexgen_helm.engine.engine import Engine
run = Engine.run
def slow(self, requests, **named):
    while len(requests[0].prompt_token_ids) > 1 and not Path({gate!r}).exists():
        if named["should_stop"]():
            from flexgen_helm.errors import Interrupted
            raise Interrupted("stopped")
        server.time.sleep(0.01)
    return run(self, requests, **named)
Engine.run = slow
"""


def test_what_was_admitted_is_computed_though_its_client_has_gone(folder, tmp_path):
    gate, home = tmp_path / "open", tmp_path / "home"
    with serving(folder, home, settings=SLOW.format(gate=str(gate))) as served:
        body = json.dumps({"prompt": "the quick", "max_tokens": 2, "temperature": 0}).encode()
        with socket.create_connection(("127.0.0.1", served.port)) as leaving:
            leaving.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.5)
        with ThreadPoolExecutor(1) as pool:
            same = pool.submit(served.complete, prompt="the quick", max_tokens=2, temperature=0)
            time.sleep(0.5)
            assert served.request("GET", "/health")[0] == 200  # also while all computes
            gate.touch()
            assert same.result()["usage"]["completion_tokens"] == 2
        assert eventually(lambda: rows(home) == 1)  # both were one


def test_a_signal_ends_the_server_and_what_waits_is_told_so(folder, tmp_path):
    """SIGTERM here, SIGINT at the end of every other server."""
    settings = SLOW.format(gate=str(tmp_path / "never"))
    with (
        serving(folder, tmp_path / "home", settings=settings) as served,
        ThreadPoolExecutor(3) as pool,
    ):
        waiting = [
            pool.submit(served.request, "POST", URL, {"prompt": "the " * i}) for i in (2, 3, 4)
        ]
        time.sleep(1.0)
        assert served.stop(signal.SIGTERM) < 10
        for one in waiting:
            status, answer = one.result()
            assert status == 503 and "the server is being stopped" in answer["error"]["message"]
    assert served.process.returncode == 0 and "Traceback" not in served.output


def test_draws_without_a_seed_differ_and_are_repeated_by_the_next_server(folder, tmp_path):
    asked = dict(prompt="the quick", max_tokens=12, temperature=1.0)
    found = []
    for _ in range(2):
        with serving(folder, tmp_path / "home") as served:
            found.append([served.complete(**asked)["choices"][0]["text"] for _ in range(4)])
            assert (
                served.complete(**asked, seed=1)["choices"]
                == served.complete(**asked, seed=1)["choices"]
            )
    assert len(set(found[0])) == 4 and found[0] == found[1]
    assert rows(tmp_path / "home") == 5
