"""A stopped pass over prompts goes on behind the layer whose hidden states are kept, with the same
scores.
"""

from __future__ import annotations

import random

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.engine import kept_states
from flexgen_helm.engine.executor import Executor
from flexgen_helm.engine.kept_states import KeptStates
from flexgen_helm.errors import Interrupted

MIB = 1 << 20
LIMITS = MemoryLimits(cpu=64 * MIB, disk=64 * MIB)


def asked(count=7, shared=12):
    draw = random.Random(count)
    common = [draw.randrange(3, 90) for _ in range(shared)]
    return [
        GenerationRequest(
            prompt_token_ids=[*common, *(draw.randrange(3, 90) for _ in range(draw.randrange(1, 30)))],
            max_tokens=number % 2, echo_logprobs=True, top_logprobs=2,
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.fixture
def stages(monkeypatch):
    """Stages that are computed, one for each batch."""
    monkeypatch.setattr(kept_states, "KEEP_STATES_EVERY_S", 0.0)
    monkeypatch.setattr(kept_states, "_MOST_TIME", float("inf"))
    computed, honest = [], Executor._begin

    def begin(self, item, current):
        state = honest(self, item, current)
        computed.append(item.stage)
        return state

    monkeypatch.setattr(Executor, "_begin", begin)
    return computed


def answers(results):
    return [(r.prompt_logprobs, r.prompt_top_logprobs, r.completions, r.error) for r in results]


def open_engine(model, folder, **options):
    return Engine.from_pretrained(
        model.path,
        offload_dir=folder,
        limits=LIMITS,
        batch_invariant=True,
        schedule="prefill-only",
        **options,
    )


def stopped(engine, requests, computed, stage, drawn=True):
    """Run until a batch is about to enter the stage."""
    computed.clear()
    with pytest.raises(Interrupted):
        engine.run(
            requests,
            should_stop=lambda: stage in computed,
            on_drawn=(lambda *_: None) if drawn else None,
        )


@pytest.mark.fast(4)
@pytest.mark.parametrize("variant", ["llama", "opt", "mixtral", "gemma3"])
@pytest.mark.parametrize("policy", [None, "3x2,0,50,0,50,0,40"])
def test_a_stopped_pass_goes_on_behind_a_layer(tiny, tmp_path, stages, variant, policy):
    """With shared prefixes, experts, windows, and hidden states on the disk; by another engine, in
    other batches.
    """
    model, requests = tiny(variant), asked()
    options = {} if policy is None else {"policy": policy}
    with open_engine(model, tmp_path, **options) as engine:
        stopped(engine, requests, stages, 2)
    (file,) = tmp_path.glob("hidden-*")
    with open_engine(model, tmp_path) as engine:
        stages.clear()  # of the proof
        found = engine.run(requests, on_drawn=lambda *_: None)
        assert "predicted" not in engine.last_run, "what it took is not what the plan was for"
        assert min(stages) >= 2 and not file.exists()
        assert answers(found) == answers(engine.run(requests))


def test_another_process_with_the_same_model_takes_no_states_away(
    tiny, tmp_path, stages, monkeypatch
):
    """It writes a file of the same name, and removes it, while this run goes on behind its own."""
    model, requests = tiny("llama"), asked()
    with open_engine(model, tmp_path) as engine:
        expected = answers(engine.run(requests))
        stopped(engine, requests, stages, 2)
    first_stage = KeptStates.first_stage

    def then_another_writes(self, batches):
        stage = first_stage(self, batches)
        (tmp_path / "another").write_bytes(b"x" * self.path.stat().st_size)
        (tmp_path / "another").replace(self.path)
        return stage

    monkeypatch.setattr(KeptStates, "first_stage", then_another_writes)
    with open_engine(model, tmp_path) as engine:
        stages.clear()
        found = engine.run(requests, on_drawn=lambda *_: None)
        assert min(stages) >= 2 and answers(found) == expected


@pytest.mark.parametrize(
    "change", ["cut", "damaged", "other prompts", "other weights", "nothing is kept"]
)
def test_states_of_something_else_are_not_taken(tiny, tmp_path, stages, change):
    model, requests = tiny("llama"), asked()
    with open_engine(model, tmp_path) as engine:
        stopped(engine, requests, stages, 2, drawn=change != "nothing is kept")
    files = [*tmp_path.glob("hidden-*")]
    assert len(files) == (change != "nothing is kept")
    for file in files:
        data = bytearray(file.read_bytes())
        if change == "damaged":
            data[len(data) // 3] ^= 1
        file.write_bytes(data[: len(data) // 2] if change == "cut" else data)
    other = tiny("opt") if change == "other weights" else model
    requests = asked(6) if change == "other prompts" else requests
    with open_engine(other, tmp_path) as engine:
        stages.clear()
        found = engine.run(requests, on_drawn=lambda *_: None)
        assert min(stages) == 0
        assert answers(found) == answers(engine.run(requests))


def test_a_disk_without_room_ends_the_keeping_and_not_the_run(tiny, tmp_path, stages):
    with Engine.from_pretrained(
        tiny("llama").path,
        offload_dir=tmp_path,
        limits=MemoryLimits(cpu=64 * MIB, disk=1000),
        schedule="prefill-only",
    ) as engine:
        results = engine.run(asked(), on_drawn=lambda *_: None)
    assert all(result.error is None for result in results) and not [*tmp_path.glob("hidden-*")]
