"""Error detection: which cells are wrong, how examples are drawn, and refusals."""

from collections import Counter

import pytest
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.common.object_spec import parse_object_spec

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.errors import UsageError
from flexgen_helm.scenarios import error_detection
from tests.helpers.data_sets import write_hospital, write_table
from tests.helpers.helm_runs import MODEL


def instances(output):
    return error_detection.ErrorDetectionScenario("Hospital").get_instances(str(output))


def answer(instance):
    (reference,) = instance.references
    assert reference.is_correct
    return reference.output.text


def test_a_cell_is_wrong_where_the_tables_differ(tmp_path):
    wrong = write_hospital(tmp_path / "data" / "Hospital")
    cells = [
        cell
        for row in error_detection.read_cells(tmp_path / "data" / "Hospital", "Hospital")
        for cell in row
    ]
    assert len(cells) == 60 * 3  # neither the row's number nor a cell with nothing in it
    assert sum(cell.is_wrong for cell in cells) == len(wrong) == 15
    assert all(("x" in cell.text) == cell.is_wrong for cell in cells)
    assert cells[1].text == "city: town 0" or cells[1].is_wrong


def test_splits_are_of_rows_and_examples_are_balanced(tmp_path):
    write_hospital(tmp_path / "data" / "Hospital")
    found = instances(tmp_path)
    counts = {
        split: Counter(answer(i) for i in found if i.split == split)
        for split in ("train", "valid", "test")
    }
    assert counts["train"]["Yes"] == counts["train"]["No"] > 0
    assert sum(counts["test"].values()) == 6 * 3 and sum(counts["valid"].values()) == 11 * 3
    again = instances(tmp_path)
    assert [(i.input.text, i.split) for i in again] == [(i.input.text, i.split) for i in found]


@pytest.mark.parametrize(
    "dirty, clean, message",
    [
        (
            [["index", "city"], [1, "a"]],
            [["index", "city"]],
            "with 2 rows and clean.csv with 1 are not the same",
        ),
        (
            [["index", "city"], [1, "a"]],
            [["index", "city"], [1]],
            "not the same table cell by cell",
        ),
        ([["index", "city"]], [["index", "city"]], "not the same table"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(dirty, clean, message, tmp_path):
    folder = tmp_path / "data" / "Hospital"
    write_table(folder / "dirty.csv", dirty)
    write_table(folder / "clean.csv", clean)
    with pytest.raises(UsageError, match=message):
        instances(tmp_path)


def test_without_network_the_files_place_is_named(tmp_path, monkeypatch):
    def unreachable(source, target):
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlretrieve", unreachable)
    with pytest.raises(
        UsageError, match=(r"dirty.csv is not there and https://.*no route to host.*put it there")
    ):
        instances(tmp_path)
    assert not list(tmp_path.rglob("*.csv"))


def test_another_dataset_is_refused():
    with pytest.raises(UsageError, match="dataset is 'Clinic'; it must be one of Hospital"):
        construct_run_specs(parse_object_spec(f"error_detection:dataset=Clinic,model={MODEL}"))
