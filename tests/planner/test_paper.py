"""The cost model against the paper's tables, and the reading of such tables."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from flexgen_helm.benchmarks.paper.rows import on_devices
from flexgen_helm.benchmarks.paper.systems import COMPRESSED, PaperProblem, with_page_cache
from flexgen_helm.benchmarks.paper.tables import MACHINES, evaluate_csv, summarize
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.plan import DATA_SHEET, FITTED, PIPELINE
from flexgen_helm.planner.policy import ZIGZAG, Policy, Workload
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.search import search
from flexgen_helm.quant.precisions import FP16
from tests.helpers.paths import SHARED

T4 = load_profile("t4")
PAPER = SHARED / "paper"


@pytest.mark.skipif(not PAPER.is_dir(), reason="the paper's tables are not here (../shared/paper)")
class TestThePapersTables:
    def test_throughputs_are_predicted_and_memory_runs_out_where_it_did(self):
        found = evaluate_csv(PAPER / "throughput.csv", T4)
        ours = [
            abs(row["error"])
            for row in found["rows"]
            if row["system"].startswith("FlexGen") and row["error"] is not None and float(row["tokens_per_s"]) >= 0.05
        ]
        assert len(ours) == 24
        assert np.median(ours) <= 0.10 and max(ours) <= 0.40
        assert found["summary"]["median_error"] <= 0.15
        for row in found["rows"]:
            assert row["feasible"] == (row["tokens_per_s"] != "OOM"), row

    def test_phases_are_those_of_the_papers_breakdown(self):
        """OPT-175B without overlap: 2,711 s of prefill, 11,315 s of decoding; and the decoding rates of one GPU."""
        rows = evaluate_csv(PAPER / "throughput.csv", T4)["rows"]
        breakdown = next(
            r for r in rows if r["model"] == "opt-175b" and r["overlap"] == "0" and r["system"] == "FlexGen"
        )
        assert breakdown["predicted_prefill_s"] == pytest.approx(2711, rel=0.25)
        assert breakdown["predicted_decode_s"] == pytest.approx(11315, rel=0.25)
        for model, tokens, rate in (
            ("opt-6.7b", 2 * 31, 38.28),
            ("opt-30b", 144 * 31, 11.52),
            ("opt-175b", 256 * 31, 0.83),
        ):
            row = next(r for r in rows if r["model"] == model and r["system"] == "FlexGen")
            assert tokens / row["predicted_decode_s"] == pytest.approx(rate, rel=0.2)

    def test_the_range_of_a_plan_holds_four_fifths_of_the_rows(self):
        """As its sentence says."""
        fitted = evaluate_csv(PAPER / "throughput.csv", T4)["summary"]
        assert (fitted["within_range"]["n"], fitted["n"]) == (25, 28) and "25 of its 28 rows" in FITTED.source


def test_a_table_that_cannot_be_read_is_refused_by_line(tmp_path):
    table = tmp_path / "table.csv"
    header = "system,model,prompt_len,gen_len,gpu_batch_size,num_gpu_batches,wg,wc,cg,cc,hg,hc\n"
    good = "FlexGen,opt-30b,512,32,48,3,20,80,0,100,0,100\n"
    table.write_text(header + good)
    assert evaluate_csv(table, T4)["rows"][0]["predicted_tokens_per_s"] > 1
    for bad, words in (
        (good.replace("opt-30b", "opt-31b"), "line 3.*opt-31b"),
        (good.replace(",48,", ",0,"), "line 3.*1 or more"),
        (good.replace(",20,80", ",x,80"), "line 3.*wg.*no number"),
        (good.replace("512,32", "512,0"), "line 3.*at least 1"),
        (good.replace("FlexGen", "Petals"), "line 3.*petals"),
    ):
        table.write_text(header + good + bad)
        with pytest.raises(UsageError, match=words):
            evaluate_csv(table, T4)
    table.write_text("model\nopt-30b\n")
    with pytest.raises(UsageError, match="prompt_len"):
        evaluate_csv(table, T4)
    with pytest.raises(UsageError, match="cannot be read"):
        evaluate_csv(tmp_path / "absent.csv", T4)


OTHERS = MACHINES.parent / "other_machines.csv"


def test_rows_of_other_machines_have_sources_and_errors_by_machine():
    found = evaluate_csv(OTHERS, T4)
    machines = {row["machine"] for row in found["rows"]}
    assert set(found["summary"]["by_system"]) == {f"FlexGen on {machine}" for machine in machines}
    assert all(row["source"].startswith("https://") and row["feasible"] for row in found["rows"])
    assert found["summary"]["n"] == 17 and found["summary"]["median_error"] <= 0.18
    assert all(own["median_error"] < 0.2 for own in found["summary"]["by_system"].values())
    within = summarize(found["rows"], DATA_SHEET)["within_range"]["n"]
    assert within == 16 and "44 of 45 published runs" in DATA_SHEET.source  # with all 28 of the paper's T4


def test_a_rows_machine_and_formats_are_what_is_predicted(tmp_path):
    header, row, *_ = OTHERS.read_text().splitlines()

    def predicted(line, hardware=T4):
        table = tmp_path / "table.csv"
        table.write_text(f"{header}\n{line}\n")
        return evaluate_csv(table, hardware)["rows"][0]["predicted_tokens_per_s"]

    own = predicted(row)
    assert own == predicted(row, load_profile("h100"))  # the flag gives way to the row
    assert predicted(row.replace("a6000,", ",")) != own  # a row without a machine is on the flag's
    assert predicted(row.replace(",1,0,0,,", ",1,0,1,,")) > own  # page-locked weights arrive sooner
    assert predicted(row.replace(",weights,", ",0,")) < own  # and so do packed ones
    with pytest.raises(UsageError, match="line 2.*a6001.*a6000"):
        predicted(row.replace("a6000,", "a6001,"))


# The paper's settings at prompt 512 (its main table): the policy that its authors ran.
SETTINGS = [
    ("opt-6.7b", False, Policy(2, 1, 1, 0, 1, 0, 1, 0)),
    ("opt-30b", False, Policy(48, 3, 0.2, 0.8, 0, 1, 0, 1)),
    ("opt-175b", False, Policy(32, 8, 0, 0.5, 0, 0, 0, 1)),
    ("opt-6.7b", True, Policy(72, 1, 1, 0, 1, 0, 1, 0)),
    ("opt-30b", True, Policy(16, 20, 0.2, 0.8, 0, 1, 1, 0)),
    ("opt-175b", True, Policy(48, 3, 0, 1, 0, 1, 0, 1)),
]


def papers(model, compressed):
    config, precision = resolve(model).entry.config, COMPRESSED if compressed else FP16
    limits = {"gpu": 16e9, "cpu": 208e9, "disk": 1.5e12}
    workload = Workload.uniform(512, 32, 1)
    return PaperProblem(config, with_page_cache(T4), workload, precision, 2, limits, endless=True)


@pytest.mark.fast(2)
@pytest.mark.parametrize("model, compressed, policy", SETTINGS)
def test_the_search_is_at_least_as_good_as_the_papers_policy(model, compressed, policy):
    problem = papers(model, compressed)
    theirs = predict(problem, policy, ZIGZAG, rounded=False)
    assert theirs.feasible
    found = search(problem, (ZIGZAG,))
    assert found.prediction.tokens_per_s >= theirs.tokens_per_s * 0.995


@pytest.mark.skipif(not PAPER.is_dir(), reason="the paper's tables are not here (../shared/paper)")
@pytest.mark.slow
def test_the_papers_frontier_is_met_within_the_models_error():
    with (PAPER / "latency_throughput_512_32_T4.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["system"].startswith("FlexGen")]
    for row in rows:
        compressed = row["system"].endswith("(c)")
        # Their seconds times their tokens a second is not always their tokens: the later of both latencies counts.
        latency = max(float(row["latency_s"]), 32 * int(row["effective_batch_size"]) / float(row["tokens_per_s"]))
        # The model takes compressed OPT-175B to be a quarter slower than it was (docs/explanation/cost_model.md).
        slack = 1.3 if compressed and latency < 700 and row["model"] == "opt-175b" else 1.1
        found = search(papers(row["model"], compressed), (ZIGZAG,), max_latency=latency * slack)
        assert found.prediction.tokens_per_s >= (0.9 if slack == 1.1 else 0.75) * float(row["tokens_per_s"]), row


@pytest.mark.slow
def test_four_gpus_decode_more_than_four_times_as_fast_as_one():
    table = {row["label"]: row for row in on_devices(T4)}
    errors = {label: row["predicted"] / row["paper"] - 1 for label, row in table.items()}
    assert len(table) == 12 and np.median(np.abs(list(errors.values()))) <= 0.2
    for model in ("opt-6.7b", "opt-30b", "opt-175b"):
        one, four = (table[f"{model}, {gpus} GPU, decoding tokens/s"]["predicted"] for gpus in (1, 4))
        assert four > 4 * one
    assert all(PIPELINE.holds(1 + error) for label, error in errors.items() if "4 GPU" in label)
    slow = on_devices(replace(T4, prefill_share=T4.prefill_share / 3, decode_share=T4.decode_share / 3))
    assert np.median([abs(row["predicted"] / row["paper"] - 1) for row in slow]) > 0.2
