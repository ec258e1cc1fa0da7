"""Paced schedules: what the cost model says of them against a count of every pass, and when the search takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner import scheduler_limits
from flexgen_helm.planner.plan import make_plan
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.scheduler_limits import SchedulerLimits, paced_positions
from flexgen_helm.planner.schedules import DIAGONAL, ZIGZAG
from flexgen_helm.planner.search import search
from flexgen_helm.scheduling.scheduler import Scheduler
from flexgen_helm.scheduling.sequence import Sequence, SequenceKind
from tests.helpers.planning_problems import small

MANY = 1 << 30


@dataclass
class Counted:
    """What a run did, over all passes; calls: batches, and cache blocks that decoded."""

    passes: int = 0
    calls: int = 0
    copied: int = 0
    attended: int = 0
    peak: int = 0


def counted(prompt: int, output: int, room: int, count: int, page: int = 16, most: int = MANY) -> Counted:
    """Count what the scheduler does with `count` sequences and `room` positions of cache."""
    waiting = [
        Sequence(SequenceKind.PROMPT, (), [1] * prompt, prompt, max_new_tokens=output, num_draws=1, needs_cache=True)
        for _ in range(count)
    ]
    limits = SchedulerLimits(4096, 1024, most, room, MANY, page, is_paced=page > 0)
    scheduler, total = Scheduler(waiting, limits), Counted()
    while True:
        for regroup in scheduler.make_room().regroups:
            total.copied += sum(sequence.num_computed for sequence in regroup.block.sequences)
        batches = scheduler.next_pass()
        if not batches:
            return total
        decoding = [item.sequence for batch in batches if not batch.is_prefill for item in batch.scheduled]
        total.passes += 1
        total.calls += len({sequence.block for sequence in decoding}) + len(batches)
        total.attended += sum(len(sequence.tokens) for sequence in decoding)
        total.peak = max(total.peak, scheduler.num_running)
        for sequence in [item.sequence for batch in batches for item in batch.scheduled]:
            sequence.num_computed = len(sequence.tokens)
            if sequence.num_computed == prompt + output - 1:
                scheduler.retire(sequence)
            else:
                sequence.tokens.append(2)


def predicted(prompt: int, output: int, sequences: int, count: int) -> Counted:
    """Read the same out of a prediction: with rates of 1 its seconds are counts."""
    problem = small(400, 4000, prompt=prompt, output=output, count=count)
    gpu, cpu = problem.hardware.gpu, replace(problem.hardware.cpu, memory_bytes_s=1.0, attention_bytes_s=1.0)
    config, policy = problem.config, Policy(sequences, 1, 0, 1, 0, 1, 0, 1)

    def seconds(step_s: float) -> dict[str, float]:
        hardware = replace(problem.hardware, cpu=cpu, gpu=replace(gpu, step_s=step_s))
        return predict(replace(problem, hardware=hardware), policy, DIAGONAL).seconds["decode"]

    fixed = predict(problem, policy, DIAGONAL)
    passes = round(fixed.decode_s * output / fixed.block_s)
    position_bytes = 2 * config.num_layers * config.kv_size * problem.compute_bytes
    free, costly = seconds(0.0), seconds(1e6)
    calls = (costly["products"] - free["products"]) / 1e6 / config.num_layers
    return Counted(
        passes,
        round(calls),
        round(free["growth"] / 2 / position_bytes),
        round(free["host_attention"] / position_bytes),
        sequences,
    )


@pytest.mark.parametrize("prompt, output, room, count", [(64, 128, 12_288, 640), (64, 64, 8_192, 1_024)])
def test_a_prediction_counts_what_the_scheduler_does(prompt, output, room, count):
    """Passes, calls, positions that are attended to and copied; the machine's rates are no part of it."""
    sequences = int(room / paced_positions(prompt, output))
    found, told = counted(prompt, output, room, count, most=sequences), predicted(prompt, output, sequences, count)
    print(found, told)
    assert told.passes == pytest.approx(found.passes, rel=0.03)
    assert told.attended == pytest.approx(found.attended, rel=0.03)
    assert found.copied <= told.copied <= 1.4 * found.copied  # a page before its end nothing grows any more
    assert told.calls == pytest.approx(found.calls, rel=0.1)
    assert found.peak <= sequences


def test_few_ages_are_under_way(monkeypatch):
    """Each costs an attention call a layer. The inverse: without groups each sequence has a block of its own."""
    grouped = counted(64, 128, 12_288, 300)
    monkeypatch.setattr(scheduler_limits, "PACED_AGES", MANY)
    single = counted(64, 128, 12_288, 300)
    assert grouped.calls / grouped.passes < 27 and single.calls > 2 * grouped.calls
    assert grouped.passes < 1.05 * single.passes, "the memory is filled as well"


def test_with_a_cache_on_the_disk_nothing_is_paced():
    """Files have their final size from the beginning, so the run and its prediction are zigzag's."""
    problem = small(200, 400, prompt=32, output=128, count=200)
    on_disk, in_memory = Policy(16, 1, 0, 1, 0, 0.5, 0, 1), Policy(16, 1, 0, 1, 0, 1, 0, 1)
    assert predict(problem, on_disk, DIAGONAL) == predict(problem, on_disk, ZIGZAG)
    assert predict(problem, in_memory, DIAGONAL) != predict(problem, in_memory, ZIGZAG)


def test_where_too_few_sequences_wait_nothing_is_paced():
    """By the scheduler's own rule: filling and emptying the memory would take as many passes as whole blocks."""
    few, many, policy = 40, 400, Policy(20, 1, 0, 1, 0, 1, 0, 1)
    for count in (few, many):
        problem = small(200, 400, prompt=64, output=64, count=count)
        room = int(policy.block_size * paced_positions(64, 64))
        found, whole = counted(64, 64, room, count), counted(64, 64, room, count, page=0)
        is_zigzag = predict(problem, policy, DIAGONAL) == predict(problem, policy, ZIGZAG)
        assert is_zigzag == (found.passes > 0.98 * whole.passes) == (count == few)


def test_a_cache_that_needs_the_disk_is_planned_as_it_is_run():
    """Host memory for weights alone: the schedule that was asked for has no room, zigzag has."""
    problem = small(60, 40, prompt=1_500, output=500, count=4)
    found = search(problem, (DIAGONAL,))
    assert found.schedule is ZIGZAG and found.policy.cd > 0


@pytest.mark.parametrize("count, best", [(400, DIAGONAL), (16, ZIGZAG)])
def test_the_search_takes_what_is_predicted_to_be_faster(count, best):
    """The disk has no room for caches; for few sequences, filling and emptying the memory is most of the run."""
    problem = small(40, 300, 260, prompt=16, output=400, count=count)
    alone = {schedule: search(problem, (schedule,)).prediction.tokens_per_s for schedule in (ZIGZAG, DIAGONAL)}
    print(alone)
    assert search(problem, (ZIGZAG, DIAGONAL)).schedule is best is max(alone, key=alone.__getitem__)


@pytest.mark.parametrize("endless", [False, True])
def test_a_latency_is_that_of_a_sequence_under_way(endless):
    problem = small(64, 150, prompt=16, output=64, count=600, endless=endless)
    free = search(problem, (DIAGONAL,))
    # Of the passes over all sequences it takes part in as many as it has tokens.
    one = predict(replace(problem, endless=True), free.policy, DIAGONAL)
    assert free.schedule is DIAGONAL and free.prediction.block_s == pytest.approx(one.latency_s, rel=0.2)
    limit = 0.8 * free.prediction.block_s
    bound = search(problem, (DIAGONAL,), max_latency=limit)
    assert bound.prediction.block_s <= limit * (1 + 1e-6)
    assert bound.prediction.tokens_per_s < free.prediction.tokens_per_s
    with pytest.raises(MemoryLimitError, match="within 1e-06 s"):
        search(problem, (DIAGONAL,), max_latency=1e-6)


@pytest.mark.parametrize("schedule, cache, sequences", [(DIAGONAL, 1.0, 200), (DIAGONAL, 0.5, 16), (ZIGZAG, 1.0, 16)])
def test_a_plan_says_of_how_many_sequences_its_seconds_are(schedule, cache, sequences):
    problem, policy = small(200, 400, prompt=32, output=128, count=200), Policy(16, 1, 0, 1, 0, cache, 0, 1)
    made = make_plan(problem, policy=policy, schedule=schedule)
    seconds, one = made.solution.prediction.seconds["decode"], predict(problem, policy, ZIGZAG).seconds["decode"]
    assert made.phase_sequences == sequences and made.block_sequences == 16
    # What a sequence attends to does not depend on who runs beside it.
    assert seconds["host_attention"] / sequences == pytest.approx(one["host_attention"] / 16, rel=0.01)
