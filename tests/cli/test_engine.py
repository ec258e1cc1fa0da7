"""`generate` and `perplexity` on tiny models."""

from __future__ import annotations

import io
import json
import math
import sys
from types import SimpleNamespace

import pytest

from flexgen_helm import cli
from flexgen_helm.cli.perplexity import measure, windows
from flexgen_helm.engine.engine import Engine
from flexgen_helm.request import GenerationResult
from tests.helpers.chat_models import add_template


def write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_answers_in_order_and_a_bad_line_fails_alone(tiny, tmp_path, capsys):
    lines = [
        {"prompt": "the quick", "max_tokens": 4},
        "{not json",
        {"prompt": "the", "colour": "red"},
        "",
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 0, "echo_logprobs": True},
        {"prompt": "the", "max_tokens": "4"},
        {"prompt": "the", "stop": "."},
        {"prompt": "the", "prompt_token_ids": [1]},
        {"prompt": "the", "max_tokens": 1000},
        {"prompt": "the", "temperature": 1.0, "n": 3, "seed": 3, "max_tokens": 3, "top_p": None},
        '{"prompt": "the", "temperature": NaN}',
    ]
    out = tmp_path / "out.jsonl"
    code = cli.main(
        ["generate", str(tiny("llama").path), "--prompts", str(write_lines(tmp_path / "in", lines)), "--out", str(out)]
    )
    assert code == 1
    found = read_lines(out)
    assert len(found) == len(lines) - 1  # a blank line asks nothing
    errors = {2: "JSON", 3: "colour", 6: "integer", 7: "stop must be a valid array", 8: "exactly one", 9: "window"}
    errors[11] = "NaN"
    numbers = [number for number, line in enumerate(lines, start=1) if line]
    for number, line in zip(numbers, found):
        assert set(line) == {"completions", "prompt_token_ids", "prompt_logprobs", "error"}
        if number in errors:
            assert line["error"].startswith(f"line {number}: ") and errors[number] in line["error"]
            assert line["completions"] == []
        else:
            assert line["error"] is None
    first, scored, sampled = found[0], found[3], found[8]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        assert first["prompt_token_ids"] == engine.tokenizer.encode("the quick")
        assert first["completions"][0]["text"] == engine.tokenizer.decode(first["completions"][0]["token_ids"])
    assert set(first["completions"][0]) == {"text", "tokens", "token_ids", "logprobs", "finish_reason"}
    assert scored["prompt_logprobs"][0] is None and len(scored["prompt_logprobs"]) == 3
    assert len(sampled["completions"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.jsonl"]
    captured = capsys.readouterr()
    assert captured.out == "" and "7 of 10 requests failed" in captured.err


def test_generate_renders_chats(tiny, tmp_path, capsys):
    folder = add_template(tiny("llama").path, tmp_path / "model")
    content = "the quick"
    parts = [{"type": "text", "text": content}]
    asked = write_lines(
        tmp_path / "in",
        [
            {"prompt": content, "max_tokens": 3},
            {"messages": [{"role": "user", "content": content}], "max_tokens": 3},
            {"messages": [{"role": "user", "content": parts}], "max_tokens": 3},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {"prompt": content, "messages": []},
        ],
    )
    out = tmp_path / "out.jsonl"
    command = ["generate", str(folder), "--prompts", str(asked), "--out", str(out)]
    assert cli.main(command) == 1
    plain, chat, listed, image, both = read_lines(out)
    with Engine.from_pretrained(folder) as engine:
        rendered = engine.tokenizer.encode(f"[user] {content}\n[assistant] ")
    assert chat["prompt_token_ids"] == listed["prompt_token_ids"] == rendered != plain["prompt_token_ids"]
    assert "text only" in image["error"] and "exactly one" in both["error"]
    assert "chat template" not in capsys.readouterr().err
    assert cli.main([*command, "--chat-template", "auto"]) == 1
    assert read_lines(out)[0]["prompt_token_ids"] == rendered
    assert "go through its chat template (auto: the tokenizer has one)" in capsys.readouterr().err


def test_generate_reads_stdin_and_writes_stdout(tiny, monkeypatch, capsys):
    content = b'{"prompt": "the quick", "max_tokens": 2}\n\n{"prompt": "fox", "max_tokens": 1}'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert cli.main(["generate", str(tiny("opt").path), "--prompts", "-"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2


def test_dummy_weights_need_no_tokenizer(tiny, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((tiny("llama").path / "config.json").read_text())
    asked = write_lines(tmp_path / "in", [{"prompt_token_ids": [5, 6], "max_tokens": 2}, {"prompt": "the"}])
    assert cli.main(["generate", str(folder), "--prompts", str(asked), "--dummy-weights"]) == 1
    good, bad = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert len(good["completions"][0]["token_ids"]) == 2 and "tokenizer" in bad["error"]


def test_an_interruption_keeps_finished_lines(tiny, tmp_path, monkeypatch):
    asked = write_lines(tmp_path / "in", [{"prompt": "the quick", "max_tokens": k} for k in (1, 5)])
    out = tmp_path / "out.jsonl"
    whole = Engine.run

    def run(self, requests, *, on_result):
        whole(self, requests[:1], on_result=on_result)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", run)
    assert cli.main(["generate", str(tiny("opt").path), "--prompts", str(asked), "--out", str(out)]) == 130
    assert not out.exists()
    (kept,) = read_lines(tmp_path / "out.jsonl.partial")
    assert kept["line"] == 1 and len(kept["completions"][0]["token_ids"]) <= 1

    # The same command computes the rest; a line that has changed, or another model, is computed anew.
    monkeypatch.undo()
    asked_for = []

    def count(self, requests, *, on_result):
        asked_for.append(len(requests))
        return whole(self, requests, on_result=on_result)

    cut = b'{}\n{"line": 2, "key": "\xff'  # of a process that was killed
    (tmp_path / "out.jsonl.partial").write_bytes((tmp_path / "out.jsonl.partial").read_bytes() + cut)
    monkeypatch.setattr(Engine, "run", run)
    write_lines(asked, [{"prompt": "the quick", "max_tokens": k} for k in (1, 5, 6)])
    assert cli.main(["generate", str(tiny("opt").path), "--prompts", str(asked), "--out", str(out)]) == 130
    monkeypatch.setattr(Engine, "run", count)
    command = ["generate", str(tiny("opt").path), "--prompts", str(asked), "--out", str(out)]
    partial = (tmp_path / "out.jsonl.partial").read_bytes()
    assert cli.main(command) == 0 and asked_for == [1]
    answers = read_lines(out)
    assert answers[0]["completions"] == kept["completions"] and len(answers) == 3 and "key" not in answers[0]
    assert not (tmp_path / "out.jsonl.partial").exists()
    for change in ([str(tiny("opt").path), [{"prompt": "the slow", "max_tokens": 1}, {"prompt": "x", "max_tokens": 5}]],
                   [str(tiny("llama").path), [{"prompt": "the quick", "max_tokens": k} for k in (1, 5)]]):  # fmt: skip
        (tmp_path / "out.jsonl.partial").write_bytes(partial)
        write_lines(asked, change[1])
        assert cli.main(["generate", change[0], *command[2:]]) == 0 and asked_for.pop() == 2


def test_an_output_that_cannot_be_written_is_refused_before_the_model_loads(tiny, tmp_path, capsys):
    asked = write_lines(tmp_path / "in", [{"prompt": "x"}])
    out = tmp_path / "missing" / "out"
    assert cli.main(["generate", str(tiny("opt").path), "--prompts", str(asked), "--out", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("window, max_windows", [(16, 2), (7, None), (96, None)])
def test_perplexity_equals_transformers(tiny, tmp_path, capsys, window, max_windows):
    model = tiny("llama")
    text = "the quick brown fox jumps over the lazy dog. question: answer: it was\n" * 3
    (tmp_path / "text").write_text(text)
    argv = ["perplexity", str(model.path), "--text", str(tmp_path / "text"), "--window", str(window), "--json"]
    assert cli.main(argv + (["--max-windows", str(max_windows)] if max_windows else [])) == 0
    found = json.loads(capsys.readouterr().out)
    with Engine.from_pretrained(model.path) as engine:
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
    scores = []
    for row in [ids[i : i + window] for i in range(0, len(ids), window)][:max_windows]:
        logprobs = model.logprobs(row)
        scores += [logprobs[i, row[i + 1]].item() for i in range(len(row) - 1)]
    assert found["tokens_scored"] == len(scores)
    assert found["nll"] == pytest.approx(-sum(scores), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-4)


def test_the_last_window_is_kept_if_it_has_a_token_to_score():
    assert windows(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    assert windows(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert windows([0], 3) == windows([], 3) == []


@pytest.mark.parametrize(
    "content, window, why", [(b"", 8, "fewer than 2"), (b"the fox", 97, "96"), (b"\xff", 8, "UTF-8")]
)
def test_perplexity_of_what_cannot_be_scored_is_refused(tiny, tmp_path, capsys, content, window, why):
    (tmp_path / "text").write_bytes(content)
    argv = ["perplexity", str(tiny("llama").path), "--text", str(tmp_path / "text"), "--window", str(window)]
    assert cli.main(argv) == 2
    assert why in capsys.readouterr().err


def test_a_perplexity_that_no_float_holds_is_infinite():
    result = GenerationResult(prompt_logprobs=(None, -1e4))
    tokenizer = SimpleNamespace(encode=lambda text, **options: [1, 2])
    config = SimpleNamespace(max_positions=2)
    engine = SimpleNamespace(tokenizer=tokenizer, config=config, run=lambda requests: [result])
    assert measure(engine, "a b", 2) == {"tokens_scored": 1, "nll": 1e4, "perplexity": math.inf}
