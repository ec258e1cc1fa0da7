"""`bench paper`: the paper's tables beside predictions and measurements."""

import csv
import re
import statistics

import pytest

from flexgen_helm.benchmarks import Options, load
from flexgen_helm.benchmarks.paper import comparison, rows
from flexgen_helm.benchmarks.paper.page import page
from flexgen_helm.benchmarks.paper.rows import Sources
from flexgen_helm.benchmarks.paper.tables import evaluate_csv
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import load_profile
from tests.helpers.paths import ROOT, SHARED
from tests.helpers.scripts import load as script

# Of other sources: Petals' row is in the paper's text alone.
OTHERS = ("other_machines.csv", "peers.csv", "petals_512_T4.csv")
TABLES = {path.name: path for path in rows.PAPER.glob("*.csv") if path.name not in OTHERS}


def found(table: str) -> list[dict]:
    return load("paper")(Options(table=table))["rows"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the paper's tables are not here (../shared/paper)")
def test_figures_are_the_papers():
    assert len(TABLES) == 10
    for name, path in TABLES.items():
        assert path.read_bytes() == (SHARED / "paper" / name).read_bytes(), name


@pytest.mark.skipif(not SHARED.is_dir(), reason="the paper's text is not here (../shared/paper)")
def test_petals_figures_are_those_of_the_papers_text():
    text = (SHARED / "paper" / "flexgen_paper.tex").read_text()
    (line,) = re.findall(r"^Petals & (.*?) \\\\", text, re.MULTILINE)
    with (rows.PAPER / "petals_512_T4.csv").open() as file:
        assert [row["tokens_per_s_of_one_gpu"] for row in csv.DictReader(file)] == line.split(" & ")


def test_the_page_and_its_pictures_are_what_the_command_gives():
    written = (ROOT / "docs" / "paper.md").read_text()
    assert written == page(), "run `make pages`"
    assert all(f"## {table.title}\n" in written for table in comparison.TABLES)
    drawn = script(ROOT / "docs" / "paper_charts.py").charts()
    for name, text in drawn.items():
        assert (ROOT / "docs" / "images" / name).read_text() == text, "run `make pages`"
        assert f"](images/{name})" in written
    assert written.count("](images/") == len(drawn)


def test_every_technique_helps_in_the_paper_the_model_and_the_measurement():
    lines = found("techniques")
    assert [row["measured"] is None for row in lines] == [False] * 4 + [True] * 3
    for row in lines:
        assert max(row["paper"], row["predicted"], row["measured"] or 0) < 1, row


def test_the_parts_of_the_breakdown_add_up_to_the_cost_models_phases():
    """The paper's seconds, read here a second time, within the model's error."""
    with (rows.PAPER / "breakdown_opt_175b_512_T4.csv").open() as file:
        paper = {row["stage"]: row for row in csv.DictReader(file)}
    lines = {row["label"]: row for row in found("breakdown")}
    for stage, figures in paper.items():
        phase = lines[f"{stage}, seconds"]
        assert phase["paper"] == float(figures["total_s"])
        assert phase["predicted"] == pytest.approx(phase["paper"], rel=0.25)
        parts = [row for label, row in lines.items() if label.startswith(f"{stage}:") and "all" not in label]
        assert sum(row["predicted"] for row in parts) == pytest.approx(1, abs=0.05)
        columns = ("compute_s", "weight_read_s", "cache_read_s", "cache_write_s")
        assert [row["paper"] * phase["paper"] for row in parts[:4]] == pytest.approx(
            [float(figures[name]) for name in columns], abs=0.0006 * phase["paper"]
        )
        # In decoding, what takes the longest in the paper does so in the model.
        if stage == "decoding":
            assert max(parts[:4], key=lambda row: row["paper"]) is max(parts, key=lambda row: row["predicted"])


def test_parts_that_overlap_take_longer_than_the_whole():
    lines = evaluate_csv(rows.PAPER / "throughput.csv", load_profile("t4"))["rows"]
    (line,) = (
        row for row in lines if (row["table"], row["system"], row["model"]) == ("throughput_512", "FlexGen", "opt-175b")
    )
    for parts in rows.predicted_parts(line).values():
        assert sum(seconds for part, seconds in parts.items() if part != "total") > 1.05 * parts["total"]


def test_blocks_of_the_frontier_take_about_as_long_as_in_the_paper():
    lines = found("frontier")
    assert len(lines) == 38
    assert statistics.median(abs(row["predicted"] / row["paper"] - 1) for row in lines) <= 0.12
    for row in lines:
        # One digit of a small throughput is all that the paper has.
        assert row["predicted"] == pytest.approx(row["paper"], rel=0.4), row
        sequences = int(row["label"].rsplit(" ", 1)[1])
        assert row["predicted"] * row["predicted_s"] == pytest.approx(32 * sequences, rel=0.02), row


def test_data_wrangling_takes_about_as_long_as_in_the_paper():
    lines = found("data_wrangling")
    assert len(lines) == 12
    assert all(row["predicted"] == pytest.approx(row["paper"], rel=0.3) for row in lines), lines


def test_offloading_has_the_higher_throughput_than_petals():
    offloaded, petals = found("network")
    assert petals["paper"] < min(offloaded["paper"], offloaded["predicted"])


def test_sub_scenarios_take_no_longer_than_the_papers_minutes_which_have_more_in_them():
    lines = found("subscenarios")
    assert len(lines) == 7
    assert all(row["paper"] * 0.4 <= row["predicted"] <= row["paper"] for row in lines), lines


def test_measurements_are_left_out_where_results_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    nothing = Sources()
    assert {row["measured"] for row in rows.techniques(nothing) + rows.mixed_lengths(nothing)} == {None}
    assert all(row["paper"] is not None for row in rows.accuracy(nothing))


def test_each_table_says_beforehand_what_measures_it_and_measures_when_asked(monkeypatch):
    said: list[str] = []
    asked: list[Options] = []
    ratios = {"no weights on the gpu": 0.1, "no overlap": 0.2, "no cpu attention": 0.3, "row by row, small batch": 0.4}

    def ablation(options: Options) -> dict:
        asked.append(options)
        return {"rows": [{"label": label, "ratio": ratio} for label, ratio in ratios.items()]}

    monkeypatch.setattr(comparison, "load", {"ablation": ablation}.__getitem__)
    plain = load("paper")(Options(table="techniques", tell=said.append))
    assert not asked and "measured" not in plain
    assert said[0] == "techniques: predicted in seconds; --measure runs bench ablation, about 5 minutes"
    result = load("paper")(Options(table="techniques", measure=True, repeats=1))
    assert [row["measured"] for row in result["rows"]] == [0.1, 0.2, 0.3, 0.4, None, None, None]
    assert asked[0].repeats == 1 and set(result["measured"]) == {"ablation"}
    with pytest.raises(UsageError, match="'devices'.*--measure"):
        load("paper")(Options(table="devices", measure=True))


def test_figures_of_a_gpu_are_rows_of_the_main_table():
    measured = {
        "hardware": {"device": "NVIDIA X"},
        "rows": [{"label": "opt-6.7b", "tokens_per_s": 1234.5}, {"label": "y"}],
    }
    lines = rows.throughput(Sources({"gpu": measured}))
    assert lines[:-1] == rows.throughput(Sources())
    assert lines[-1] == {"label": "NVIDIA X: opt-6.7b", "paper": None, "predicted": None, "measured": 1234.0}


def test_other_lengths_are_predicted_by_the_same_model():
    lines = load("paper")(Options(table="throughput", prompt_len=1024, gen_len=32))["rows"]
    assert len(lines) == 12 and {row["paper"] for row in lines} == {None}
    before = {row["label"]: row["predicted"] for row in found("throughput")}
    own = {row["label"]: row["predicted"] for row in lines}
    # Twice the prompt: a large block is slower. The paper's policy of Accelerate's OPT-30B is the same.
    assert own["Accelerate opt-30b 8x1 0/100 100/0 100/0"] < before["Accelerate opt-30b 8x1 0/100 100/0 100/0"]
    (best,) = (value for label, value in own.items() if label.startswith("FlexGen opt-30b"))
    assert 0.3 < best / before["FlexGen opt-30b 48x3 20/80 0/100 0/100"] < 0.8
    with pytest.raises(UsageError, match="--table throughput"):
        load("paper")(Options(prompt_len=1024))


def test_an_unknown_table_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'petals'.*techniques"):
        load("paper")(Options(table="petals"))
