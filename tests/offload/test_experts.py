"""Experts from slower tiers: what is read is what tokens were routed to, with the same values, and nothing hangs."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.errors import OffloadError
from flexgen_helm.models.config import expert_number, expert_of, tensor_shapes
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.experts import ExpertCache, ExpertStreamer
from flexgen_helm.offload.matrices import ExpertMatrix
from flexgen_helm.offload.staging import ALIGNMENT
from flexgen_helm.offload.transfer_stats import TransferStats
from tests.helpers.offload import MIB, offloaded, with_expert_slots, workload
from tests.helpers.parity import assert_same
from tests.helpers.shares import share_of
from tests.helpers.threads import in_thread
from tests.helpers.tiny_models import VOCABULARY

WAIT_S = 20.0
STAGES, EXPERTS = ("layers.0", "layers.1", "layers.2"), 6
ALL = [f"{stage}.mlp.experts.{number}" for stage in STAGES for number in range(EXPERTS)]


class Source:
    """One expert of known bytes, as `OffloadedMatrix` has it; with delays, failures and a count of reads."""

    def __init__(self, name: str, log: Log) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.content = torch.randint(0, 256, (2, ALIGNMENT), dtype=torch.uint8, generator=generator)
        self.name, self.shape, self.num_bytes, self._log = name, (2, ALIGNMENT), 2 * ALIGNMENT, log

    def fetch(self, first: int, count: int, staging: torch.Tensor) -> torch.Tensor:
        assert (first, count) == (0, 2)
        self._log.note(self.name)
        return staging[: self.num_bytes].view(self.shape).copy_(self.content)


class Log:
    def __init__(self, seed: int = 0, slowest: float = 0.0) -> None:
        self._random, self._slowest, self._lock = random.Random(seed), slowest, threading.Lock()
        self.reads: list[str] = []
        self.fail_at: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def note(self, name: str) -> None:
        with self._lock:
            number = len(self.reads)
            self.reads.append(name)
            pause = self._random.random() * self._slowest
        assert self.gate.wait(WAIT_S)
        time.sleep(pause)
        if number == self.fail_at:
            raise OSError("the disk is gone")


def streamer(slots: int, log: Log, overlap: bool = True, **options) -> ExpertStreamer:
    stored = {name: Source(name, log) for name in ALL}
    memory = torch.zeros((slots, 2 * ALIGNMENT), dtype=torch.uint8)
    return ExpertStreamer(stored, memory, options.pop("stats", TransferStats()), overlap, **options)


def use(experts: ExpertStreamer, stage: str, numbers: list[int], again: bool = False, slow: float = 0.0) -> None:
    """One batch's use of some experts, in which every byte is compared."""
    names = [f"{stage}.mlp.experts.{number}" for number in numbers]
    experts.use(names, stage, again)
    for name in names:
        for offset in (0, ALIGNMENT):
            matrix = ExpertMatrix(name, offset, (1, ALIGNMENT), torch.uint8)
            expected = experts._stored[name].content.view(-1)[offset : offset + ALIGNMENT]
            view = experts.matrix(matrix)
            assert bool((view[0] == expected).all())
            time.sleep(slow)
            assert bool((view[0] == expected).all())  # still there when the product that reads it ends
    experts.finish()


def within(seconds: float, work):
    """The work's result; a test that would hang fails."""
    thread, results = in_thread(work)
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


routings = st.lists(
    st.lists(st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS).map(sorted), min_size=1, max_size=3),
    min_size=3,
    max_size=9,
)  # of each visit, the experts of its batches


def visits(routing: list[list[list[int]]]) -> Iterator[tuple[str, list[int], bool]]:
    for number, batches in enumerate(routing):
        for place, numbers in enumerate(batches):
            yield STAGES[number % len(STAGES)], numbers, place + 1 < len(batches)


@settings(max_examples=share_of(80, 3), deadline=None)
@given(
    routing=routings,
    slots=st.sampled_from([1, 2, 3, 5, 9, len(ALL)]),
    overlap=st.booleans(),
    guesses=st.booleans(),
    slowest=st.sampled_from([0.0, 0.0, 0.002]),
    seed=st.integers(0, 99),
)
def test_every_use_gets_the_bytes_and_no_use_reads_an_expert_twice(routing, slots, overlap, guesses, slowest, seed):
    log, stats, draw = Log(seed, slowest), TransferStats(), random.Random(seed)
    routed = Counter(f"{stage}.mlp.experts.{n}" for stage, numbers, _ in visits(routing) for n in numbers)

    def run():
        experts = streamer(slots, log, overlap, stats=stats)
        for stage, numbers, again in visits(routing):
            before = len(log.reads)
            stats.count_experts(8, len(numbers), 2 * ALIGNMENT * len(numbers))
            use(experts, stage, numbers, again, slow=slowest / 2)
            if not guesses:
                assert len(log.reads) - before <= len(numbers)
            elif not again:
                following = STAGES[(STAGES.index(stage) + 1) % len(STAGES)]
                names = [f"{following}.mlp.experts.{number}" for number in range(EXPERTS)]
                experts.guess(names, torch.tensor([draw.choice([0.0, 0.5, 0.9]) for _ in range(EXPERTS)]))
        experts.close()

    within(WAIT_S, run)
    counts = stats.experts
    assert counts.read_bytes == len(log.reads) * 2 * ALIGNMENT
    if not (guesses and overlap):
        assert Counter(log.reads) <= routed and set(log.reads) == set(routed)
        if slots == len(ALL):
            assert Counter(log.reads) == Counter(set(routed)), "with a slot for each, one read for each"
    else:
        assert counts.wasted_bytes <= 0.05 * counts.routed_bytes + 2 * ALIGNMENT


@settings(max_examples=40, deadline=None)
@given(
    routing=routings,
    slots=st.integers(1, 8),
    overlap=st.booleans(),
    fail_at=st.integers(0, 12),
    guesses=st.booleans(),
)
def test_an_error_of_a_read_surfaces_at_the_use_and_a_later_pass_goes_on(routing, slots, overlap, fail_at, guesses):
    log, stats = Log(), TransferStats()
    stats.count_experts(8, 1, 1000 * ALIGNMENT)  # so that guesses are allowed
    log.fail_at = fail_at

    def one_pass(experts):
        for stage, numbers, again in visits(routing):
            use(experts, stage, numbers, again)
            if guesses:
                experts.guess(ALL[:EXPERTS], torch.ones(EXPERTS))

    def run():
        experts = streamer(slots, log, overlap, stats=stats)
        failed = False
        try:
            one_pass(experts)
        except OSError as error:
            failed = "the disk is gone" in str(error)
        if not guesses:
            assert failed == (len(log.reads) > fail_at)
        experts.cancel()
        log.fail_at = None
        one_pass(experts)
        experts.close()

    within(WAIT_S, run)


@settings(max_examples=30, deadline=None)
@given(routing=routings, slots=st.integers(1, 8), overlap=st.booleans(), stop=st.integers(0, 15))
def test_a_pass_that_is_broken_off_anywhere_can_be_resumed(routing, slots, overlap, stop):
    log, left = Log(seed=stop, slowest=0.001), stop

    def broken_pass(experts):
        nonlocal left
        for stage, numbers, again in visits(routing):
            names = [f"{stage}.mlp.experts.{number}" for number in numbers]
            experts.use(names, stage, again)
            for name in names:
                experts.matrix(ExpertMatrix(name, 0, (1, ALIGNMENT), torch.uint8))
                left -= 1
                if left < 0:
                    raise MemoryError
            experts.finish()

    def run():
        experts = streamer(slots, log, overlap)
        try:
            broken_pass(experts)
        except MemoryError:
            experts.cancel()
        for stage, numbers, again in visits(routing):
            use(experts, stage, numbers, again)
        experts.close()

    within(WAIT_S, run)


def test_experts_load_side_by_side_with_computing_and_not_before_they_are_asked_for():
    log = Log()
    experts = streamer(4, log)
    assert not log.reads
    names = ALL[:3]
    experts.use(names, STAGES[0], False)
    deadline = time.monotonic() + 5.0
    while len(log.reads) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(log.reads) == names, "before the first was used"
    experts.close()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots, reads", [(EXPERTS, 3 * EXPERTS), (EXPERTS - 1, 4 * EXPERTS)])
def test_batches_of_one_visit_share_the_experts_of_their_layer_if_the_slots_hold_them(overlap, slots, reads):
    """Guesses of the next layer do not take the slots of the next batch. With a slot too few, one is read again."""
    log, stats = Log(), TransferStats()
    stats.count_experts(8, 1, 1000 * ALIGNMENT)  # so that guesses are allowed
    experts = streamer(slots, log, overlap, stats=stats)
    for place, stage in enumerate(STAGES):
        use(experts, stage, [*range(EXPERTS)], again=True)
        experts.guess(ALL[(place + 1) % 3 * EXPERTS :][:EXPERTS], torch.ones(EXPERTS))
        time.sleep(0.01)  # for a guess that must not be read
        use(experts, stage, [*range(EXPERTS)], again=False)
        experts.cancel()  # nor the next layer's behind the last batch
    assert len(log.reads) == reads if slots == EXPERTS else 3 * EXPERTS < len(log.reads) <= reads
    experts.close()


def test_a_guess_that_fails_ends_no_loader():
    class Scores:
        def tolist(self):
            raise MemoryError

    experts = streamer(2, Log())
    for _ in range(20):  # more than there are loaders
        experts.guess(ALL[:EXPERTS], Scores())
        time.sleep(0.002)
    within(WAIT_S, lambda: use(experts, STAGES[0], [0], False))
    experts.close()


def test_an_expert_that_was_not_asked_for_is_refused():
    experts = streamer(2, Log())
    experts.use(ALL[:2], STAGES[0], False)
    with pytest.raises(AssertionError, match="was not asked for"):
        experts.matrix(ExpertMatrix(ALL[2], 0, (1, ALIGNMENT), torch.uint8))
    experts.matrix(ExpertMatrix(ALL[1], 0, (1, ALIGNMENT), torch.uint8))
    with pytest.raises(AssertionError, match="another order"):
        experts.matrix(ExpertMatrix(ALL[0], 0, (1, ALIGNMENT), torch.uint8))
    experts.close()


def settled(log: Log, count: int, seconds: float = 5.0) -> list[str]:
    """The reads, once there are so many; a little longer, for one too many."""
    deadline = time.monotonic() + seconds
    while len(log.reads) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    return log.reads


def test_likely_experts_are_read_while_nothing_else_is():
    """The likeliest first, in half of the slots; and not where other weights are loaded, or without overlap."""
    scores = torch.tensor([0.0, 0.2, 0.9, 0.0, 0.5, 0.1])
    expected = [f"{STAGES[1]}.mlp.experts.{number}" for number in (2, 4)]
    for overlap, idle, reads in ((True, True, expected), (True, False, []), (False, True, [])):
        log, stats = Log(), TransferStats()
        stats.count_experts(8, 1, 100 * 2 * ALIGNMENT)
        experts = streamer(5, log, overlap, stats=stats, is_idle=lambda idle=idle: idle)
        experts.guess(ALL[EXPERTS : 2 * EXPERTS], scores)
        assert settled(log, len(reads)) == reads
        if reads:
            use(experts, STAGES[1], [2, 5])
            assert log.reads[2:] == [f"{STAGES[1]}.mlp.experts.5"]
            assert stats.experts.wasted_bytes == 0, "expert 4 may still be used"
            use(experts, STAGES[0], [0, 1, 2, 3, 4, 5])
            use(experts, STAGES[2], [0, 1, 2, 3, 4, 5])
            assert stats.experts.wasted_bytes == 2 * ALIGNMENT
        experts.close()


@pytest.mark.parametrize("routed, allowed", [(19, 0), (20, 1), (45, 2)])
def test_wrong_guesses_cost_at_most_a_twentieth(routed, allowed):
    log, stats = Log(), TransferStats()
    stats.count_experts(8, routed, routed * 2 * ALIGNMENT)
    experts = streamer(16, log, stats=stats)
    experts.guess(ALL[:EXPERTS], torch.ones(EXPERTS))
    assert len(settled(log, allowed)) == allowed
    experts.close()


def test_a_hot_expert_outlives_a_cycle_of_others():
    cache: ExpertCache[str] = ExpertCache(3)
    for key in ("hot", "a", "hot", "b", "hot", "c", "hot", "d"):
        cache.note_use(key)
        if key not in cache:
            if not cache.has_free_slot:
                cache.drop(cache.victim(()))
            cache.put(key)
    assert "hot" in cache and "a" in cache and "d" in cache, "of equals the newest is dropped"
    assert cache.victim({"hot", "a", "d"}) is None
    assert cache.victim((), prefers=lambda key: key != "hot") == "hot"


def test_old_uses_are_forgotten():
    cache: ExpertCache[str] = ExpertCache(2)
    for _ in range(50):
        cache.note_use("before")
    for _ in range(50):
        cache.note_use("now")
    assert cache.uses("now") > 2 * cache.uses("before")


# In an engine.


@pytest.fixture
def read_of_experts(monkeypatch) -> Counter[str]:
    """Expert -> how often it is read."""
    reads: Counter[str] = Counter()
    honest = ExpertStreamer._fill

    def fill(self, load):
        reads[load.expert] += 1
        honest(self, load)

    monkeypatch.setattr(ExpertStreamer, "_fill", fill)
    return reads


def routing_of(model, tokens: list[list[int]], prompt: int) -> list[list[set[int]]]:
    """The experts that the reference's routers select: pass -> layer -> numbers, over all sequences together."""
    gates: list[list[torch.Tensor]] = []
    per_token = model.reference.config.num_experts_per_tok
    layers = [layer for layer in model.reference.model.layers if hasattr(layer.mlp, "gate")]
    inputs: list[torch.Tensor] = []
    for ids in tokens:
        inputs.clear()
        hooks = [layer.mlp.gate.register_forward_pre_hook(lambda _, x: inputs.append(x[0])) for layer in layers]
        with torch.no_grad():
            model.reference(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        gates.append(
            [
                (x.reshape(len(ids), -1) @ layer.mlp.gate.weight.T).topk(per_token).indices
                for x, layer in zip(inputs, layers, strict=True)
            ]
        )
    steps = [slice(0, prompt), *(slice(prompt + step, prompt + step + 1) for step in range(len(tokens[0]) - prompt))]
    return [
        [set(torch.cat([own[layer][step] for own in gates]).flatten().tolist()) for layer in range(len(layers))]
        for step in steps
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_exactly_the_experts_are_read_that_tokens_are_routed_to(tiny, tmp_path, read_of_experts, variant, overlap):
    """Against the routers of `transformers`. With one slot every use reads its experts, with all slots the first."""
    model, prompt, new = tiny(variant), 7, 6
    asked = [
        GenerationRequest(
            prompt_token_ids=[2 + (7 * i + 3 * j) % (VOCABULARY - 2) for j in range(prompt)], max_tokens=new,
            ignore_eos=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for slots in (1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            with_expert_slots(patch, slots)
            patch.setattr("flexgen_helm.offload.experts.GUESSED_WASTE_SHARE", 0.0)
            options = dict(schedule="zigzag", overlap=overlap)
            with offloaded(tiny, variant, tmp_path, "2x1,0,0,0,100,0,100", **options) as engine:
                one = next(iter(engine._weights._experts.values())).num_bytes
                read_of_experts.clear()
                results = engine.run(asked)
                record = engine.last_run["experts"]
                names = {expert_of(name) for name in tensor_shapes(engine.config) if expert_of(name) is not None}
        tokens = [[*a.prompt_token_ids, *r.completions[0].token_ids[:-1]] for a, r in zip(asked, results, strict=True)]
        routed = routing_of(model, tokens, prompt)
        stages = sorted({name.partition(".mlp")[0] for name in names})
        expected: Counter[str] = Counter()
        for layers in routed:
            for stage, numbers in zip(stages, layers, strict=True):
                expected.update(f"{stage}.mlp.experts.{number}" for number in numbers)
        assert record["routed_bytes"] == one * expected.total()
        assert record["used"] == pytest.approx(expected.total() / (len(routed) * len(stages)))
        assert read_of_experts == (expected if slots == 1 else Counter(set(expected)))
        assert record["read_bytes"] == one * read_of_experts.total() and not record["wasted_bytes"]
        assert expected.total() < len(routed) * len(names), "or nothing was left out"


@settings(max_examples=share_of(12, 3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    variant=st.sampled_from(["mixtral", "qwen3-moe", "qwen3-moe-raw-weights"]),
    precision=st.sampled_from(["fp16", "4bit"]),
    weights=st.sampled_from([(0.0, 0.0), (0.3, 0.3), (0.0, 0.5), (0.5, 0.0)]),
    block=st.sampled_from([(3, 2), (6, 1), (1, 4)]),
    schedule=st.sampled_from(["zigzag", "row"]),
    device=st.sampled_from(["cpu", "sim"]),
    slots=st.sampled_from([1, 2, 3, 7, 100]),
    overlap=st.booleans(),
)
def test_values_do_not_depend_on_where_experts_are(
    tiny, resident, tmp_path, variant, precision, weights, block, schedule, device, slots, overlap
):
    options = dict(schedule=schedule, device=device, overlap=overlap, precision=precision)
    with pytest.MonkeyPatch.context() as patch:
        with_expert_slots(patch, slots)
        with offloaded(tiny, variant, tmp_path, Policy(*block, *weights, 0, 1, 0, 1), **options) as engine:
            results = engine.run(workload(1))
            for ledger in engine._tiers.ledgers.values():
                ledger.check()
    assert_same(results, resident(variant, precision))


@pytest.fixture(scope="module")
def resident(tiny):
    """resident(variant, precision) -> what the engine answers in memory."""
    known = {}

    def get(variant, precision):
        if (variant, precision) not in known:
            with Engine.from_pretrained(tiny(variant).path, precision=precision) as engine:
                known[variant, precision] = engine.run(workload(1))
        return known[variant, precision]

    return get


@pytest.mark.parametrize("precision", ["fp16", "4bit"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_file_of_an_expert_that_cannot_be_read_ends_the_run_and_not_the_engine(
    tiny, tmp_path, monkeypatch, overlap, precision
):
    with_expert_slots(monkeypatch, 2)
    options = dict(schedule="zigzag", overlap=overlap, precision=precision)
    with offloaded(tiny, "mixtral", tmp_path, "3x2,0,0,0,100,0,100", **options) as engine:
        expected = engine.run(workload(1))
        honest, left = DirectFile.read, [20]

        def read(self, offset, buffer):
            left[0] -= 1
            if not left[0]:
                raise OffloadError("the file cannot be read")
            honest(self, offset, buffer)

        with monkeypatch.context() as patch, pytest.raises(OffloadError, match="cannot be read"):
            patch.setattr(DirectFile, "read", read)
            engine.run(workload(1))
        assert_same(engine.run(workload(1)), expected)


def test_an_expert_is_placed_whole_and_after_what_every_token_needs(tiny, tmp_path):
    with offloaded(tiny, "qwen3-moe", tmp_path, "2x1,30,40,0,100,0,100", device="sim") as engine:
        placed = engine.placement.weights
    tiers = {name: {placed[other] for other in placed if expert_of(other) == name} for name in map(expert_of, placed)}
    assert all(len(own) == 1 for expert, own in tiers.items() if expert is not None)
    of_experts = {tier for expert, own in tiers.items() if expert is not None for tier in own}
    assert of_experts == {"cpu", "disk"} and tiers[None] == {"gpu", "cpu"}, "nothing that all need is behind an expert"
    assert {expert_number(expert) for expert in tiers if expert is not None} == set(range(8))


def test_the_limit_of_a_tier_holds_with_experts(tiny, tmp_path):
    limits = MemoryLimits(cpu=5 * MIB, disk=256 * MIB)
    with offloaded(tiny, "qwen3-moe", tmp_path, "2x1,0,0,0,100,0,100", limits=limits) as engine:
        engine.run(workload(1))
        assert 0 < engine.last_run["peak_bytes"]["cpu"] <= 5 * MIB
