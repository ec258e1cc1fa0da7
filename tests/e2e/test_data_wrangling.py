"""`runs/data_wrangling.conf`: all six tasks in one suite, on made-up files."""

import json

import pytest
from helm.benchmark.presentation.run_entry import read_run_entries

from tests.helpers.data_sets import write_hospital, write_table
from tests.helpers.helm_runs import MODEL, Place
from tests.helpers.paths import ROOT

CONF = ROOT / "runs" / "data_wrangling.conf"


def write_entity_matching(folder):
    for side in "AB":
        rows = [[i, f"thing {i}", f"{i}.50"] for i in range(30)]
        write_table(folder / f"table{side}.csv", [["id", "name", "price"], *rows])
    for split, count in (("train", 24), ("valid", 6), ("test", 6)):
        pairs = [[i, i if i % 3 == 0 else (i + 1) % 30, int(i % 3 == 0)] for i in range(count)]
        write_table(folder / f"{split}.csv", [["ltable_id", "rtable_id", "label"], *pairs])


def write_all(scenarios):
    matching = scenarios / "entity_matching"
    for name in ("Fodors_Zagats", "Beer", "iTunes_Amazon"):
        write_entity_matching(matching / "data" / name)
    (matching / "entity_matching_scenario_fixed_random_state.json").write_text("{}")
    imputation = scenarios / "entity_data_imputation" / "data"
    bought = [[i, f"set {i}", f"a set of {i}", f"maker {i % 4}", "10"] for i in range(60)]
    write_table(
        imputation / "Buy" / "Buy.csv",
        [["id", "name", "description", "manufacturer", "price"], *bought],
    )
    places = [
        f'"grill {i}","{i} main st.","town {i % 4}","{i}-555","thai",\'{i}\'' for i in range(60)
    ]
    attributes = [
        f"@attribute {name} string" for name in ("name", "addr", "city", "phone", "type", "class")
    ]
    (imputation / "Restaurant").mkdir()
    (imputation / "Restaurant" / "fz.arff").write_text(
        "\n".join(["@relation x", *attributes, "@data", *places])
    )
    write_hospital(scenarios / "error_detection" / "data" / "Hospital")


@pytest.mark.slow
def test_all_six_tasks_run_in_one_suite(tmp_path):
    write_all(tmp_path / "benchmark_output" / "scenarios")
    entries = [entry.description for entry in read_run_entries([str(CONF)]).entries]
    entries = [entry.replace("flexgen/smollm2-135m-instruct-q4_1", MODEL) for entry in entries]
    place = Place(tmp_path)
    place.run("suite", entries=entries)
    assert place.events()["block"] == 1
    folders = sorted((tmp_path / "benchmark_output" / "runs" / "s").glob("*model=*"))
    assert len(folders) == len(entries) == 6
    for folder in folders:
        states = json.loads((folder / "scenario_state.json").read_text())["request_states"]
        assert len(states) >= 6 and json.loads((folder / "flexgen_run.json").read_text())
    prompt = states[-1]["request"]["prompt"]  # error detection sorts last
    assert prompt.startswith("Is there an error in the value of the attribute? Yes or No?\n")
    assert prompt.endswith("\nAnswer:") and prompt.count("Answer: Yes") >= 2 <= prompt.count(
        "Answer: No"
    )
