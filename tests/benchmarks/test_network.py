"""`bench network`: what the paper says of its comparison with Petals, and the measured part or why there is none."""

from __future__ import annotations

import pytest

from flexgen_helm.benchmarks import Options, network
from flexgen_helm.errors import FlexgenError


def test_offloading_has_the_higher_throughput_and_on_slow_links_the_lower_latency_of_short_answers():
    rows, crossings = network.predicted_rows()
    assert len(rows) == len(network.NETWORKS) * len(network.OUTPUTS) and len(crossings) == len(network.NETWORKS)
    assert all(row["offloading_tokens_per_s"] > row["pipeline_tokens_per_s"] for row in rows)
    slow = [row for row in rows if row["label"].startswith("100 ms")]
    assert slow[0]["offloading_s"] < slow[0]["pipeline_s"] and slow[-1]["offloading_s"] > slow[-1]["pipeline_s"]
    fast = [row for row in rows if row["label"].startswith("10 ms, 1 Gbit")]
    assert all(row["pipeline_s"] < row["offloading_s"] for row in fast)


def test_without_traffic_control_it_says_that_nothing_was_measured(monkeypatch):
    def refuse(*command: str) -> None:
        raise FlexgenError("not permitted")

    monkeypatch.setattr(network, "_call", refuse)
    rows, notes = network.measured_rows(Options(quick=True))
    assert rows == [] and notes[0].startswith("nothing was measured: ")


def test_two_processes_take_as_long_as_the_network_says():
    rows, notes = network.measured_rows(Options(quick=True))
    if not rows:
        pytest.skip(notes[0])
    assert all(row["median"] > row["without_network_s"] for row in rows)
