"""Real Ray: two workers on this machine, killed while they work."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from flexgen_helm import Engine, EngineConfig, GenerationRequest
from flexgen_helm.distributed import ray_cluster
from flexgen_helm.distributed.engine import ClusterEngine
from flexgen_helm.distributed.ray_cluster import RayOptions, RaySession, worker_slots
from flexgen_helm.distributed.worker import ModelToLoad
from flexgen_helm.errors import Interrupted, UsageError
from flexgen_helm.request import GenerationResult

pytest.importorskip("ray", reason="Ray is not installed: pip install 'flexgen-helm[ray]'")


# So many that a worker which is killed after its first answers leaves work.
NUM_REQUESTS = 600


@pytest.fixture(scope="module")
def session():
    """A local cluster, started by the session: two workers with a core each."""
    import ray

    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    session = RaySession(RayOptions("local", workers=2, cores=1))
    state = random.getstate()
    session.connect()
    assert random.getstate() == state  # HELM's scenarios draw from it meanwhile
    yield session
    session.close()
    assert not ray.is_initialized()


def config(**options: Any) -> EngineConfig:
    return EngineConfig(device="cpu", precision="fp16", **options)


def cluster_engine(session: RaySession, path: str, **options: Any) -> ClusterEngine:
    model = ModelToLoad(path, config(**options), "tiny")
    return ClusterEngine(model, session.start(model))


def requests_of(count: int, max_tokens: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_token_ids=(5, 6, 7, 8 + i % 50, 60 + i // 50), max_tokens=max_tokens, ignore_eos=True,
            echo_logprobs=True,
        )
        for i in range(count)
    ]  # fmt: skip


def same(results: list[GenerationResult], expected: list[GenerationResult]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.error is None and result.prompt_token_ids == wanted.prompt_token_ids
        assert [c.token_ids for c in result.completions] == [c.token_ids for c in wanted.completions]
        assert [c.text for c in result.completions] == [c.text for c in wanted.completions]
        for one, two in zip(result.completions, wanted.completions):
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
        assert result.prompt_logprobs is not None and wanted.prompt_logprobs is not None
        assert result.prompt_logprobs[1:] == pytest.approx(wanted.prompt_logprobs[1:], abs=1e-4)


@pytest.mark.slow
def test_two_workers_answer_as_one_process_though_one_hangs_and_the_next_dies(session, tiny, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_SILENCE_S", 10.0)
    path = str(tiny("llama").path)
    requests = requests_of(NUM_REQUESTS, max_tokens=32)
    with Engine.from_config(path, config()) as engine:
        expected, fingerprint = engine.run(requests), engine.fingerprint
    state = random.getstate()
    engine = cluster_engine(session, path)
    try:
        assert engine.fingerprint == fingerprint  # so answers of one process and of a cluster share a response cache
        # Ray's own default is 15 less, with which a worker starves beside any program that computes.
        assert {os.getpriority(os.PRIO_PROCESS, worker.pid) for worker in engine._ready.values()} == {os.nice(0)}
        seen: list[int] = []
        lost: list[int] = []

        def on_result(index: int, result: GenerationResult) -> None:
            seen.append(index)
            if len(seen) >= 5 and len(engine._ready) == 2 and not lost:
                lost.extend(worker.pid for worker in engine._ready.values())
                os.kill(lost[0], signal.SIGSTOP)
                os.kill(lost[1], signal.SIGKILL)

        results: list[GenerationResult] = []
        while not lost:  # the second worker may have come late
            seen.clear()
            results = engine.run(requests, on_result=on_result)
        same(results, expected)
        assert sorted(seen) == list(range(NUM_REQUESTS))  # each once, also what had to be computed again
        workers = engine.last_run["workers"]
        assert sum(worker["num_requests"] for worker in workers) == NUM_REQUESTS
        assert {worker["pid"] for worker in workers if worker["is_lost"]} == {*lost}
        assert engine.last_run["workload"]["output_tokens"] == NUM_REQUESTS * 32

        assert random.getstate() == state
        seen.clear()
        with pytest.raises(Interrupted):
            engine.run(requests, on_result=on_result, should_stop=lambda: len(seen) > 5)
        same(engine.run(requests[:40]), expected[:40])  # the next run of the same engine, with who is left
    finally:
        engine.close()


def test_addresses_without_a_cluster(monkeypatch):
    session = RaySession(RayOptions("local"))
    monkeypatch.setattr("ray.cluster_resources", dict)
    assert session.device("auto") == "cpu" and session.device("sim") == "sim"
    with pytest.raises(UsageError, match="Ray gives each worker one; say cuda"):
        session.device("cuda:1")


NODE = {"Alive": True, "NodeID": "n", "NodeManagerHostname": "h"}


@pytest.mark.parametrize(
    "resources, on_gpus, cores, expected",
    [
        ({"CPU": 16.0}, False, None, [(16, 0, 1.0)]),
        ({"CPU": 16.0}, False, 8, [(8, 0, 0.5)] * 2),
        ({"CPU": 16.0}, False, 32, []),
        ({"CPU": 16.0, "GPU": 4.0}, True, None, [(4, 1, 0.25)] * 4),
        ({"CPU": 16.0, "GPU": 4.0}, True, 2, [(2, 1, 0.25)] * 4),
        ({"CPU": 16.0}, True, None, []),
        ({"CPU": 16.0, "GPU": 4.0}, False, None, [(16, 0, 1.0)]),
        ({}, False, None, []),  # a head that computes nothing
    ],
)
def test_where_workers_are_placed(resources, on_gpus, cores, expected):
    found = worker_slots([{**NODE, "Resources": resources}, {**NODE, "Alive": False}], on_gpus, cores)
    assert [(slot.cores, slot.gpus, slot.share) for slot in found] == expected
    assert [slot.name for slot in found] == [f"h/{number}" for number in range(len(expected))]
