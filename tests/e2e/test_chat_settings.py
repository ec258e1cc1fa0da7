"""Settings of prompts in real `flexgen-helm run`s: they share weights, and neither answers nor run
folders.
"""

import json

import pytest
import yaml

from flexgen_helm.plugin.registration import CLIENT_CLASS
from tests.helpers.helm_runs import MODEL, Place


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A place where every tokenizer has a chat template."""
    monkeypatch.setenv("FAKE_TEMPLATE", "yes")
    return Place(tmp_path)


def records(place):
    """What each run's record says of its prompts, by the end of the run's name."""
    files = (place.folder / "benchmark_output" / "runs" / "s").glob(
        "simple_mcqa:*/flexgen_run.json"
    )
    return {
        file.parent.name.split("opt-125m")[-1]: json.loads(file.read_text())["chat_template"]
        for file in files
    }


def entries(*names, scenario="simple_mcqa"):
    return [f"{scenario}:model={name}" for name in names]


def test_two_settings_are_one_engine_and_two_sets_of_answers(place):
    both = (f"{MODEL}-with-template", f"{MODEL}-no-template")
    output = place.run(
        "suite", entries=[*entries(*both), *entries(*both, scenario="simple_mcqa_scored")]
    )
    events = place.events()
    # Six generated answers a setting; the twelve scores are of the same texts, and computed once.
    assert (events["load"], events["block"], events["answer"]) == (1, 1, 6 + 6 + 12)
    scored = place.run_folder("simple_mcqa_scored") / "flexgen_run.json"
    assert json.loads(scored.read_text())["chat_template"] is None
    said = records(place)
    assert {name: record["applied"] for name, record in said.items()} == {
        "-with-template": True,
        "-no-template": False,
    }
    assert said["-with-template"]["template"] == said["-no-template"]["template"]
    assert output.count("go through its chat template (asked for)") == 1
    assert output.count("are sent unchanged (switched off)") == 1
    folder = place.folder / "benchmark_output" / "runs" / "s"
    results = place.results()
    rendered, plain = (results[entry.replace("/", "_")][0] for entry in entries(*both))
    for one, other in zip(rendered["request_states"], plain["request_states"]):
        # HELM's files have the prompt of the scenario
        assert one["request"]["prompt"] == other["request"]["prompt"]
    assert [s["result"]["completions"] for s in rendered["request_states"]] != [
        s["result"]["completions"] for s in plain["request_states"]
    ]
    suite = json.loads((folder / "flexgen_suite.json").read_text())
    assert suite["models"]["opt-125m-with-template"]["chat_template"]["applied"]
    assert suite["totals"]["workload"]["num_unique"] == 36, "both runs count what they share"
    place.run("suite", entries=entries(*both))
    assert place.events()["answer"] == 0  # all stored, each setting's apart


def test_base_models_get_no_template_unless_it_is_asked_for(place):
    assert "are sent unchanged (auto: it is a base model)" in place.run(
        "suite", entries=entries(MODEL)
    )
    assert records(place)[""] == {
        **records(place)[""],
        "applied": False,
        "reason": "auto: it is a base model",
    }
    place.run("suite", "--chat-template", "true", entries=entries(MODEL))
    assert records(place)["-with-template"]["applied"]


@pytest.mark.slow
def test_other_settings_are_named_by_their_digest(place):
    for prompt in ("Be brief.", "Be brief.", "Be long."):
        place.run(
            "suite", "--chat-template", "true", "--system-prompt", prompt, entries=entries(MODEL)
        )
    assert place.events()["answer"] == 12
    said = records(place)
    assert len(said) == 2 and all(name.startswith("-with-template-chat-") for name in said)
    assert {record["system_prompt"] for record in said.values()} == {"Be brief.", "Be long."}
    name = next(iter(said))
    # known in its call only
    unknown = place.run("suite", entries=entries(f"{MODEL}{name}"), expect=2)
    assert f"opt-125m{name}" in unknown


@pytest.mark.slow
def test_a_setting_that_a_name_or_an_entry_decides_is_not_mislabelled(place):
    contradicted = place.run(
        "suite", "--chat-template", "true", entries=entries(f"{MODEL}-no-template"), expect=2
    )
    assert "--chat-template true contradict each other" in contradicted
    folder = place.folder / "prod_env"
    folder.mkdir(exist_ok=True)
    arguments = {"path": "opt-125m", "apply_chat_template": False}
    deployment = {
        "name": "lab/mine",
        "client_spec": {"class_name": CLIENT_CLASS, "args": arguments},
    }
    (folder / "model_deployments.yaml").write_text(
        yaml.safe_dump({"model_deployments": [deployment]})
    )
    for flags in (("--chat-template", "true"), ("--thinking-budget", "9")):
        refused = place.run("suite", *flags, entries=entries("lab/mine"), expect=2)
        assert f"{flags[0]} cannot change lab/mine" in refused
    assert place.events()["load"] == 0
    place.run("suite", "--chat-template", "false", entries=entries("lab/mine"))  # as the entry says
    assert not next(iter(records(place).values()))["applied"]


def test_a_missing_template_is_refused_by_name_and_costs_no_score(place, monkeypatch):
    monkeypatch.delenv("FAKE_TEMPLATE")
    both = [*entries(MODEL), *entries(MODEL, scenario="simple_mcqa_scored")]
    said = place.run("suite", "--chat-template", "true", entries=both, expect=2)
    assert "the tokenizer of opt-125m-with-template has no chat template" in said
    assert (place.run_folder("simple_mcqa_scored") / "stats.json").exists()
    assert place.events()["answer"] == 12
