"""The data-wrangling tasks: error detection's cells and refusals, and `runs/data_wrangling.conf` on made-up files."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from helm.benchmark.presentation.run_entry import read_run_entries
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.benchmark.scenarios.scenario import Instance
from helm.common.object_spec import parse_object_spec

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.core.errors import UsageError
from flexgen_helm.scenarios import error_detection
from tests.test_plugin_helm_run import MODEL, Place

CONF = Path(__file__).parents[1] / "runs" / "data_wrangling.conf"
COLUMNS = ["index", "name", "city", "state", "note"]


def write_table(path: Path, rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def write_hospital(folder: Path, rows: int = 60) -> set[tuple[int, str]]:
    """Both tables; returns the places that differ."""
    draw, wrong = random.Random(3), set()
    clean = [[i, f"clinic {i % 7}, main", f"town {i % 5}", "al", "empty"] for i in range(rows)]
    dirty = [list(row) for row in clean]
    for i in range(0, rows, 4):
        column = draw.randrange(1, 4)
        dirty[i][column] = str(dirty[i][column]).replace("n" if column < 3 else "a", "x", 1)
        wrong.add((i, COLUMNS[column]))
    write_table(folder / "dirty.csv", [COLUMNS, *dirty])
    write_table(folder / "clean.csv", [["Index", "Name", "Town", "State", "Note"], *clean])
    return wrong


def instances(output: Path) -> list[Instance]:
    return error_detection.ErrorDetectionScenario("Hospital").get_instances(str(output))


def answer(instance: Instance) -> str:
    (reference,) = instance.references
    assert reference.is_correct
    return reference.output.text


def test_a_cell_is_wrong_where_the_tables_differ(tmp_path: Path) -> None:
    wrong = write_hospital(tmp_path / "data" / "Hospital")
    cells = [cell for row in error_detection.read_cells(tmp_path / "data" / "Hospital", "Hospital") for cell in row]
    assert len(cells) == 60 * 3  # neither the row's number nor a cell with nothing in it
    assert sum(cell.wrong for cell in cells) == len(wrong) == 15
    assert all(("x" in cell.text) == cell.wrong for cell in cells)
    assert cells[1].text == "city: town 0" or cells[1].wrong


def test_splits_are_of_rows_and_examples_are_balanced(tmp_path: Path) -> None:
    write_hospital(tmp_path / "data" / "Hospital")
    found = instances(tmp_path)
    counts = {split: Counter(answer(i) for i in found if i.split == split) for split in ("train", "valid", "test")}
    assert counts["train"]["Yes"] == counts["train"]["No"] > 0
    assert sum(counts["test"].values()) == 6 * 3 and sum(counts["valid"].values()) == 11 * 3
    again = instances(tmp_path)
    assert [(i.input.text, i.split) for i in again] == [(i.input.text, i.split) for i in found]


@pytest.mark.parametrize(
    "dirty, clean, message",
    [
        ([["index", "city"], [1, "a"]], [["index", "city"]], "with 2 rows and clean.csv with 1 are not the same"),
        ([["index", "city"], [1, "a"]], [["index", "city"], [1]], "not the same table cell by cell"),
        ([["index", "city"]], [["index", "city"]], "not the same table"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(
    dirty: list[list[object]], clean: list[list[object]], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "Hospital"
    write_table(folder / "dirty.csv", dirty)
    write_table(folder / "clean.csv", clean)
    with pytest.raises(UsageError, match=message):
        instances(tmp_path)


def test_without_network_the_files_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(source: str, target: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlretrieve", unreachable)
    with pytest.raises(UsageError, match=r"dirty.csv is not there and https://.*no route to host.*put it there"):
        instances(tmp_path)
    assert not list(tmp_path.rglob("*.csv"))


def test_another_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="dataset is 'Clinic'; it must be one of Hospital"):
        construct_run_specs(parse_object_spec(f"error_detection:dataset=Clinic,model={MODEL}"))


# ---- the file of all six ----


def write_entity_matching(folder: Path) -> None:
    for side in "AB":
        rows = [[i, f"thing {i}", f"{i}.50"] for i in range(30)]
        write_table(folder / f"table{side}.csv", [["id", "name", "price"], *rows])
    for split, count in (("train", 24), ("valid", 6), ("test", 6)):
        pairs = [[i, i if i % 3 == 0 else (i + 1) % 30, int(i % 3 == 0)] for i in range(count)]
        write_table(folder / f"{split}.csv", [["ltable_id", "rtable_id", "label"], *pairs])


def write_all(scenarios: Path) -> None:
    matching = scenarios / "entity_matching"
    for name in ("Fodors_Zagats", "Beer", "iTunes_Amazon"):
        write_entity_matching(matching / "data" / name)
    (matching / "entity_matching_scenario_fixed_random_state.json").write_text("{}")
    imputation = scenarios / "entity_data_imputation" / "data"
    bought = [[i, f"set {i}", f"a set of {i}", f"maker {i % 4}", "10"] for i in range(60)]
    write_table(imputation / "Buy" / "Buy.csv", [["id", "name", "description", "manufacturer", "price"], *bought])
    places = [f'"grill {i}","{i} main st.","town {i % 4}","{i}-555","thai",\'{i}\'' for i in range(60)]
    attributes = [f"@attribute {name} string" for name in ("name", "addr", "city", "phone", "type", "class")]
    (imputation / "Restaurant").mkdir()
    (imputation / "Restaurant" / "fz.arff").write_text("\n".join(["@relation x", *attributes, "@data", *places]))
    write_hospital(scenarios / "error_detection" / "data" / "Hospital")


def test_all_six_tasks_run_in_one_suite(tmp_path: Path) -> None:
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
    assert prompt.endswith("\nAnswer:") and prompt.count("Answer: Yes") >= 2 <= prompt.count("Answer: No")
