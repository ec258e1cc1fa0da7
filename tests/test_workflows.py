"""Workflows of GitHub may read alone, and do what the Makefile does. `make lint` checks them against the schema."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.helpers.paths import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(file.name for file in FOLDER.glob("*.yml"))


def workflow(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return content


def test_there_is_one_for_tests_docs_and_what_is_weekly() -> None:
    assert WORKFLOWS == ["docs.yml", "tests.yml", "weekly.yml"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_may_read_alone(name: str) -> None:
    content = workflow(name)
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        assert "permissions" not in job and job["timeout-minutes"] <= 180
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert [step["with"]["persist-credentials"] for step in checkouts] == [False]
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "pull_request_target" not in text and "secrets." not in text


def test_together_they_do_what_ci_does() -> None:
    jobs = [job for name in WORKFLOWS for job in workflow(name)["jobs"].values()]
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    made = {target for run in runs for target in re.findall(r"^make ([\w-]+)$", run, re.MULTILINE)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    assert asked <= made <= targets and {"test-newest", "test-all", "docs", "dist"} <= made
