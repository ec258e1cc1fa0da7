"""Commands' tables and sentences at the widths of terminals; long run entries alone may be
longer.
"""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

import pytest

from flexgen_helm import cli
from flexgen_helm.cli.app import command_line

PLAN = ["--model", "opt-6.7b", "--hardware", "t4"]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("h")
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(folder))
    # A fresh interpreter with HELM takes many seconds, and what it says is one line of the
    # doctor's.
    monkeypatch.setattr("flexgen_helm.cli.doctor._python_subprocess", lambda *_: None)


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["models", "llama"], ["llama-4-maverick-instruct", "too large"]),
        (
            ["plan", *PLAN, "--prompt-len", "512", "--gen-len", "32", "--num-seqs", "100"],
            ["memory allowed"],
        ),
        (["entries", "bbq"], ["bbq:subject=all,", "here"]),
        (["doctor"], ["offline data", "found"]),
    ],
    ids=["models", "plan", "entries", "doctor"],
)
def test_lines_fit_and_words_are_whole(
    arguments: list[str],
    words: list[str],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cli.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines if ":model=" not in line)
    assert all(any(word in line for line in lines) for word in words)
    rules = [line for line in lines if set(line) == {"─"}]
    assert rules and not any(set(line) & set("━│┃┏") for line in lines), "one style of tables"


def test_examples_can_be_copied_from_80_columns() -> None:
    commands: Any = command_line()
    lines = [
        line
        for command in commands.commands.values()
        for line in cleandoc(command.help).splitlines()
    ]
    assert not [line for line in lines if line.startswith("  ") and len(line) > 77]
