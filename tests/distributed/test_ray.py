"""Real Ray: workers on this machine that are killed, hang, fail or differ while they work."""

from __future__ import annotations

import dataclasses
import os
import random
import signal

import psutil
import pytest

from flexgen_helm import Engine, EngineConfig, GenerationRequest
from flexgen_helm.distributed import engine as engine_module
from flexgen_helm.distributed import ray_cluster
from flexgen_helm.distributed.engine import ClusterEngine
from flexgen_helm.distributed.ray_cluster import RayOptions, RaySession, pool_size
from flexgen_helm.distributed.worker import ExpectedIdentity, ModelToLoad, Worker
from flexgen_helm.errors import Interrupted, MemoryLimitError, UsageError, WorkerError
from flexgen_helm.request import GenerationResult

pytest.importorskip("ray", reason="Ray is not installed: pip install 'flexgen-helm[ray]'")


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


@pytest.fixture
def model(tiny):
    return ModelToLoad(
        str(tiny("llama").path), EngineConfig(device="cpu", precision="fp16"), "tiny"
    )


def requests_of(count, max_tokens=8):
    return [
        GenerationRequest(
            prompt_token_ids=(5, 6, 7, 8 + i % 50, 60 + i // 50),
            max_tokens=max_tokens,
            ignore_eos=True,
            echo_logprobs=True,
        )
        for i in range(count)
    ]


def alone(model, requests):
    with Engine.from_config(model.path, model.config) as engine:
        return engine.run(requests)


def same(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert result.error is None and result.prompt_token_ids == wanted.prompt_token_ids
        for one, two in zip(result.completions, wanted.completions, strict=True):
            assert (one.token_ids, one.text) == (two.token_ids, two.text)
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
        assert result.prompt_logprobs is not None and wanted.prompt_logprobs is not None
        assert result.prompt_logprobs[1:] == pytest.approx(wanted.prompt_logprobs[1:], abs=1e-4)


@pytest.mark.slow
def test_answers_are_those_of_one_process_though_a_worker_is_killed(session, model):
    requests = [
        dataclasses.replace(request, max_tokens=4 + 7 * i % 60)  # answers come one by one
        for i, request in enumerate(requests_of(600))
    ]
    expected = alone(model, requests)
    state = random.getstate()
    engine = ClusterEngine(model, session)
    seen: list[int] = []
    killed: list[int] = []

    def on_result(index, result):
        seen.append(index)
        pids = [worker.pid for worker in engine._identities.values()]
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        if len(seen) >= 5 and len(alive) == 2 and not killed:
            # Ray's own niceness is 15, with which a worker starves beside any program.
            assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in alive} == {os.nice(0)}
            killed.append(alive[0])
            os.kill(alive[0], signal.SIGKILL)

    try:
        lost: set[int] = set()
        while not lost:  # the second worker may come late, or a killed one may be idle
            seen.clear(), killed.clear()
            same(engine.run(requests, on_result=on_result), expected)
            assert sorted(seen) == list(range(600))  # each once
            record = engine.last_run
            assert sum(worker["num_requests"] for worker in record["workers"]) == 600
            lost = {worker["pid"] for worker in record["workers"] if worker["is_lost"]}
        assert lost == {*killed}
        assert record["workload"]["output_tokens"] == sum(of.max_tokens for of in requests)
        assert record["policy"] and record["hardware"] and record["predicted_latency_s"] is None

        seen.clear()
        with pytest.raises(Interrupted):
            engine.run(requests, on_result=on_result, should_stop=lambda: len(seen) > 5)
        assert len(seen) < 600
        same(engine.run(requests[:40]), expected[:40])  # the workers are idle again
        assert random.getstate() == state
    finally:
        engine.close()


def poisoned(how):
    """A worker that some requests bring down; Ray sends the class, as it is local."""

    class Poisoned(Worker):
        def compute(self, requests, news, stop):
            if any(request.prompt_token_ids[3:] == (8, 60) for request in requests.values()):
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryLimitError("memory ran out with 7 tokens")
            super().compute(requests, news, stop)

    return Poisoned


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, sentence", [("fail", "memory ran out with 7 tokens"), ("kill", "its process ended")]
)
def test_what_no_worker_can_compute_fails_by_name_and_alone(
    session, model, monkeypatch, how, sentence
):
    monkeypatch.setattr(ray_cluster, "Worker", poisoned(how))
    answered: dict[int, GenerationResult] = {}
    engine = ClusterEngine(model, session)
    try:
        with pytest.raises(WorkerError, match=f"of 100 requests failed 3 times.*{sentence}"):
            engine.run(requests_of(100), on_result=answered.__setitem__)
        assert 0 not in answered and len(answered) >= 98
        assert all(result.error is None for result in engine.run(requests_of(40)[1:]))
    finally:
        engine.close()


@pytest.mark.slow
def test_what_hangs_is_computed_by_others(session, model, monkeypatch):
    monkeypatch.setattr(ray_cluster, "SILENCE_S", 10.0)
    requests = requests_of(300, max_tokens=32)
    engine = ClusterEngine(model, session)
    stopped: list[int] = []

    def on_result(index, result):
        if len(engine._identities) == 2 and not stopped:
            stopped.append(next(iter(engine._identities.values())).pid)
            os.kill(stopped[0], signal.SIGSTOP)

    try:
        results: list[GenerationResult] = []
        while not stopped:
            results = engine.run(requests, on_result=on_result)
        same(results, alone(model, requests))
    finally:
        engine.close()
        os.kill(stopped[0], signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_cannot_load_or_differs_ends_in_one_sentence(session, model, monkeypatch):
    limited = EngineConfig(device="cpu", limits={"cpu": 1000})  # type: ignore[arg-type]
    with pytest.raises(UsageError) as refused:
        ClusterEngine(ModelToLoad(model.path, limited, "tiny"), session)
    said = str(refused.value)
    assert said.startswith("no worker is left; ") and "\n" not in said
    assert said.count("limited to 1,000 bytes") == 1
    monkeypatch.setattr(
        engine_module, "_expected_identity", lambda _: ExpectedIdentity(frozenset())
    )
    with pytest.raises(UsageError, match="its weights or tokenizer of tiny, or its transformers"):
        ClusterEngine(model, session)


def test_addresses_without_a_cluster(monkeypatch):
    session = RaySession(RayOptions("local"))
    monkeypatch.setattr("ray.cluster_resources", dict)
    assert session.device("auto") == "cpu" and session.device("sim") == "sim"
    with pytest.raises(UsageError, match="Ray gives each worker one; say cuda"):
        session.device("cuda:1")


GPUS = {"CPU": 16.0, "GPU": 4.0}


@pytest.mark.parametrize(
    "machines, on_gpus, cores, expected",
    [
        ([{"CPU": 16.0}], False, None, (16, 0, 1)),
        ([{"CPU": 16.0}], False, 8, (8, 0, 2)),
        ([{"CPU": 16.0}], False, 32, (32, 0, 0)),
        ([{"CPU": 16.0}, {"CPU": 32.0}, {"CPU": 4.0}], False, None, (32, 0, 1)),
        ([GPUS], True, None, (4, 1, 4)),
        ([GPUS, {"CPU": 2.0, "GPU": 1.0}], True, None, (2, 1, 5)),
        ([GPUS], True, 2, (2, 1, 4)),
        ([{"CPU": 16.0}], True, None, (1, 1, 0)),
        ([GPUS], False, None, (16, 0, 1)),
        ([{}], False, None, (1, 0, 0)),  # a head that computes nothing
    ],
)
def test_how_many_workers_there_is_room_for(machines, on_gpus, cores, expected):
    nodes = [{"Alive": True, "Resources": of} for of in machines]
    found = pool_size([*nodes, {"Alive": False, "Resources": GPUS}], on_gpus, cores)
    assert (found.cores, found.gpus, found.room) == expected
