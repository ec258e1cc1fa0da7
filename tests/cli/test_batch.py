"""`flexgen-helm batch` on tiny models."""

from __future__ import annotations

import json
import os

import pytest

from flexgen_helm import Engine, GenerationRequest, cli
from tests.helpers.chat_models import add_template
from tests.helpers.faults import fails_once

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return add_template(tiny("llama").path, tmp_path_factory.mktemp("batch") / "model")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id, text, **body):
    return line(custom_id, CHAT, messages=[{"role": "user", "content": text}], **body)


def write(path, lines):
    path.write_text(
        "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    )
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def read(path):
    return [json.loads(one) for one in path.read_text().splitlines()]


def body_of(answer):
    assert answer["response"]["status_code"] == 200, answer
    return answer["response"]["body"]


def test_answers_are_those_of_the_engine_in_order(folder, tmp_path, capsys):
    lines = [
        line("ids", TEXT, prompt=[5, 6, 7], max_tokens=3, temperature=0, logprobs=1),
        chat("chat", "the quick", max_tokens=4, temperature=0, logprobs=True),
        line("echo", TEXT, prompt="the quick", max_tokens=0, echo=True, logprobs=0),
        line(
            "drawn", TEXT, prompt="the quick", max_tokens=5, n=3, seed=4, top_p=0.9, stop=["e", "o"]
        ),
    ]
    out = tmp_path / "out.jsonl"
    assert (
        cli.main(
            ["batch", str(write(tmp_path / "in", lines)), "-o", str(out), "--model", str(folder)]
        )
        == 0
    )
    assert capsys.readouterr().err.endswith(f"4 answers in {out}\n")
    answers = read(out)
    assert [answer["custom_id"] for answer in answers] == ["ids", "chat", "echo", "drawn"]
    assert all(set(answer) == {"id", "custom_id", "response", "error"} for answer in answers)
    assert len({answer["id"] for answer in answers}) == 4 and all(
        answer["error"] is None for answer in answers
    )
    bodies = [body_of(answer) for answer in answers]
    assert {body["created"] for body in bodies} == {1_700_000_000} and {
        body["model"] for body in bodies
    } == {str(folder)}
    messages = [{"role": "user", "content": "the quick"}]
    with Engine.from_pretrained(folder) as engine:
        ids, said, scored, drawn = engine.run(
            [
                GenerationRequest(prompt_token_ids=[5, 6, 7], max_tokens=3),
                GenerationRequest(messages=messages, max_tokens=4),
                GenerationRequest(prompt="the quick", max_tokens=0, echo_logprobs=True),
                GenerationRequest(
                    prompt="the quick",
                    max_tokens=5,
                    n=3,
                    seed=4,
                    temperature=1.0,
                    top_p=0.9,
                    stop=("e", "o"),
                ),
            ]
        )
    (choice,) = bodies[0]["choices"]
    assert choice["text"] == ids.completions[0].text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        ids.completions[0].logprobs, rel=1e-4
    )
    assert bodies[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert bodies[1]["choices"][0]["message"]["content"] == said.completions[0].text
    assert bodies[1]["usage"]["prompt_tokens"] == len(said.prompt_token_ids)
    (echoed,) = bodies[2]["choices"]
    assert echoed["text"] == "the quick" == "".join(echoed["logprobs"]["tokens"])
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1:] == pytest.approx(
        scored.prompt_logprobs[1:], rel=1e-4
    )
    assert [choice["text"] for choice in bodies[3]["choices"]] == [
        one.text for one in drawn.completions
    ]
    reasons = ["length" if one.finish_reason == "length" else "stop" for one in drawn.completions]
    assert [choice["finish_reason"] for choice in bodies[3]["choices"]] == reasons
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "home",
        "in",
        "out.jsonl",
        "out.jsonl.run.json",
    ]


def test_a_bad_line_fails_alone_with_one_sentence(folder, tmp_path, capsys):
    good = line("good", TEXT, model=str(folder), prompt="the", max_tokens=2)
    lines = [
        (good, None),
        ("{not json", "line 2 is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (
            '{"custom_id": "nan", "url": "/v1/completions", "body": {"prompt": "x", '
            '"temperature": NaN}}',
            "NaN",
        ),
        ("[1]", "not a JSON object"),
        (line("", TEXT, prompt="the"), "line 6 has no custom_id"),
        (good, "custom_id of line 7 is that of line 1 too"),
        ({**line("a", TEXT, prompt="the"), "colour": 1}, "line 8 has 'colour'"),
        ({**line("b", TEXT, prompt="the"), "method": "GET"}, "method of line 9 must be POST"),
        (line("c", "/v1/embeddings", input="the"), "url is"),
        (line("d", TEXT, model=str(folder), prompt="the", n=10**30), "n is 1000"),
        (line("e", TEXT, model=str(folder), prompt="\ud800"), "not valid Unicode"),
        (line("g", TEXT, model=str(folder), prompt="the", max_tokens=1000), "window"),
        (line("h", TEXT, model="gpt-4o", prompt="the"), "a file asks one model"),
        (line("\ud800", TEXT, model=str(folder), prompt="the", max_tokens=2), None),
    ]
    out = tmp_path / "out.jsonl"
    assert (
        cli.main(["batch", str(write(tmp_path / "in", [one for one, _ in lines])), "-o", str(out)])
        == 1
    )
    assert "13 of 15 lines failed" in capsys.readouterr().err
    for answer, (_, why) in zip(read(out), lines, strict=True):
        if why is None:
            assert body_of(answer)["choices"][0]["text"] is not None
            continue
        error = answer["response"]["body"]["error"]
        assert (
            why in error["message"] and "\n" not in error["message"] and len(error["message"]) < 400
        )
        assert (
            set(error) == {"message", "type", "param", "code"}
            and error["type"] == "invalid_request_error"
        )
        assert answer["response"]["status_code"] == (404 if answer["custom_id"] == "h" else 400)
    assert read(out)[5]["custom_id"] is None and read(out)[-1]["custom_id"] == "\ud800"


@pytest.mark.parametrize(
    "lines, arguments, why",
    [
        ([line("a", TEXT, prompt="the")], (), "no line names a model"),
        (
            [line("a", TEXT, prompt="the", model="gpt-4o-mini")],
            (),
            "; --model NAME answers all lines",
        ),
        ([line("a", TEXT, prompt="the")], ("--model", "no-such-model"), "no-such-model"),
        (None, (), "cannot be read"),
    ],
)
def test_what_answers_no_line_is_refused(tmp_path, capsys, lines, arguments, why):
    if lines is not None:
        write(tmp_path / "in", lines)
    assert cli.main(["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert why in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_answers_take_no_file_of_requests_and_no_folder(tmp_path, capsys):
    path = write(tmp_path / "in", ["{"])
    content = path.read_bytes()
    assert cli.main(["batch", str(path), "-o", str(path)]) == 2 and path.read_bytes() == content
    assert "is the file of the requests" in capsys.readouterr().err
    assert cli.main(["batch", str(path), "-o", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder; name a file" in capsys.readouterr().err


def test_a_file_without_a_good_line_needs_no_model(tmp_path):
    out = tmp_path / "out"
    assert cli.main(["batch", str(write(tmp_path / "in", ["{"])), "-o", str(out)]) == 1
    assert read(out)[0]["response"]["status_code"] == 400
    assert (
        cli.main(["batch", str(write(tmp_path / "in", [])), "-o", str(out)]) == 0
        and read(out) == []
    )


def test_a_second_start_computes_the_rest_and_writes_the_same(
    folder, tmp_path, monkeypatch, capsys
):
    texts = [line(f"t{i}", TEXT, prompt=[5 + i, 6], max_tokens=4, n=2) for i in range(10)]
    chats = [chat(f"c{i}", "the quick " * (1 + i % 3), max_tokens=4) for i in range(10)]
    asked = write(tmp_path / "in", [*texts, *chats, "{"])
    command = ["batch", str(asked), "-o", str(tmp_path / "out"), "--model", str(folder)]
    assert cli.main(command) == 1
    undisturbed = (tmp_path / "out").read_bytes()
    (tmp_path / "out").unlink()
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "other home"))
    computed = fails_once(monkeypatch, after=5)
    # Draws without a seed differ between lines, and stay what they were.
    assert cli.main(command) == 1 and not (tmp_path / "out").exists()
    assert "the power is out" in capsys.readouterr().err
    assert cli.main(command) == 1
    assert computed == [(20, 5), (15, 15)]
    assert (tmp_path / "out").read_bytes() == undisturbed
    assert not (tmp_path / "out.partial").exists()
    assert cli.main(command) == 1 and len(computed) == 2  # all is stored
    assert (tmp_path / "out").read_bytes() == undisturbed
