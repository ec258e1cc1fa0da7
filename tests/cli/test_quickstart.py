"""`flexgen-helm quickstart`: its length, and its verdict; tests/e2e/test_terminal.py runs it."""

import re

import pytest

from flexgen_helm.cli import quickstart
from flexgen_helm.report.comparison import compare_suite
from tests.helpers.paths import ROOT
from tests.helpers.suites import accuracies, write_run


def test_readme_and_help_have_one_figure():
    texts = (ROOT / "README.md").read_text(), quickstart.quickstart.__doc__ or ""
    times = {re.findall(r"93 MB.*?about (\w+ minute)", " ".join(text.split()))[0] for text in texts}
    assert times == {"a minute"}


def test_the_scenario_has_as_many_questions_as_are_asked():
    from helm.benchmark.scenarios.simple_scenarios import SimpleMCQAScenario

    splits = [instance.split for instance in SimpleMCQAScenario().get_instances("")]
    assert splits.count("test") == 79 == quickstart.QUESTIONS


@pytest.mark.parametrize(
    "lost, verdict", [(0, "equivalent"), (3, "equivalent"), (6, "worse"), (30, "worse")]
)
def test_its_questions_are_enough_for_a_verdict(tmp_path, lost, verdict):
    count = quickstart.QUESTIONS
    for precision, wrong in (("fp16", 0), ("4bit", lost)):
        right = [0] * wrong + [1] * (count - wrong)
        write_run(
            tmp_path,
            "simple_mcqa_scored",
            precision,
            {"exact_match": sum(right) / count},
            accuracies(right),
        )
    (model,) = compare_suite(tmp_path, margin=quickstart.MARGIN / 100)
    assert model.verdicts["4bit"].text.startswith(verdict)
