"""What users meet: documented results at the edges, and bad input that fails alone, clearly and at
once.
"""

import dataclasses
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.manifest import MANIFEST
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.fingerprint import quick_engine_fingerprint
from flexgen_helm.engine.opening import fingerprint_before_loading
from flexgen_helm.errors import (
    Interrupted,
    MemoryLimitError,
    NumericalError,
)
from flexgen_helm.offload.transfer_stats import TransferStats
from flexgen_helm.offload.weights import TieredWeights
from tests.helpers import backend_models
from tests.helpers.layers import replace_layers
from tests.helpers.tiny_models import build_tiny, kv_bytes_per_token


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine.from_pretrained(tiny("llama").path) as engine:
        yield engine


@pytest.mark.parametrize("kind, ids", [(np.array, [7, 8, 9]), (torch.tensor, [])])
def test_any_librarys_integers_are_a_prompt(engine, kind, ids):
    given = kind(ids) if ids else np.zeros(0, np.int64)
    asked = [GenerationRequest(prompt_token_ids=value, max_tokens=3) for value in (ids, given)]
    expected, found = engine.run(asked)
    assert found.prompt_token_ids == tuple(ids) and found.completions == expected.completions


def ask(ids, new=0, **options):
    return GenerationRequest(prompt_token_ids=ids, max_tokens=new, **options)


def test_edges_have_documented_results(engine):
    scored = {"echo_logprobs": True}
    empty = GenerationRequest(prompt="", max_tokens=5, **scored)
    asked = [
        ask([7, 8, 9]),
        ask([7, 8, 9], n=2, **scored),
        ask([7], **scored),
        ask([3] * 97, **scored),
        empty,
    ]
    nothing, score, one, last, empty, explicit = engine.run([*asked, ask([0], 5)])
    assert [c.finish_reason for c in nothing.completions] == ["length"] and nothing.completions[
        0
    ].text == ""
    assert nothing.prompt_logprobs is None and nothing.prompt_token_ids == (7, 8, 9)
    assert len(score.completions) == 2 and len(score.prompt_logprobs) == 3
    assert one.prompt_logprobs == (None,)
    # the last token is scored, never fed
    assert last.error is None and len(last.prompt_logprobs) == 97
    # behind the token that begins texts
    assert empty.prompt_token_ids == () and empty.prompt_logprobs == ()
    assert empty.completions[0].token_ids == explicit.completions[0].token_ids


def test_eos_and_stop_strings_end_a_completion_and_are_not_part_of_it(tiny, monkeypatch):
    request = GenerationRequest(prompt="the", max_tokens=20, ignore_eos=True)
    with Engine.from_pretrained(tiny("llama").path) as engine:
        free = engine.run([request])[0].completions[0]
        starts = [i for i in range(1, len(free.text) - 1) if "\ufffd" not in free.text[i : i + 2]]
        stops = [free.text[i : i + 2] for i in starts]
        stopped = engine.run([dataclasses.replace(request, stop=[stop]) for stop in stops])
        # other engines share it
        monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset([free.token_ids[3]]))
    with Engine.from_pretrained(tiny("llama").path) as engine:
        ended = engine.run([dataclasses.replace(request, ignore_eos=False)])[0].completions[0]
    for stop, result in zip(stops, stopped, strict=True):
        completion = result.completions[0]
        kept = len(completion.token_ids)
        assert (
            completion.finish_reason == "stop"
            and completion.text == free.text[: free.text.index(stop)]
        )
        assert (
            completion.token_ids == free.token_ids[:kept]
            and completion.logprobs == free.logprobs[:kept]
        )
    assert ended.finish_reason == "endoftext" and len(ended.logprobs) == len(ended.token_ids)
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[3])]


def test_results_are_reported_as_they_finish(engine):
    seen = {}
    progress = []
    requests = [ask([5 + i], 1 + 3 * i) for i in range(6)]
    results = engine.run(requests, on_result=seen.__setitem__, progress=progress.append)
    assert list(seen) == sorted(seen, key=lambda index: requests[index].max_tokens)
    assert [seen[index] for index in range(6)] == results
    assert progress[-1].done_requests == 6 and progress[-1].done_tokens <= progress[-1].total_tokens
    assert [p.done_tokens for p in progress] == sorted(p.done_tokens for p in progress)


@pytest.mark.parametrize("schedule, new", [("prefill-only", 1), ("zigzag", 5), ("row", 5)])
def test_the_time_left_counts_the_prompts_of_the_pass_that_runs(tiny, monkeypatch, schedule, new):
    """A pass through streamed weights may be the whole run, so what it computes is not done when it
    begins.
    """
    monkeypatch.setattr("flexgen_helm.engine.run._REPORT_EVERY_S", 0.0)
    asked = [ask([3 + i] * 9, new, ignore_eos=True) for i in range(6)]
    seen = []
    with Engine.from_pretrained(tiny("llama").path, schedule=schedule) as engine:
        engine.run(asked, progress=seen.append)
    under_way = [p for p in seen if 0 < p.done_tokens < 6 * (9 + new - 1)]
    assert len(under_way) >= 3
    for p in under_way:
        assert p.total_tokens == 6 * (9 + new - 1)
        assert (
            p.remaining_s == pytest.approx(p.elapsed_s * (p.total_tokens / p.done_tokens - 1))
            and p.remaining_s > 0
        )


def test_an_interrupted_run_keeps_what_is_finished_and_frees_its_cache(engine):
    seen = {}
    requests = [ask([5 + i], 2 + 5 * i, ignore_eos=True) for i in range(6)]
    with pytest.raises(Interrupted):
        engine.run(requests, on_result=seen.__setitem__, should_stop=lambda: len(seen) == 3)
    assert set(seen) == {0, 1, 2}
    engine.ledger.check({"weights": engine.ledger.in_use})
    full = engine.run(requests)
    assert [full[index].completions for index in seen] == [
        result.completions for result in seen.values()
    ]


def test_equal_requests_are_computed_once(engine):
    results = engine.run([ask([4, 5, 6, 7], 5)] * 9)
    assert len({result.completions for result in results}) == 1
    workload = engine.last_run["workload"]
    assert (workload["num_requests"], workload["num_unique"]) == (9, 1)
    assert workload["prompt_tokens"] == 36 and math.isclose(workload["prompt_tokens_computed"], 4)


def test_the_run_record_adds_up(engine, monkeypatch):
    requests = [ask([4] * (3 + i), i, ignore_eos=True) for i in range(5)]
    results = engine.run(requests)
    record = engine.last_run
    json.dumps(record, allow_nan=False)
    assert record["workload"]["prompt_tokens"] == sum(3 + i for i in range(5))
    assert record["workload"]["output_tokens"] == sum(range(5))
    assert math.isclose(sum(r.cost.prefill_s for r in results), record["prefill_s"])
    assert record["prefill_s"] + record["decode_s"] <= record["latency_s"]
    assert record["efficiency"] == 1.0
    assert math.isclose(record["actual_throughput"], (25 + 10) / record["latency_s"])
    # Waiting in batches that ran out of memory, which no request is charged.
    monkeypatch.setattr(TransferStats, "seconds", lambda self: {"wait_weights": 1e6})
    engine.run(requests)
    times = engine.last_run["time_s"]
    assert times["compute"] == 0 and math.isclose(
        times["wait"] + times["other"], engine.last_run["latency_s"]
    )


def test_one_rows_fault_does_not_reach_its_slot_group(tiny, monkeypatch):
    """A row that turns non-finite while decoding shares its slot group; the freed slot must not
    poison the mover.
    """
    requests = [ask([9, 10 + i, 20], 12, ignore_eos=True) for i in range(5)]
    calls = []

    def poisoned(compute, number, batches):
        (hidden,) = compute()
        if number == 0 and len(hidden) == 5:
            calls.append(None)
            if len(calls) == 4:
                hidden[1] = math.nan
        return [hidden]

    with Engine.from_pretrained(tiny("llama").path) as engine:
        before = engine.run(requests)
        replace_layers(monkeypatch, poisoned)
        after = engine.run(requests)
    (failed,) = [index for index, result in enumerate(after) if result.error]
    assert isinstance(after[failed].error, NumericalError) and "layers.0" in str(
        after[failed].error
    )
    del before[failed], after[failed]
    assert [r.completions[0].token_ids for r in after] == [
        r.completions[0].token_ids for r in before
    ]


@pytest.mark.parametrize(
    "variant, options",
    [("llama", {"precision": "4bit"}), ("llama", {"unverified": True}), ("bloom", {"weights": "dummy", "seed": 3}),
     ("bloom", {"precision": "paper-4bit", "device": "sim", "limits": MemoryLimits(gpu=1 << 24)})],
)  # fmt: skip
def test_the_fingerprint_is_known_before_the_weights_are_read(tiny, variant, options, monkeypatch):
    options = {"device": "cpu", **options}
    with Engine.from_pretrained(tiny(variant).path, **options) as engine:
        expected = engine.fingerprint
    monkeypatch.setattr(TieredWeights, "__init__", None)
    path, config = tiny(variant).path, EngineConfig(**options)
    assert fingerprint_before_loading(path, config) == expected
    is_quick = config.weights != "dummy"
    assert quick_engine_fingerprint(path, config) == (expected if is_quick else None)


def test_the_fingerprint_is_quick_only_where_it_is_certain(tiny, tmp_path, monkeypatch):
    """Elsewhere the model is opened: on a GPU, for modules of transformers, a conversion, and files
    never hashed.
    """
    path, another, config = tiny("llama").path, tiny("gpt2").path, EngineConfig(device="cpu")
    known = quick_engine_fingerprint(path, config)
    assert known is not None and quick_engine_fingerprint(another, config) not in (None, known)
    assert quick_engine_fingerprint(path, EngineConfig(device="cuda")) is None
    copy = shutil.copytree(path, tmp_path / "copy")
    assert quick_engine_fingerprint(copy, config) == known
    with monkeypatch.context() as patch:
        patch.setattr("flexgen_helm.checkpoint.fingerprint._SMALL", 0)
        assert quick_engine_fingerprint(copy, config) is None
    (copy / MANIFEST).write_text("{}")
    assert quick_engine_fingerprint(copy, config) is None
    (copy / MANIFEST).unlink()
    (copy / "generation_config.json").write_text('{"eos_token_id": 3}')  # of the tokenizer
    assert quick_engine_fingerprint(copy, config) not in (None, known)
    backend_models.saved("StableLmForCausalLM", tmp_path / "modules")
    assert quick_engine_fingerprint(tmp_path / "modules", config) is None
    assert fingerprint_before_loading(tmp_path / "modules", config) is not None


@pytest.mark.parametrize(
    "variant, precision", [("llama", "4bit"), ("mixtral", "fp16"), ("opt", "4bit")]
)
def test_a_limit_that_is_too_small_is_answered_with_one_that_is_enough(tiny, variant, precision):
    path = tiny(variant).path
    with pytest.raises(MemoryLimitError, match=r"raise --cpu-memory$") as refused:
        Engine.from_pretrained(path, precision=precision, limits=MemoryLimits(cpu=1000))
    enough = int(re.findall(r"\(([\d,]+) bytes\)", str(refused.value))[-1].replace(",", ""))
    with Engine.from_pretrained(
        path, precision=precision, limits=MemoryLimits(cpu=enough)
    ) as engine:
        length = min(511, engine.model_config.max_positions - 1)
        assert [result.error for result in engine.run([ask([5], 1), ask([5] * length, 1)])] == [
            None,
            None,
        ]
        assert engine.ledger.peak <= enough


def test_a_request_beyond_the_cache_limit_is_refused_alone(tiny):
    path = tiny("llama").path
    with Engine.from_pretrained(path) as engine:
        copies, per_token = engine.ledger.in_use, kv_bytes_per_token(engine.model_config, 4)
    with Engine.from_pretrained(path, limits=MemoryLimits(cpu=2 * copies + 4, disk=0)) as engine:
        claim = engine.ledger.claim("other", engine.ledger.free - 20 * per_token)
        small, large = engine.run([ask([5] * 5, 10), ask([5] * 50, 10)])
        engine.ledger.release(claim)
    assert small.error is None and "59 tokens" in str(large.error)


def test_without_tokenizer_files_token_ids_work(tmp_path):
    model = build_tiny(tmp_path, "opt", tokenizer=False)
    with Engine.from_pretrained(model.path) as engine:
        asked = [ask([5, 6], 4), GenerationRequest(prompt="hello"), ask([5], 1, stop=["x"])]
        ids, text, stop = engine.run(asked)
    assert len(ids.completions[0].token_ids) == 4 and ids.completions[0].text == ""
    assert "no tokenizer" in str(text.error) and "no tokenizer" in str(stop.error)
