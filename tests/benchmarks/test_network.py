"""`bench network`: what the paper says of its comparison with Petals, and the measured part or why there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.benchmarks import Options, network, slow_link
from flexgen_helm.benchmarks.network_model import Network, pipeline_turns
from flexgen_helm.errors import FlexgenError
from tests.helpers.shares import only_whole

_BYTES = 10_000_000
_RECEIVE = f"""
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
left = {_BYTES}
while left:
    left -= len(connection.recv(1 << 20))
connection.sendall(b"x")
"""
_SEND = f"""
import socket, sys, time
began = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000))
print(time.monotonic() - began)
began = time.monotonic()
connection.sendall(bytes({_BYTES}))
connection.recv(1)
print(time.monotonic() - began)
"""


def _python(namespace: str, program: str, address: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, sys.executable, "-c", program, address]


@pytest.mark.slow
def test_offloading_has_the_higher_throughput_and_on_slow_links_the_lower_latency_of_short_answers():
    rows, crossings = network.predicted_rows()
    assert len(rows) == len(network.NETWORKS) * len(network.OUTPUTS) and len(crossings) == len(network.NETWORKS)
    assert all(row["offloading_tokens_per_s"] > row["pipeline_tokens_per_s"] for row in rows)
    slow = [row for row in rows if row["label"].startswith("100 ms")]
    assert slow[0]["offloading_s"] < slow[0]["pipeline_s"] and slow[-1]["offloading_s"] > slow[-1]["pipeline_s"]
    fast = [row for row in rows if row["label"].startswith("10 ms, 1 Gbit")]
    assert all(row["pipeline_s"] < row["offloading_s"] for row in fast)


def test_without_namespaces_it_says_that_nothing_was_measured(monkeypatch):
    def refuse(*command: str) -> None:
        raise FlexgenError("not permitted")

    monkeypatch.setattr(slow_link, "_ip", refuse)
    rows, notes = network.measured_rows(Options(quick=True))
    assert rows == [] and notes[0].startswith("nothing was measured: ")


def test_a_link_has_the_delay_and_the_rate_that_were_asked_for():
    if why := slow_link.why_not():
        pytest.skip(why)
    asked = Network(delay_s=0.05, bytes_s=10e6)
    with slow_link.namespaces(asked) as (names, addresses):
        server = subprocess.Popen(_python(names[1], _RECEIVE, addresses[1]), stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        done = subprocess.run(_python(names[0], _SEND, addresses[1]), capture_output=True, check=True, timeout=60)
        server.wait(timeout=60)
    connected_s, sent_s = map(float, done.stdout.split())
    # A round trip; then 10 MB, which a busy machine delays and nothing makes faster.
    assert 2 * asked.delay_s <= connected_s < 2 * asked.delay_s + 1
    assert _BYTES / asked.bytes_s + asked.delay_s <= sent_s < 3 * (_BYTES / asked.bytes_s + asked.delay_s)


@only_whole
@pytest.mark.slow
def test_two_processes_take_as_long_as_the_network_says():
    rows, notes = network.measured_rows(Options(quick=True))
    if not rows:
        pytest.skip(notes[0])
    for row in rows:
        assert row["median"] > row["without_network_s"]
        assert 0.5 < row["median"] / row["predicted_s"] < 2


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
