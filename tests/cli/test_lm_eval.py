"""`flexgen-helm lm-eval` on a tiny model: the harness's own arguments, results, and refusals."""

from __future__ import annotations

import json

import pytest

from flexgen_helm import cli
from tests.helpers.lm_eval_tasks import CHOICES, LAST_WORD, SUMS, invented_tasks, leave_out_others


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return invented_tasks(tmp_path_factory.mktemp("tasks") / "tasks", 40)


@pytest.fixture
def few_tasks(tmp_path, monkeypatch):
    leave_out_others(monkeypatch)
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))


def arguments(model, tasks, out, *names):
    return [
        *(
            "lm-eval",
            "--model_args",
            f"pretrained={model},cpu_memory=1GiB,device=cpu",
            "--include_path",
            str(tasks),
        ),
        *("--tasks", *names, "--output_path", str(out), "--log_samples"),
    ]


def results(out):
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())


def samples(out):
    """Task -> what was asked and answered."""
    lines = [
        json.loads(line)
        for file in sorted(out.rglob("samples_*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [(line["arguments"], line["resps"]) for line in lines]


def test_results_are_written_where_the_harness_writes_them(tiny, tasks, tmp_path, few_tasks, capfd):
    out = tmp_path / "out"
    command = arguments(tiny("llama").path, tasks, out, CHOICES, SUMS)
    assert cli.main([*command, "--limit", "3"]) == 0
    found = results(out)
    assert found["config"]["model"] == "flexgen" and found["config"]["precision"] == "fp16"
    assert found["config"]["fingerprint"] and set(found["results"]) == {CHOICES, SUMS}
    assert len(samples(out)) == 6
    assert "|choices|" in capfd.readouterr().out


def test_results_that_cannot_be_saved_are_an_error(tiny, tasks, tmp_path, few_tasks, capfd):
    """The harness itself logs that, and ends with 0."""
    (tmp_path / "file").write_text("")
    command = arguments(tiny("llama").path, tasks, tmp_path / "file" / "out", CHOICES)
    assert cli.main([*command, "--limit", "1"]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert "file/out" in error and "Not a directory" in error and "unexpected" not in error


@pytest.mark.parametrize(
    "words, why",
    [
        (["--tasks", "no-such-task"], "no-such-task"),
        (["--tasks", LAST_WORD, "--model_args", "pretrained=llama,colour=1"], "colour=1"),
        (["--tasks", LAST_WORD, "--model_args", "pretrained=no-such-model"], "no-such-model"),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(tasks, few_tasks, capfd, words, why):
    assert cli.main(["lm-eval", "--include_path", str(tasks), *words]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("flexgen-helm: ") and why in last


def test_a_task_that_cannot_be_read_is_named(tmp_path, few_tasks, capfd):
    """The harness leaves it out, and says that the task is not known."""
    (tmp_path / "some.yaml").mkdir()
    (tmp_path / ".#other.yaml").symlink_to("nothing")
    words = ["--include_path", str(tmp_path), "--tasks", "some", "--model_args", "pretrained=llama"]
    assert cli.main(["lm-eval", *words]) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert "some.yaml cannot be used: Is a directory" in last


def test_a_misspelt_argument_is_refused_before_tasks_are_looked_for(few_tasks, capfd):
    words = [
        "--tasks",
        "no-such-task",
        "--model_args",
        "pretrained=llama,max_length=64,precison=4bit",
    ]
    assert cli.main(["lm-eval", *words]) == 2
    assert "precison='4bit' is not supported; did you mean precision" in capfd.readouterr().err


def test_data_that_must_come_from_the_hub_is_named_with_the_guide(tiny, tmp_path, few_tasks, capfd):
    """The run of the tests is offline."""
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/has-this\ntest_split: test\ndoc_to_text: x\n"
        "doc_to_target: y\n"
        "output_type: generate_until\nmetric_list: [{metric: exact_match}]\n"
    )
    words = [
        "--model_args",
        f"pretrained={tiny('llama').path}",
        "--include_path",
        str(tmp_path),
        "--tasks",
        "far",
    ]
    assert cli.main(["lm-eval", *words]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert "nobody/has-this" in last and "set HF_HUB_OFFLINE=1" in last


def test_a_missing_harness_is_named_with_the_command_that_brings_it(monkeypatch, capsys):
    monkeypatch.setattr("flexgen_helm.cli.lm_eval.find_spec", lambda name: None)
    assert cli.main(["lm-eval"]) == 2
    assert "pip install 'flexgen-helm[lm-eval]'" in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("flexgen_helm.harnesses.lm_eval_command.run_command", interrupted)
    assert cli.main(["lm-eval", "--tasks", LAST_WORD]) == 130
    said = capsys.readouterr().err
    assert (
        "finished answers are stored" in said
        and f"Go on with:\n  flexgen-helm lm-eval --tasks {LAST_WORD}" in said
    )
