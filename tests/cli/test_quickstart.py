"""`flexgen-helm quickstart`: what it says about its length; tests/e2e/test_terminal.py runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexgen_helm import cli
from flexgen_helm.cli import quickstart
from flexgen_helm.cli.console import say
from tests.helpers.paths import ROOT


def test_readme_and_help_have_one_figure() -> None:
    texts = [" ".join(text.split()) for text in ((ROOT / "README.md").read_text(), quickstart.quickstart.__doc__ or "")]
    assert {re.findall(r"93 MB.*?about (\w+ minutes?)", text)[0] for text in texts} == {"two minutes"}


def test_the_second_part_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))

    def run_and_show(words: list[str], options: object) -> bool:
        say("all" if "-c" in words else "wikitext")
        return "-c" not in words

    monkeypatch.setattr(quickstart, "run_and_show", run_and_show)
    assert cli.main(["quickstart", "-o", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    parts = ("In two parts: then 3 pages of WikiText-2", "\nall\n", "Part two: 3 pages of WikiText-2.", "\nwikitext\n")
    positions = [said.index(part) for part in parts]
    assert positions == sorted(positions)
