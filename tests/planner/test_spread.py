"""The range of a plan: which one a machine has, and that runs stored with the project are within
it.
"""

import json
from dataclasses import replace

import pytest

from flexgen_helm.hardware.device_profile import simulated_gpu
from flexgen_helm.hardware.profile import PROFILED, load_profile, shipped_profiles
from flexgen_helm.planner.measured_range import (
    DATA_SHEET,
    FITTED,
    LEARNT,
    NEW,
    PIPELINE,
    measured_range,
)
from tests.helpers.paths import ROOT

T4 = load_profile("t4")
MEASURED = replace(load_profile("laptop"), name="measured", sources={"everything": PROFILED})


def test_only_the_papers_machine_is_fitted():
    assert {
        name for name in shipped_profiles() if measured_range(load_profile(name)) == FITTED
    } == {"t4"}
    assert DATA_SHEET.low < FITTED.low < 1 < FITTED.high < DATA_SHEET.high


@pytest.mark.parametrize(
    "machine, ranks, expected",
    [
        (load_profile("rtx3090"), 1, DATA_SHEET),
        # Another machine of that name.
        (replace(T4, gpu=None, link=None), 1, DATA_SHEET),
        (simulated_gpu(T4, None), 1, DATA_SHEET),
        (
            replace(T4, link=replace(T4.link, to_gpu_bytes_s=T4.link.to_gpu_bytes_s / 2)),
            1,
            DATA_SHEET,
        ),
        # A measured one is surer after a run.
        (MEASURED, 1, NEW),
        (replace(MEASURED, decode_share=0.7), 1, LEARNT),
        (replace(MEASURED, prefill_share=0.7), 1, LEARNT),
        (replace(MEASURED, sources={"everything": "a friend"}), 1, DATA_SHEET),
        (MEASURED, 2, PIPELINE),
        (T4, 4, PIPELINE),
    ],
)
def test_the_range_of_a_machine(machine, ranks, expected):
    assert measured_range(machine, ranks=ranks) == expected


def test_a_longer_time_is_a_lower_rate():
    assert NEW.of_time(60.0) == pytest.approx((50.0, 120.0))
    assert NEW.of_rate(60.0) == pytest.approx((30.0, 72.0))
    assert (NEW.low, NEW.high) == (1 / 1.2, 2.0)


def test_runs_of_a_corrected_profile_are_within_its_range():
    """`benchmarks.policy` as stored: ten policies of two devices."""
    stored = json.loads((ROOT / "benchmarks/results/policy_cpu_2core_amd_epyc.json").read_text())
    ratios = [
        row["median"] / row["predicted_s"] for row in stored["rows"] if row.get("predicted_s")
    ]
    assert len(ratios) == 10 and LEARNT.low <= min(ratios) and max(ratios) <= LEARNT.high
    assert sum(1 / 1.05 <= ratio <= 1.05 for ratio in ratios) < 8
