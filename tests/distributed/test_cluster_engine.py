"""The driver with workers in threads: real engines of a tiny model, faults, refusals, and the record."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest

from flexgen_helm import Engine, EngineConfig, GenerationRequest
from flexgen_helm.distributed import worker as worker_module
from flexgen_helm.distributed.engine import ClusterEngine
from flexgen_helm.distributed.worker import Failure, ModelToLoad, Worker
from flexgen_helm.errors import Interrupted, MemoryLimitError, UsageError, WorkerError
from flexgen_helm.progress import Event, Message, observed_by
from flexgen_helm.request import GenerationResult, Progress
from tests.helpers.thread_workers import ThreadWorkers


@pytest.fixture(autouse=True)
def observers_of_this_test(monkeypatch):
    """Observers are those of the process, so workers in threads would report what the driver says."""
    monkeypatch.setattr(worker_module, "observed_by", lambda observer: nullcontext())


@pytest.fixture(scope="module")
def model(tiny):
    return ModelToLoad(str(tiny("llama").path), EngineConfig(device="cpu", precision="fp16"), "tiny")


def requests_of(count: int, max_tokens: int = 4) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=(5, 6, 7 + i), max_tokens=max_tokens) for i in range(count)]


def start(model: ModelToLoad, names: str = "ab", **faults: Any) -> tuple[ClusterEngine, ThreadWorkers]:
    workers = ThreadWorkers(list(names), lambda name: Worker(model), **faults)
    return ClusterEngine(model, workers), workers  # type: ignore[arg-type]


def test_the_answers_are_those_of_one_engine_bit_by_bit_in_one_unit(model):
    """Same plan, same bits: one worker computes what `Engine.run` computes."""
    requests = [*requests_of(30), GenerationRequest(prompt_token_ids=(10**9,))]
    with Engine.from_config(model.path, model.config) as engine:
        expected, fingerprint = engine.run(requests), engine.fingerprint
        record = engine.last_run
    cluster, workers = start(model, "a")
    seen: dict[int, Any] = {}
    progress: list[Progress] = []
    results = cluster.run(requests, on_result=seen.__setitem__, progress=progress.append)
    assert cluster.fingerprint == fingerprint
    assert [r.completions for r in results] == [r.completions for r in expected]
    assert str(results[-1].error) == str(expected[-1].error) and "vocabulary" in str(results[-1].error)
    assert seen == dict(enumerate(results)) and progress[-1].done_requests == progress[-1].total_requests == 31
    ours = cluster.last_run
    assert set(record) - {"predicted"} <= set(ours) and ours["workload"] == record["workload"]
    assert ours["policy"] == record["policy"] and ours["hardware"] == record["hardware"]
    (worker,) = ours["workers"]
    assert worker["num_units"] == 1 and worker["num_requests"] == 31 and not worker["is_lost"]
    cluster.close()
    assert workers.closed


def test_several_units_are_joined_in_the_record(model):
    requests = requests_of(60)
    with Engine.from_config(model.path, model.config) as engine:
        expected = engine.run(requests)
    cluster, workers = start(model)
    results = cluster.run(requests)
    assert [r.completions[0].token_ids for r in results] == [r.completions[0].token_ids for r in expected]
    record = cluster.last_run
    units = [unit for units in workers.units.values() for unit in units]
    assert len(units) >= 3
    assert sum(worker["num_units"] for worker in record["workers"]) == len(units)
    assert sum(worker["num_requests"] for worker in record["workers"]) == record["workload"]["num_requests"] == 60
    assert record["workload"]["output_tokens"] == sum(len(result.completions[0].token_ids) for result in results)
    assert record["wall_s"]["generate"] > 0 and record["predicted_latency_s"] is None
    cluster.close()


def test_one_worker_hangs_and_the_next_dies_and_the_run_ends(model):
    cluster, workers = start(model, "abc", lose_at={"b": 1}, hang="a")
    results = cluster.run(requests_of(60))
    assert all(result.completions for result in results) and workers.count() == 1
    cluster.close()
    cluster, _ = start(model, "ab", lose_at={"b": 1}, hang="a")
    with pytest.raises(WorkerError, match="no worker is left; b, a: its machine burns; it has not answered"):
        cluster.run(requests_of(60))
    cluster.close()


class _Fails:
    """An engine's `run` that raises where a request of a kind is among the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, token: int) -> None:
        honest = Engine.run

        def run(engine: Engine, requests: Any, **keywords: Any) -> Any:
            if any(token in request.prompt_token_ids for request in requests):
                raise error
            return honest(engine, requests, **keywords)

        monkeypatch.setattr(Engine, "run", run)


def test_what_no_worker_can_compute_fails_alone_after_retries(model, monkeypatch):
    """Out of memory in every unit with a certain request: units get smaller, and most others are answered."""
    _Fails(monkeypatch, MemoryLimitError("memory ran out with 7 tokens"), 7 + 33)
    cluster, workers = start(model)
    answered: dict[int, Any] = {}
    messages: list[Event] = []
    with (
        observed_by(messages.append),
        pytest.raises(WorkerError, match="of 40 requests failed.*memory ran out with 7 tokens"),
    ):
        cluster.run(requests_of(40), on_result=answered.__setitem__)
    assert 33 not in answered and len(answered) >= 36
    sizes = [len(unit) for units in workers.units.values() for unit in units]
    failed = [event for event in messages if isinstance(event, Message)]
    assert len(failed) == 3 and min(sizes) <= 2
    cluster.close()


def test_an_interruption_keeps_what_is_finished(model):
    cluster, workers = start(model)
    answered: list[int] = []
    with pytest.raises(Interrupted):
        cluster.run(
            requests_of(400, max_tokens=64),
            on_result=lambda index, result: answered.append(index),
            should_stop=lambda: len(answered) > 5,
        )
    assert 5 < len(answered) < 400
    assert all(result.error is None for result in cluster.run(requests_of(10)))  # the workers are idle again
    cluster.close()


def test_a_run_goes_on_behind_the_tokens_that_workers_have_reported(model):
    requests = [dataclasses.replace(request, ignore_eos=True) for request in requests_of(40, max_tokens=40)]
    drawn, later = defaultdict(list), []
    with Engine.from_config(model.path, model.config) as engine:
        expected = [result.completions[0].token_ids for result in engine.run(requests)]
    cluster, _ = start(model)
    with pytest.raises(Interrupted):
        cluster.run(
            requests,
            should_stop=lambda: sum(map(len, drawn.values())) > 200,
            on_drawn=lambda index, completion, step, token: drawn[index].append((step, token)),
        )
    known = {index: [token for _, token in of] for index, of in drawn.items()}
    assert all([step for step, _ in of] == [*range(len(of))] for of in drawn.values())
    again = [dataclasses.replace(request, drawn=[known.get(i, [])]) for i, request in enumerate(requests)]
    results = cluster.run(again, on_drawn=lambda *token: later.append(token))
    assert [result.completions[0].token_ids for result in results] == expected
    assert len(later) == sum(map(len, expected)) - sum(map(len, known.values()))
    cluster.close()


def test_a_loss_behind_an_answer_that_cannot_be_stored_is_not_forgotten(model):
    """Else the next run waits for a worker that is gone."""
    cluster, workers = start(model, lose_at={"b": 1, "a": 2})
    poll, losses = workers.poll, []

    def losses_behind_answers(timeout_s: float) -> list[tuple[str, Any]]:
        news = poll(timeout_s)
        losses.extend(item for item in news if Failure in item[1])
        rest = [item for item in news if Failure not in item[1]]
        if any(isinstance(value, GenerationResult) for _, items in rest for value in items.values()):
            rest += losses
        return rest

    def store(index: int, result: GenerationResult) -> None:
        raise OSError("no space left")

    workers.poll = losses_behind_answers  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        cluster.run(requests_of(40), on_result=store)
    assert losses
    workers.poll = poll  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="no worker is left"):
        cluster.run(requests_of(40))
    cluster.close()


def differing(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    honest = worker_module.identity_of
    monkeypatch.setattr(worker_module, "identity_of", lambda *given: dataclasses.replace(honest(*given), **values))


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"version": "0.0.9"}, "it has flexgen-helm 0.0.9 and the driver has .*; install the same version"),
        ({"tokenizer": "another"}, "its tokenizer of tiny differs from the driver's"),
        ({"fingerprint": "another"}, "its weights of tiny differ from the driver's"),
    ],
)
def test_a_worker_that_differs_is_refused(model, monkeypatch, values, sentence):
    differing(monkeypatch, **values)
    with pytest.raises(UsageError, match=f"no worker is left; a: {sentence}"):
        start(model, "a")


def test_machines_of_two_kinds_do_not_share_a_suite(model, monkeypatch):
    """Scores would depend on which machine computed what."""
    from flexgen_helm.distributed import engine as engine_module

    honest, kinds = worker_module.identity_of, iter(["cpu", "cuda"])

    def identity(*given: Any) -> Any:
        kind = next(kinds)
        return dataclasses.replace(honest(*given), device_type=kind, fingerprint=kind)

    monkeypatch.setattr(worker_module, "identity_of", identity)
    monkeypatch.setattr(engine_module, "engine_fingerprint", lambda *given: given[3])
    messages: list[Event] = []
    with observed_by(messages.append):
        cluster, workers = start(model)  # which may hear of both already
        while len(workers.workers) == 2:
            cluster.run(requests_of(4))
            cluster._step()
    assert [event.text for event in messages if isinstance(event, Message)][0].endswith(
        "on cuda, and other workers do not, so scores would depend on who computed them; run the two kinds of machines "
        "as two clusters"
    ) or "on cpu, and" in str(messages)
    cluster.close()


def test_a_model_that_cannot_be_loaded_is_one_sentence(model, tmp_path):
    small = dataclasses.replace(model, config=EngineConfig(device="cpu", limits={"cpu": 1000}))  # type: ignore[arg-type]
    with pytest.raises(UsageError) as refused:
        start(small, "ab")
    said = str(refused.value)
    assert said.startswith("no worker is left; ") and said.count("limited to 1,000 bytes") == 1
    assert "\n" not in said


def test_workers_of_one_machine_divide_its_memory(model):
    import psutil

    limits = worker_module.limits_of_share(model.config, 0.25).limits
    assert limits.cpu is not None and limits.disk is not None and limits.gpu is None
    assert limits.cpu <= psutil.virtual_memory().total / 4
    assert worker_module.limits_of_share(model.config, 1.0) is model.config
    given = EngineConfig(device="cpu", limits={"cpu": 10**9})  # type: ignore[arg-type]
    assert worker_module.limits_of_share(given, 0.25).limits.cpu == 10**9


def test_a_worker_with_the_whole_machine_lets_torch_choose_its_threads(model, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for set_by, cores, left in (("64", 64, None), ("2", 64, "2"), ("8", 8, "8")):
        monkeypatch.setenv("OMP_NUM_THREADS", set_by)
        Worker(model, 1.0, cores)
        assert os.environ.get("OMP_NUM_THREADS") == left


def test_paths_are_absolute_for_other_processes(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    sent = ModelToLoad("mine", EngineConfig(offload_dir="disk"), "mine").with_absolute_paths()
    assert (sent.path, sent.config.offload_dir) == (str(tmp_path / "mine"), str(tmp_path / "disk"))
    assert ModelToLoad("opt-125m", EngineConfig(), "opt-125m").with_absolute_paths().path == "opt-125m"
