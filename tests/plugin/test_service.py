"""The process-wide service: blocks, equal questions, the journal, models in turn, errors and interruption."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flexgen_helm.errors import Interrupted, NumericalError
from flexgen_helm.plugin import interrupt, service
from flexgen_helm.plugin.convert import PreparedRequest, to_generation_request
from flexgen_helm.plugin.models import ModelArguments
from flexgen_helm.plugin.service import Service
from tests.helpers.fake_engine import POISON, FakeEngine, FakeTokenizer

MODEL, OTHER = ModelArguments("m", "m"), ModelArguments("o", "o")


def question(prompt: str) -> PreparedRequest:
    from helm.common.request import Request

    return to_generation_request(Request(prompt=prompt, temperature=0, max_tokens=4), FakeTokenizer(), 4096)


class Bench:
    """A service of its own and the engines it made."""

    def __init__(self) -> None:
        self.service = Service()
        self.engines: list[FakeEngine] = []
        self.delay_s = 0.0
        self.broken = False

    def make(self, model: ModelArguments) -> FakeEngine:
        if self.broken:
            raise RuntimeError("cannot load")
        self.engines.append(FakeEngine(model.name, self.delay_s))
        return self.engines[-1]

    @property
    def blocks(self) -> list[int]:
        return [len(run) for engine in self.engines for run in engine.runs]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    bench = Bench()
    monkeypatch.setattr(service, "engine_factory", bench.make)
    yield bench
    bench.service.close()
    assert not bench.service._queue
    assert all(engine.closed for engine in bench.engines)


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("threads", [1, 4, 64])
def test_an_announced_block_runs_once_at_any_number_of_threads(bench: Bench, threads: int) -> None:
    questions = [question(str(i % 50)) for i in range(80)]  # 30 repetitions
    with bench.service.submit(MODEL, questions) as block, ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda q: bench.service.answer(MODEL, q), questions))
        assert set(block.answers()) == {q.key for q in questions}
    assert bench.blocks == [50]
    assert [a.result.prompt_token_ids for a in answers] == [q.request.prompt_token_ids for q in questions]
    assert not bench.service._jobs  # nothing is kept after the run


def test_unannounced_questions_are_gathered(bench: Bench) -> None:
    questions = [question(str(i)) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda q: bench.service.answer(MODEL, q), questions))
    assert sum(bench.blocks) == 16
    assert len(bench.blocks) <= 3


def test_held_blocks_run_together(bench: Bench) -> None:
    first = bench.service.submit(MODEL, [question("a"), question("b")], hold=True)
    second = bench.service.submit(MODEL, [question("b"), question("c")], hold=True)
    time.sleep(0.1)
    assert bench.blocks == []
    bench.service.flush()
    first.wait(), second.wait()
    assert bench.blocks == [3]
    first.close()
    assert set(second.answers()) == {question("b").key, question("c").key}
    second.close()


def test_models_take_turns_and_one_is_in_memory(bench: Bench) -> None:
    held = [bench.service.submit(m, [question(p)], hold=True) for p in "ab" for m in (MODEL, OTHER)]
    bench.service.flush()
    for block in held:
        block.wait()
        block.close()
    assert bench.blocks == [2, 2]
    assert [engine.closed for engine in bench.engines] == [True, False]


def test_an_expected_model_is_loaded_before_anybody_asks(bench: Bench) -> None:
    bench.service.preload(MODEL)
    assert eventually(lambda: len(bench.engines) == 1)
    bench.service.preload(MODEL)
    bench.service.preload(OTHER)  # one is loaded: it stays until the other is asked
    time.sleep(0.05)
    assert len(bench.engines) == 1
    bench.service.answer(MODEL, question("a"))
    assert bench.blocks == [1] and len(bench.engines) == 1


def test_what_goes_wrong_with_an_expected_model_is_told_to_who_asks(bench: Bench) -> None:
    bench.broken = True
    bench.service.preload(MODEL)
    with pytest.raises(RuntimeError, match="cannot load"):
        bench.service.answer(MODEL, question("a"))
    bench.broken = False
    bench.service.answer(MODEL, question("b"))
    assert bench.blocks == [1]


def test_finished_answers_are_not_computed_again(bench: Bench) -> None:
    bench.service.answer(MODEL, question("a"))
    again = Bench()
    service.engine_factory = again.make
    with again.service.submit(MODEL, [question("a"), question("b")]) as block:
        block.wait()
        reused = {key: answer.reused for key, answer in block.answers().items()}
    assert reused == {question("a").key: True, question("b").key: False}
    assert again.blocks == [1]
    again.service.close()


def test_without_the_journal_nothing_is_reused_or_kept(bench: Bench, tmp_path: Path) -> None:
    bench.service.answer(MODEL, question("a"))
    bench.service.answer(MODEL, question("a"), durable=False)
    bench.service.answer(OTHER, question("a"), durable=False)
    assert bench.blocks == [1, 1, 1]
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["fake-m.sqlite"]


def test_a_journal_that_cannot_be_used_costs_no_answers(bench: Bench, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "fake-m.sqlite").write_bytes(b"garbage" * 1000)
    assert bench.service.answer(MODEL, question("a")).result.completions
    assert "not kept" in caplog.text and "fake-m.sqlite" in caplog.text


def test_one_bad_request_fails_alone_and_is_not_kept(bench: Bench) -> None:
    questions = [question(p) for p in ("a", POISON, "b")]
    with bench.service.submit(MODEL, questions) as block:
        block.wait()
        errors = [block.answers()[q.key].result.error for q in questions]
    assert errors[0] is None and isinstance(errors[1], NumericalError) and errors[2] is None
    assert not bench.service.answer(MODEL, question(POISON)).reused


def test_an_engine_that_cannot_be_loaded_fails_its_block_only(bench: Bench) -> None:
    bench.broken = True
    with pytest.raises(RuntimeError, match="cannot load"):
        bench.service.answer(MODEL, question("a"))
    bench.broken = False
    assert bench.service.answer(MODEL, question("a")).result.completions


def test_the_account_is_there_with_the_last_answer(bench: Bench) -> None:
    for i in range(20):
        bench.service.answer(MODEL, question(str(i)))
        assert bench.service.usage(MODEL)["policy"] == "fake"
    assert bench.service.usage(OTHER) == {}
    assert bench.service.fingerprint(MODEL) == "fake-m"


def test_interruption_is_quick_keeps_answers_and_can_be_followed(bench: Bench) -> None:
    bench.delay_s = 0.05
    questions = [question(str(i)) for i in range(200)]
    with bench.service.submit(MODEL, questions) as block:
        assert eventually(lambda: len(block.answers()) >= 3)
        started = time.monotonic()
        bench.service.stop()
        with pytest.raises(Interrupted):
            block.wait()
        assert time.monotonic() - started < 2
        done = len(block.answers())
    assert eventually(lambda: not bench.service._jobs)
    bench.delay_s, bench.engines[0]._delay_s = 0.0, 0.0
    bench.service.resume()
    with bench.service.submit(MODEL, questions) as block:
        block.wait()
        assert sum(answer.reused for answer in block.answers().values()) in (done, done + 1)


def test_a_block_that_everybody_left_is_given_up(bench: Bench) -> None:
    bench.delay_s = 0.02
    block = bench.service.submit(MODEL, [question(str(i)) for i in range(500)])
    assert eventually(lambda: bool(bench.blocks))
    block.close()
    started = time.monotonic()
    assert bench.service.answer(OTHER, question("next")).result.completions
    assert time.monotonic() - started < 3


def test_a_block_that_is_not_left_goes_on(bench: Bench) -> None:
    bench.delay_s = 0.01
    block = bench.service.submit(MODEL, [question(str(i)) for i in range(50)])
    other = bench.service.submit(MODEL, [question("0")])  # the last one that the fake computes
    block.close()
    other.wait()
    assert len(other.answers()) == 1
    other.close()


def test_sigint_stops_the_service_and_does_what_it_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = Service(), []
    monkeypatch.setattr(interrupt, "get_service", lambda: own)
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        interrupt.install()
        handler = signal.getsignal(signal.SIGINT)
        interrupt.install()
        assert signal.getsignal(signal.SIGINT) is handler  # chained once
        signal.raise_signal(signal.SIGINT)
        assert own._stop.is_set() and seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt.install()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a background job stays one
        signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt.install)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
