import pytest


@pytest.fixture(autouse=True)
def home_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
