"""`bench scaled`: which of the paper's runs it has, the rows that come of them, and two small runs."""

import pytest

from flexgen_helm.benchmarks import Options, load, scaled
from flexgen_helm.benchmarks.paper.rows import Sources, data_wrangling, policies, ssd_speed, techniques, throughput

FLEXGEN = "FlexGen opt-30b 48x3 20/80 0/100 0/100"


LARGE = "FlexGen opt-175b 32x8 0/50 0/0 0/100"


def test_every_run_with_16_bits_is_there_once():
    found = {case.label: case for case in scaled.cases()}
    assert len(found) == len(list(scaled.cases())) == 7 + 4 + 6 + 6 + 7
    without = {label.removeprefix(f"throughput: {LARGE}") for label in found if LARGE in label}
    assert without == {"", ", no overlap", ", no cpu attention", ", a disk of 0.5 GB/s"}
    slow, large = found[f"throughput: {LARGE}, a disk of 0.5 GB/s"], found[f"throughput: {LARGE}"]
    assert (slow.disk_gb_s, large.disk_gb_s) == ((0.5, 0.5), (1.6, 1.3)) and slow.policy == large.policy
    assert large.policy.wc == 0.5 and large.policy.cc == large.policy.cg == 0 and large.sequences == 256
    best = found[f"throughput: {FLEXGEN}"]
    assert (best.policy.wg, best.policy.wc, best.sequences) == (0.1, 0.9, 144)
    assert not found["throughput: Accelerate opt-30b 8x1 0/100 100/0 100/0"].engine["overlap"]
    assert all(case.policy is None for label, case in found.items() if "throughput" not in label)


def test_tables_have_shares_of_what_was_measured():
    """Of throughputs over that of FlexGen's own row, and of times over the sum of those of the table."""
    times = {"EM Beer": 3.0, "DI Buy": 1.0}
    rows = [{"label": f"data_wrangling: {task}", "median": seconds} for task, seconds in times.items()]
    rows += [
        {"label": f"throughput: {label}", "tokens_per_s": rate}
        for label, rate in ((FLEXGEN, 20.0), ("DeepSpeed opt-30b 4x1 0/100 100/0 100/0", 4.0))
    ]
    rows.append({"label": "throughput: FlexGen opt-30b 48x1 20/80 0/100 0/100", "tokens_per_s": 15.0})
    sources = Sources({"scaled": {"rows": rows}})

    def shares(table):
        return {row["label"]: row for row in table(sources) if row["label"].startswith("share of")}

    (row,) = shares(throughput).values()
    assert row["measured"] == 0.2 and row["paper"] == pytest.approx(0.6 / 7.32, abs=1e-3)
    (row,) = shares(policies).values()
    assert row["measured"] == 0.75 and row["paper"] == pytest.approx(5.4 / 7.32, abs=1e-3)
    rows += [
        {"label": f"throughput: {LARGE}{end}", "tokens_per_s": rate}
        for end, rate in (("", 10.0), (", no overlap", 8.0), (", a disk of 0.5 GB/s", 5.0))
    ]
    by_label = {row["label"]: row for row in techniques(sources)}
    assert by_label["OPT-175B, no overlapping"]["measured"] == 0.8
    assert by_label["OPT-175B, no cpu compute"]["measured"] is None
    assert [(row["measured"], row["paper"]) for row in shares(ssd_speed).values()] == [
        (0.5, pytest.approx(0.3 / 0.69, abs=1e-3)),
        (0.5, pytest.approx(0.292 / 0.49, abs=1e-3)),
    ]
    found = shares(data_wrangling)
    assert [row["measured"] for row in found.values()] == [0.75, 0.25]
    assert found["share of the time of all: opt-30b: EM Beer"]["paper"] == pytest.approx(
        238.58 / (238.58 + 185.882), abs=1e-3
    )
    assert not any(row["label"].startswith("share") for row in data_wrangling(Sources({"scaled": {"rows": []}})))


@pytest.mark.slow
def test_a_small_run_of_each_kind():
    result = load("scaled")(Options(quick=True))
    given, searched = result["rows"]
    assert given["policy"]["gpu_batch_size"] == 1 and searched["tokens_per_s"] > 0
    assert searched["policy"] is not None
