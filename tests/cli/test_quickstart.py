"""`flexgen-helm quickstart`: what it says about its length; tests/e2e/test_terminal.py runs it."""

from __future__ import annotations

import re

from flexgen_helm.cli import quickstart
from tests.helpers.paths import ROOT


def test_readme_and_help_have_one_figure() -> None:
    texts = (ROOT / "README.md").read_text(), quickstart.quickstart.__doc__ or ""
    times = {re.findall(r"93 MB.*?about (\w+ minute)", " ".join(text.split()))[0] for text in texts}
    assert times == {"a minute"}
