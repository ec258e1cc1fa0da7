from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
