"""`generate` and `perplexity` on tiny models."""

from __future__ import annotations

import io
import json
import sys

from flexgen_helm import cli
from flexgen_helm.engine.engine import Engine
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
