"""`flexgen-helm entries`: every entry can be pasted, and its data is found where the scenarios look
for it.
"""

import json
import re

import pytest
from helm.benchmark.presentation.run_entry import read_run_entries
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.common.object_spec import get_class_by_name, parse_object_spec

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm import cli, run_specs
from flexgen_helm.runs.data import DATA
from flexgen_helm.scenarios import error_detection, lambada, wikitext
from tests.helpers.data_sets import FAKE_PASSAGES, PAGES, write_data, write_legalbench_settings
from tests.helpers.paths import ROOT


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    monkeypatch.delenv("FLEXGEN_HELM_DATA", raising=False)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


def rows(capsys, *arguments):
    capsys.readouterr()
    assert cli.main(["entries", "--json", *arguments]) == 0
    return {row["run_entry"]: row for row in json.loads(capsys.readouterr().out)["entries"]}


def with_model(entry):
    """The entry with its model first, because follow_format_instructions reads the model's tags."""
    name, _, arguments = entry.partition(":")
    return f"{name}:model=flexgen/opt-125m{',' if arguments else ''}{arguments}"


def test_helm_can_run_every_entry(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("helm.benchmark.runner._BENCHMARK_OUTPUT_PATH", str(tmp_path / "output"))
    write_legalbench_settings(tmp_path / "output")
    for entry, row in (rows(capsys) | rows(capsys, "helm_")).items():
        specs = construct_run_specs(parse_object_spec(with_model(entry)))
        assert len(specs) == 1, entry
        scenario = get_class_by_name(specs[0].scenario_spec.class_name)
        data = DATA[entry.partition(":")[0]]
        if data is None:
            assert row["is_here"] and row["needs"] == "nothing"
        elif data.scenario is not None:  # HELM's folder has the scenario's own name
            assert (
                data.scenario == scenario.name
                and row["place"] == f"benchmark_output/scenarios/{scenario.name}"
            )
        if row["source"] == "HELM":
            assert specs[0].scenario_spec.class_name.startswith("helm.")


def test_every_shipped_entry_is_listed(capsys):
    by_default, found = rows(capsys), rows(capsys, "--all")
    leaderboards = {row["source"] for row in found.values()} - {
        row["source"] for row in by_default.values()
    }
    assert leaderboards == {path.name for path in (ROOT / "runs").glob("helm_*.conf")}
    shipped = {
        re.sub(r"model=flexgen/smollm2-135m-instruct-q4_1,?", "", entry.description).rstrip(",:")
        for conf in (ROOT / "runs").glob("*.conf")
        for entry in read_run_entries([str(conf)]).entries
    }
    assert shipped <= set(found)
    assert {
        "lambada:mode=accuracy",
        "wikitext",
        "simple_mcqa_scored",
        "error_detection:dataset=Hospital",
    } <= shipped
    assert all(row["source"] == "HELM" for entry, row in found.items() if entry not in shipped)


def test_a_new_scenario_of_ours_is_listed_before_it_is_in_a_file(capsys, monkeypatch):
    by_default, ours = rows(capsys), run_specs.our_run_spec_names()
    assert ours and ours <= {entry.partition(":")[0] for entry in by_default}
    monkeypatch.setattr(run_specs, "our_run_spec_names", lambda: ours | {"brand_new"})
    (added,) = set(rows(capsys)) - set(by_default)
    assert added == "brand_new" and rows(capsys)[added]["source"] == "flexgen_helm"


def test_data_is_found_where_the_scenarios_look_for_it(capsys, tmp_path, monkeypatch):
    assert not any(row["is_here"] for row in rows(capsys).values() if row["needs"] != "nothing")
    monkeypatch.setenv(
        "FLEXGEN_HELM_DATA", str(write_data(tmp_path / "data", FAKE_PASSAGES, PAGES))
    )
    tables = tmp_path / "elsewhere" / "scenarios" / "error_detection" / "data" / "Hospital"
    tables.mkdir(parents=True)
    for name in error_detection.FILES:
        (tables / name).write_text("x")
    for split in ("dev", "test"):
        path = (
            tmp_path
            / "elsewhere"
            / "scenarios"
            / "mmlu"
            / "data"
            / split
            / f"us_foreign_policy_{split}.csv"
        )
        path.parent.mkdir(parents=True)
        path.write_text("x")
    found = rows(capsys, "-o", "elsewhere")
    here = {entry for entry, row in found.items() if row["is_here"] and row["needs"] != "nothing"}
    assert here == {
        "lambada:mode=accuracy",
        "lambada:mode=perplexity",
        "wikitext",
        "error_detection:dataset=Hospital",
        "mmlu:subject=us_foreign_policy",
    }
    assert found["wikitext"]["folder"] == str(tmp_path / "data") and len(
        wikitext.read_pages()
    ) == len(PAGES)
    for folder in ("hf/datasets/wmt14/cs-en", "elsewhere/scenarios/ifeval/data/google___if_eval"):
        (tmp_path / folder).mkdir(parents=True)
    found = rows(capsys, "helm_", "-o", "elsewhere")
    here = {
        entry
        for entry, row in found.items()
        if row["is_here"] and row["source"] != "helm_lite_instruct.conf"
    }
    assert here == {"ifeval", "wmt_14:language_pair=cs-en,follow_format_instructions=instruct"}
    assert found["ifeval"]["place"] == "elsewhere/scenarios/ifeval"
    assert found["mmlu_pro:subject=all"]["place"] == str(tmp_path / "hf" / "datasets")
    (tmp_path / "data" / lambada.FILE).unlink()
    assert not rows(capsys)["lambada:mode=accuracy"]["is_here"]
    (tmp_path / "hf" / "datasets" / "EleutherAI___lambada_openai").mkdir(parents=True)
    assert rows(capsys)["lambada:mode=accuracy"]["is_here"]
    assert cli.main(["entries"]) == 0
    assert str(tmp_path / "data") in capsys.readouterr().out.replace("\n", "")


def test_entries_are_filtered_and_all_scenarios_have_names(
    capsys,
):
    assert set(rows(capsys, "LAMBADA")) == {"lambada:mode=accuracy", "lambada:mode=perplexity"}
    every = rows(capsys, "--all")
    assert len(every) > 250 and every["boolq"]["needs"] == "its own data" and "mmlu" not in every
    assert "boolq" in rows(capsys, "boolq", "--all")
    assert cli.main(["entries", "no-such"]) == 2
    assert "--all" in capsys.readouterr().err
