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


def test_the_first_precision_is_the_baseline_where_fp16_is_none(tmp_path, monkeypatch, capsys):
    def run(arguments, options):
        for precision in options["precision"].split(","):
            folder = tmp_path / "runs" / quickstart.SUITE
            right = [1] * quickstart.QUESTIONS
            write_run(
                folder, "simple_mcqa_scored", precision, {"exact_match": 1.0}, accuracies(right)
            )
        return 0

    monkeypatch.setattr(quickstart, "run_and_show", run)
    quickstart.quickstart(precisions="4bit,8bit", output_path=tmp_path)
    assert "equivalent" in capsys.readouterr().out


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
