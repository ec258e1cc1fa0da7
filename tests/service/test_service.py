"""The process-wide service: blocks, equal requests, the response cache, models in turn, errors and
interruption.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest

from flexgen_helm.concurrency import stop_point, stopped_by
from flexgen_helm.engine.engine import Engine
from flexgen_helm.errors import Interrupted, NumericalError
from flexgen_helm.request import DrawnToken, GenerationRequest, ThinkingFormat
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import KeyedRequest, Service, request_key
from tests.helpers.fake_engine import POISON, FakeEngine, FakeLoader

MODEL, OTHER = ModelArguments("m", "m"), ModelArguments("o", "o")


def keyed(prompt):
    request = GenerationRequest(prompt_token_ids=tuple(map(ord, prompt)), max_tokens=4)
    return KeyedRequest(request, request_key(request))


CHANGES = dict(
    prompt="a", prompt_token_ids=(2,), messages=[{"role": "user", "content": "a"}], max_tokens=5,
    temperature=0.5, top_p=0.5, seed=1, stop=("b",), n=2, echo_logprobs=True, ignore_eos=True,
    thinking=ThinkingFormat(budget=3), echo_greedy=True, top_logprobs=2,
)  # fmt: skip


def test_a_key_knows_every_field_of_a_request():
    # What was drawn of an answer does not change it.
    assert {*CHANGES, "drawn"} == {field.name for field in fields(GenerationRequest)}
    plain = GenerationRequest(prompt_token_ids=(1,))
    changed = [replace(plain, **{name: value}) for name, value in CHANGES.items()]
    changed += [
        replace(request, messages=[{"role": "user", "content": "b"}]) for request in changed[:1]
    ]
    changed += [GenerationRequest(**{name: []}) for name in ("messages", "prompt_token_ids")]
    changed += [GenerationRequest(prompt="")]
    keys = [request_key(request) for request in (plain, *changed)]
    assert request_key(replace(plain, drawn=[[DrawnToken(1, -0.5)]])) == keys[0]
    assert len(set(keys)) == len(keys)
    assert request_key(plain) == request_key(replace(plain, prompt_token_ids=[1]))
    array = replace(
        plain, prompt_token_ids=np.array([1]), max_tokens=np.int64(16), temperature=np.float32(0)
    )
    assert request_key(plain) == request_key(array) and array.validate() is None
    # The identity of a chat format says how its model thinks: these keys are in the caches of
    # users.
    assert (
        request_key(plain, "chat")
        == request_key(replace(plain, thinking=ThinkingFormat()), "chat")
        != keys[0]
    )


class Bench:
    """A service of its own and the engines it loaded."""

    def __init__(self):
        loader = FakeLoader(self.make)
        self.service, self.engines = Service(loader), loader.engines
        self.delay_s, self.broken = 0.0, False

    def make(self, model):
        if self.broken:
            raise RuntimeError("cannot load")
        return FakeEngine(model.name, self.delay_s)

    def submit(self, *prompts, model=MODEL):
        return self.service.submit(model, [keyed(prompt) for prompt in prompts])

    def compute(self, *asked):
        """Compute prompts of models that are submitted together."""
        with self.service.hold():
            blocks = [self.submit(prompt, model=model) for model, prompt in asked]
        for block in blocks:
            with block:
                block.wait()

    @property
    def blocks(self):
        return [len(run) for engine in self.engines for run in engine.runs]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    bench = Bench()
    yield bench
    bench.service.close()
    assert all(engine.closed for engine in bench.engines)


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("threads", [1, 4, 64])
def test_a_submitted_block_runs_once_at_any_number_of_threads(bench, threads):
    requests = [keyed(str(i % 50)) for i in range(80)]  # 30 repetitions
    with bench.service.submit(MODEL, requests) as block, ThreadPoolExecutor(threads) as pool:
        responses = list(pool.map(lambda request: bench.service.respond(MODEL, request), requests))
        assert set(block.responses()) == {request.key for request in requests}
    assert bench.blocks == [50]
    assert [r.result.prompt_token_ids for r in responses] == [
        request.request.prompt_token_ids for request in requests
    ]


def test_blocks_on_hold_run_together(bench):
    with bench.service.hold():
        first = bench.submit("a", "b")
        time.sleep(0.1)
        second = bench.submit("b", "c")
        assert bench.blocks == []
    first.wait(), second.wait()
    assert bench.blocks == [3]
    first.close()
    assert set(second.responses()) == {keyed("b").key, keyed("c").key}
    second.close()


def test_other_options_are_another_engine(bench):
    plain, other = (
        ModelArguments("m", "m", options={"device": device}) for device in ("cpu", "cuda")
    )
    bench.compute((plain, "a"), (other, "b"))
    assert bench.blocks == [1, 1]
    assert bench.service.loaded(plain) is not bench.service.loaded(other)


def test_models_take_turns_and_one_is_in_memory(bench):
    bench.compute((MODEL, "a"), (OTHER, "a"), (MODEL, "b"), (OTHER, "b"))
    assert bench.blocks == [2, 2]
    assert [engine.closed for engine in bench.engines] == [True, False]


def test_a_preloaded_model_is_loaded_before_the_first_request(bench):
    bench.service.preload(MODEL)
    assert eventually(lambda: len(bench.engines) == 1)
    bench.service.preload(MODEL)
    bench.service.preload(OTHER)  # one is loaded: it stays until a request for the other comes
    time.sleep(0.05)
    assert len(bench.engines) == 1
    bench.service.respond(MODEL, keyed("a"))
    assert bench.blocks == [1] and len(bench.engines) == 1


def test_a_model_whose_answers_are_all_stored_is_not_loaded(bench):
    def cached(bench, *prompts):
        with bench.submit(*prompts) as block:
            block.wait()
            return [block.responses()[keyed(prompt).key].is_cached for prompt in prompts]

    assert cached(bench, "a", "b") == [False, False]
    # results are stored soon after they are delivered, and by then at the latest
    bench.service.close()
    again = Bench()
    again.service.preload(MODEL)
    assert cached(again, "b", "a") == [True, True] and again.engines == []
    assert again.service.loaded(MODEL).fingerprint == "fake-m"  # for the run's record
    assert cached(again, "a", "c") == [True, False] and again.blocks == [1]
    again.service.close()
    without = Bench()
    without.service.preload(MODEL, use_cache=False)
    assert eventually(lambda: bool(without.engines))
    without.service.close()


def test_without_the_response_cache_nothing_is_read_or_stored(bench, tmp_path):
    bench.service.respond(MODEL, keyed("a"))
    bench.service.respond(MODEL, keyed("a"), use_cache=False)
    bench.service.respond(OTHER, keyed("a"), use_cache=False)
    assert bench.blocks == [1, 1, 1]
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["fake-m.sqlite"]


def test_a_response_cache_that_cannot_be_used_costs_no_results(bench, tmp_path, caplog):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "fake-m.sqlite").write_bytes(b"garbage" * 1000)
    assert bench.service.respond(MODEL, keyed("a")).result.completions
    assert "not stored" in caplog.text and "fake-m.sqlite" in caplog.text


def test_one_bad_request_fails_alone_and_is_not_stored(bench):
    with bench.submit("a", POISON, "b") as block:
        block.wait()
        errors = [
            block.responses()[keyed(prompt).key].result.error for prompt in ("a", POISON, "b")
        ]
    assert [type(error) for error in errors] == [type(None), NumericalError, type(None)]
    assert not bench.service.respond(MODEL, keyed(POISON)).is_cached


def test_a_block_fails_once_however_late_its_parts_are_asked_for(bench):
    bench.broken = True
    with bench.submit(*"01234") as block:
        block.wait()
        bench.broken = False
        for prompt in "01234":
            with pytest.raises(RuntimeError, match="cannot load"):
                bench.service.respond(MODEL, keyed(prompt))
        assert bench.blocks == []
        with bench.submit(*"01234") as again:  # while the first one is held
            again.wait()
            assert again.error() is None and len(again.responses()) == 5
            assert bench.service.respond(MODEL, keyed("0")).result.completions
    assert bench.blocks == [5]


def test_nobody_waits_for_a_thread_that_has_died(bench, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    monkeypatch.setattr(bench.service, "_fail", fail)
    monkeypatch.setattr(bench.service._loader, "load", fail)
    block = bench.service.submit(MODEL, [keyed("a")])
    with pytest.raises(RuntimeError, match="the engine's thread has ended"):
        block.wait()


def test_last_run_is_there_with_the_last_result(bench):
    for i in range(8):
        bench.service.respond(MODEL, keyed(str(i)))
        loaded = bench.service.loaded(MODEL)
        assert (loaded.last_run["policy"], loaded.fingerprint) == ("fake", "fake-m")
    assert bench.service.loaded(OTHER) is None


def test_interruption_is_quick_stores_results_and_can_be_resumed(bench):
    bench.delay_s = 0.05
    prompts = [*map(str, range(200))]
    with bench.submit(*prompts) as block:
        assert eventually(lambda: len(block.responses()) >= 3)
        started = time.monotonic()
        bench.service.interrupt()
        with pytest.raises(Interrupted):
            block.wait()
        assert time.monotonic() - started < 2
        done = len(block.responses())
    bench.engines[0].delay_s = 0.0
    bench.service.resume()
    with bench.submit(*prompts) as block:
        block.wait()
        assert sum(answer.is_cached for answer in block.responses().values()) in (done, done + 1)


def test_a_block_without_users_is_given_up(bench):
    bench.delay_s = 0.02
    block = bench.submit(*map(str, range(500)))
    assert eventually(lambda: bool(bench.blocks))
    block.close()
    started = time.monotonic()
    assert bench.service.respond(OTHER, keyed("next")).result.completions
    assert time.monotonic() - started < 3


def test_waiting_ends_at_a_time(bench):
    """What is finished then is stored, and the rest is computed by whoever asks again."""
    bench.delay_s = 0.05
    prompts = [f"{n:03}" for n in range(100)]
    with bench.submit(*prompts) as block:
        assert eventually(lambda: len(block.responses()) > 2)
        assert not block.wait(until=time.time())
    bench.engines[0].delay_s = 0.0
    with bench.submit(*prompts) as again:
        assert again.wait(until=time.time() + 1e9)
        assert 2 < sum(response.is_cached for response in again.responses().values()) < 100


def test_a_block_with_a_user_left_goes_on(bench):
    bench.delay_s = 0.01
    block = bench.submit(*map(str, range(50)))
    with bench.submit("0") as other:  # the last one that the fake computes
        block.close()
        other.wait()
        assert len(other.responses()) == 1


@pytest.mark.parametrize("is_used", [True, False])
def test_what_engines_share_is_released_after_them(is_used, tmp_path, monkeypatch):
    """A cluster, say; also where a run ended before the first request."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    loader = FakeLoader()
    closed = []
    monkeypatch.setattr(
        loader, "close", lambda: closed.append(all(engine.closed for engine in loader.engines))
    )
    service = Service(loader)
    if is_used:
        service.respond(MODEL, keyed("a"))
    service.close()
    assert closed == [True] and len(loader.engines) == is_used


def test_loading_is_called_off_when_the_process_ends():
    """No answer is wanted any more, and a command whose data is missing ends at once."""
    began, ended = threading.Event(), threading.Event()

    def make(model):
        began.set()
        try:
            while True:
                stop_point()
                time.sleep(0.005)
        finally:
            ended.set()

    service = Service(FakeLoader(make))
    service.preload(MODEL)
    assert began.wait(5)
    assert service.close()
    assert ended.is_set()


def test_loading_is_called_off_at_any_of_its_stop_points(tiny, tmp_path, monkeypatch):
    """As `Interrupted`, whatever is in progress: hashing, a proof, a tensor."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    path = tiny("llama").path
    for wanted in range(0, 100, 9):
        answers = iter([*[False] * wanted, True])  # nobody asks again after that
        with (
            suppress(Interrupted),
            stopped_by(partial(next, answers)),
            Engine.from_pretrained(path, device="cpu"),
        ):
            break  # it was not asked so often
    assert wanted > 20
