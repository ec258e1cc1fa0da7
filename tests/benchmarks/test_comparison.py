"""`bench paper`: the paper's tables beside predictions and measurements."""

import csv

import pytest

from flexgen_helm.benchmarks import Options, load
from flexgen_helm.benchmarks.paper import comparison
from flexgen_helm.errors import UsageError
from tests.helpers.paths import ROOT, SHARED

TABLES = {
    path.name: path for path in comparison.PAPER.glob("*.csv") if path.name not in ("other_machines.csv", "peers.csv")
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the paper's tables are not here (../shared/paper)")
def test_figures_are_the_papers():
    assert len(TABLES) == 7
    for name, path in TABLES.items():
        assert path.read_bytes() == (SHARED / "paper" / name).read_bytes(), name


def test_the_page_is_what_the_command_gives():
    assert (ROOT / "docs" / "paper.md").read_text() == comparison.page(), "run `make pages`"


def test_another_figure_is_another_table(tmp_path, monkeypatch):
    before = comparison.techniques()
    for name, path in TABLES.items():
        (tmp_path / name).write_text(path.read_text().replace("no overlapping,5.86", "no overlapping,6.86"))
    monkeypatch.setattr(comparison, "PAPER", tmp_path)
    assert comparison.techniques() != before


def test_every_technique_helps_in_the_paper_the_model_and_the_measurement():
    rows = load("paper")(Options(table="techniques"))["rows"]
    assert len(rows) == 4
    for row in rows:
        assert max(row["paper"], row["predicted"], row["measured"]) < 1, row


def test_predictions_of_phases_are_the_cost_models():
    """The paper's seconds, read here a second time, within the model's error."""
    with (comparison.PAPER / "breakdown_opt_175b_512_T4.csv").open() as file:
        paper = {row["stage"]: float(row["total_s"]) for row in csv.DictReader(file)}
    rows = load("paper")(Options(table="breakdown"))["rows"]
    assert {row["label"]: row["paper"] for row in rows} == paper
    assert all(row["predicted"] == pytest.approx(row["paper"], rel=0.25) for row in rows)


def test_sub_scenarios_take_no_longer_than_the_papers_minutes_which_have_more_in_them():
    rows = load("paper")(Options(table="subscenarios"))["rows"]
    assert len(rows) == 7
    assert all(row["paper"] * 0.4 <= row["predicted"] <= row["paper"] for row in rows), rows


def test_measurements_are_left_out_where_results_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RESULTS", tmp_path)
    assert {row["measured"] for row in comparison.techniques() + comparison.mixed_lengths()} == {None}
    assert all(row["paper"] is not None for row in comparison.accuracy())


def test_an_unknown_table_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'frontier'.*techniques"):
        load("paper")(Options(table="frontier"))
    with pytest.raises(UsageError, match="device"):
        load("paper")(Options({"device": "cpu"}))
