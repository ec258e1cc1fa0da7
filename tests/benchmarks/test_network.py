"""The paper's comparison with Petals: what the paper says of it, and turns of a pipeline over a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.benchmarks.paper.network import NETWORKS, Network, offloading, pipeline, pipeline_turns


@pytest.mark.slow
def test_offloading_has_the_higher_throughput_and_on_slow_links_the_lower_latency_of_short_answers():
    fast, _, slow = NETWORKS.values()
    for output in (2, 128):
        seconds, rate = offloading(output)
        slow_s, slow_rate = pipeline(output, slow)
        fast_s, fast_rate = pipeline(output, fast)
        assert rate > max(slow_rate, fast_rate) and fast_s < seconds
        assert (seconds < slow_s) == (output == 2)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.floats(0, 2), st.floats(0.1, 9), st.floats(0, 1))
def test_turns_of_a_network_equal_a_simulation(stages, batches, links, pass_s, message_bytes, delay_s):
    """A chain of stages and links, each of which serves one batch after the other; links deliver after a delay."""
    network = Network(delay_s, 10.0)
    turns = pipeline_turns(pass_s, stages, batches, message_bytes, network, links)
    servers = [(pass_s / stages, 0.0)] * stages + [(message_bytes / 10.0, delay_s)] * links
    free_at, end = [0.0] * len(servers), 0.0
    for _ in range(batches):
        end = 0.0
        for number, (busy_s, more_s) in enumerate(servers):
            free_at[number] = max(end, free_at[number]) + busy_s
            end = free_at[number] + more_s
    assert turns.once_s == pytest.approx(end)
    assert turns.again_s >= max(busy_s for busy_s, _ in servers) * batches - 1e-9
