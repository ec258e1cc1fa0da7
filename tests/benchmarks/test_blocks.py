"""`bench blocks`: how phases and parts follow from two runs, and a run on a tiny block. Nothing here is timed."""

import pytest

from flexgen_helm.benchmarks import Options, blocks, load


def record(prefill: dict[str, float], step: dict[str, float], steps: int) -> dict:
    spent = {timer: prefill[timer] + steps * step[timer] for timer in prefill}
    return {"latency_s": spent.pop("latency_s"), "time_s": spent}


def test_phases_are_told_apart_by_runs_of_different_length():
    prefill = {"latency_s": 10.0, "load_weights": 3.0, "store_cache": 2.0, "load_activations": 0.5}
    step = {"latency_s": 2.0, "load_weights": 1.0, "store_cache": 0.25, "load_activations": 0.0}
    few, many = record(prefill, step, 1), record(prefill, step, 11)
    # The cache is read in decoding, more of it in each step; these seconds come on top of the others.
    few["time_s"]["load_cache"], many["time_s"]["load_cache"] = 0.1, 6.6
    few["latency_s"] += 0.1
    many["latency_s"] += 6.6
    found = blocks.breakdown([few], [many], output=12)
    parts = {"compute": 4.5, "weights read": 3, "cache read": 0, "cache written": 2, "hidden states": 0.5}
    assert found["prefill"] == pytest.approx(parts | {"total": 10})
    parts = {"compute": 8.25, "weights read": 11, "cache read": 6.6, "cache written": 2.75, "hidden states": 0}
    assert found["decoding"] == pytest.approx(parts | {"total": 28.6})


@pytest.mark.slow
def test_a_small_block_runs():
    result = load("blocks")(Options(quick=True))
    rows = {row["label"]: row for row in result["rows"]}
    assert rows["block of 4"]["of_largest"] == 1 and rows["block of 1"]["tokens_per_s"] > 0
    for phase in ("prefill", "decoding"):
        parts = [row for label, row in rows.items() if label.startswith(f"{phase}:") and "total" not in label]
        assert sum(row["share"] for row in parts) == pytest.approx(1)
    assert rows["decoding: cache read"]["seconds"] > 0  # the cache is on the disk
