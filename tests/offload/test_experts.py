"""Experts from slower tiers: what is read is what tokens were routed to, with the same values, and
nothing hangs.
"""

import gc
import random
import time
import zlib
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.engine.executor import Executor
from flexgen_helm.errors import Interrupted, OffloadError
from flexgen_helm.models import routing
from flexgen_helm.models.config import expert_of, tensor_shapes
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.experts import ExpertStreamer
from tests.helpers.backend_models import off, saved
from tests.helpers.offload import (
    MIB,
    claims,
    offloaded,
    tiers_of,
    with_expert_slots,
    within,
    workload,
)
from tests.helpers.parity import TOLERANCE, assert_same
from tests.helpers.shares import share, share_of
from tests.helpers.tiny_models import VOCABULARY

SIZE = 64
STAGES, EXPERTS = ("layers.0", "layers.1", "layers.2"), 6
ALL = [f"{stage}.mlp.experts.{number}" for stage in STAGES for number in range(EXPERTS)]


class Disk:
    """What experts are read from: each has known bytes; with delays, failures and a record of
    reads.
    """

    def __init__(self, seed=0, slowest=0.0):
        self.random, self.slowest = random.Random(seed), slowest
        self.reads = []
        self.fail_at = None


class Source:
    """One expert of the disk, as `Expert` has it: two matrices, "a" and "b"."""

    num_bytes = 2 * SIZE

    def __init__(self, name, disk):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.content = torch.randint(0, 256, (2, SIZE), dtype=torch.uint8, generator=generator)
        self.name, self.disk = name, disk

    def fetch(self, slot):
        number = len(self.disk.reads)
        self.disk.reads.append(self.name)
        time.sleep(self.disk.random.random() * self.disk.slowest)
        if number == self.disk.fail_at:
            raise OSError("the disk is gone")
        return dict(zip("ab", slot.view(2, SIZE).copy_(self.content)))


@pytest.fixture
def streamer(tmp_path):
    """streamer(slots, disk, overlap) -> experts."""

    def make(slots, disk, overlap=True):
        memory = torch.zeros((slots, 2 * SIZE), dtype=torch.uint8)
        make.tiers = tiers_of(tmp_path, overlap)
        return ExpertStreamer({name: Source(name, disk) for name in ALL}, memory, make.tiers)

    return make


def names_of(stage, numbers):
    return [f"{stage}.mlp.experts.{number}" for number in numbers]


def use(experts, stage, numbers, expected=(), slow=0.0):
    """One use of some experts, in which every byte is compared."""
    experts.use(names_of(stage, numbers), expected)
    for expert in names_of(stage, numbers):
        for name, content in zip("ab", experts._experts[expert].content):
            for pause in (slow, 0.0):  # still there when the product that reads it ends
                assert torch.equal(experts.matrix(expert, name), content)
                time.sleep(pause)
    experts.finish()


routings = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS).map(sorted), max_size=12
)


def visits(routing):
    """Stage, experts used, and all of the next stage."""
    for number, used in enumerate(routing):
        stage, following = (STAGES[(number + more) % len(STAGES)] for more in (0, 1))
        yield stage, used, names_of(following, range(EXPERTS))


drawn = settings(max_examples=share_of(80, 3))


@drawn
@given(
    routing=routings, slots=st.sampled_from([1, 2, 3, 5, 9, len(ALL)]),
    kind=st.sampled_from(["", "overlap", "ahead"]), slowest=st.sampled_from([0.0, 0.0, 0.002]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_use_gets_the_bytes_and_no_use_reads_an_expert_twice(
    streamer, routing, slots, kind, slowest, seed
):
    disk = Disk(seed, slowest)
    experts = streamer(slots, disk, bool(kind))

    def run():
        for stage, numbers, expected in visits(routing):
            before = len(disk.reads)
            use(experts, stage, numbers, expected if kind == "ahead" else (), slow=slowest / 2)
            if kind != "ahead":
                assert len(disk.reads) - before <= len(numbers)
        experts.cancel()

    within(run)
    counts = streamer.tiers.stats.experts
    assert counts.read_bytes == len(disk.reads) * 2 * SIZE
    routed = Counter(
        name for stage, numbers, _ in visits(routing) for name in names_of(stage, numbers)
    )
    assert set(routed) <= set(disk.reads)
    if kind == "ahead":  # what is read, but not used, is counted once it is dropped
        unused = sum((Counter(disk.reads) - routed).values())
        assert counts.wasted_bytes <= unused * 2 * SIZE
    else:
        assert Counter(disk.reads) <= routed and not counts.wasted_bytes
        assert slots < len(ALL) or len(disk.reads) == len(routed), (
            "with a slot for each, one read for each"
        )


@drawn
@given(
    routing=routings, slots=st.integers(1, 8), kind=st.sampled_from(["", "overlap", "ahead"]),
    fails=st.sampled_from(["read", "product"]), at=st.integers(0, 15),
)  # fmt: skip
def test_a_pass_that_breaks_off_anywhere_can_be_resumed(streamer, routing, slots, kind, fails, at):
    """An error of a read surfaces at the use; computing fails where memory runs out."""
    disk = Disk(at, 0.001)
    disk.fail_at = at if fails == "read" else None

    def one_pass(experts, uses_left):
        for stage, numbers, expected in visits(routing):
            experts.use(names_of(stage, numbers), expected if kind == "ahead" else ())
            for name in names_of(stage, numbers):
                experts.matrix(name, "a")
                uses_left -= 1
                if uses_left < 0:
                    raise MemoryError
            experts.finish()

    def run():
        experts, failed = streamer(slots, disk, bool(kind)), None
        try:
            one_pass(experts, at if fails == "product" else 1 << 30)
        except (OSError, MemoryError) as error:
            failed = error
        if fails == "read" and kind != "ahead":
            assert (failed is not None) == (len(disk.reads) > at)
        experts.cancel()
        disk.fail_at = None
        for stage, numbers, _ in visits(routing):
            use(experts, stage, numbers)
        experts.cancel()

    within(run)


def settled(disk, count):
    """The reads, once there are so many; a little longer, for one too many."""
    deadline = time.monotonic() + 5.0
    while len(disk.reads) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    return disk.reads


def test_reads_go_on_with_the_next_layer_while_this_one_computes(streamer):
    """In the order of the files, as slots become free; nothing that is still wanted leaves its
    slot.
    """
    disk = Disk()
    experts = streamer(4, disk)
    experts.use(names_of(STAGES[0], [1, 2, 5]), names_of(STAGES[1], range(EXPERTS)))
    assert settled(disk, 4) == [*names_of(STAGES[0], [1, 2, 5]), *names_of(STAGES[1], [0])]
    experts.matrix(*names_of(STAGES[0], [2]), "a")  # 1 is given up
    assert settled(disk, 5)[4:] == names_of(STAGES[1], [1])
    experts.finish()
    assert settled(disk, 7)[5:] == names_of(STAGES[1], [2, 3])
    use(experts, STAGES[1], range(4))
    assert len(disk.reads) == 7 and not streamer.tiers.stats.experts.wasted_bytes
    experts.cancel()


def test_what_was_expected_in_vain_makes_room_and_is_counted(streamer):
    disk = Disk()
    experts = streamer(3, disk)
    use(experts, STAGES[0], [0], names_of(STAGES[1], range(EXPERTS)))
    settled(disk, 4)
    use(experts, STAGES[2], range(EXPERTS))
    assert (
        streamer.tiers.stats.experts.wasted_bytes == (len(disk.reads) - 1 - EXPERTS) * 2 * SIZE > 0
    )
    experts.cancel()


# In an engine.


@pytest.fixture
def read_of_experts(monkeypatch):
    """Expert -> how often it is read."""
    reads = Counter()
    honest = ExpertStreamer._load

    def load(self, expert, slot):
        reads[expert] += 1
        return honest(self, expert, slot)

    monkeypatch.setattr(ExpertStreamer, "_load", load)
    return reads


def routing_of(model, tokens, prompt):
    """The experts that the reference's routers select: pass -> layer -> numbers, over all sequences
    together.
    """
    count, chosen = model.reference.config.num_experts_per_tok, []
    for ids in tokens:
        with torch.no_grad():
            logits = model.reference(torch.tensor([ids]), output_router_logits=True).router_logits
        chosen.append([layer.topk(count).indices for layer in logits])
    steps = [slice(0, prompt), *(slice(step, step + 1) for step in range(prompt, len(tokens[0])))]
    return [
        [{*torch.cat([x[step] for x in layer]).flatten().tolist()} for layer in zip(*chosen)]
        for step in steps
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_exactly_the_experts_are_read_that_tokens_are_routed_to(
    tiny, tmp_path, read_of_experts, variant, overlap
):
    """Against the routers of `transformers`. With one slot every use reads its experts, with all
    slots the first.
    """
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
            # nothing is expected
            patch.setattr("flexgen_helm.offload.weights.ALL_EXPERTS_FROM", 2.0)
            options = dict(schedule="zigzag", overlap=overlap)
            with offloaded(tiny, variant, tmp_path, "2x1,0,0,0,100,0,100", **options) as engine:
                one = next(iter(engine._weights._experts.values())).num_bytes
                read_of_experts.clear()
                results = engine.run(asked)
                record = engine.last_run["experts"]
                names = {
                    expert_of(name)
                    for name in tensor_shapes(engine.model_config)
                    if expert_of(name) is not None
                }
        tokens = [
            [*a.prompt_token_ids, *r.completions[0].token_ids[:-1]]
            for a, r in zip(asked, results, strict=True)
        ]
        routed = routing_of(model, tokens, prompt)
        stages = sorted({name.partition(".mlp")[0] for name in names})
        expected = Counter()
        for layers in routed:
            for stage, numbers in zip(stages, layers, strict=True):
                expected.update(f"{stage}.mlp.experts.{number}" for number in numbers)
        assert record["routed_bytes"] == one * expected.total()
        assert record["used"] == pytest.approx(expected.total() / (len(routed) * len(stages)))
        assert read_of_experts == (expected if slots == 1 else Counter(set(expected)))
        assert record["read_bytes"] == one * read_of_experts.total() and not record["wasted_bytes"]
        assert expected.total() < len(routed) * len(names), "or nothing was left out"


MIXTURES = (
    "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM", "Llama4ForCausalLM", "GraniteMoeHybridForCausalLM",
    "Qwen3NextForCausalLM", "JambaForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("name", share(MIXTURES, 3))
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_pass_reads_each_expert_once_for_all_of_its_batches(
    name, device, tmp_path, read_of_experts, monkeypatch
):
    """By equations and by modules, also with states and shared prefixes; the values are those of
    `transformers`.
    """
    model, passes, together, kept = saved(name, tmp_path / "model"), [], [], []
    honest_run, honest_steps, honest_experts = (
        Executor.run,
        Executor._steps,
        routing.through_experts,
    )

    def run(self, *arguments):
        read_of_experts.clear()
        honest_run(self, *arguments)
        passes.append(max(read_of_experts.values(), default=0))

    def steps(self, items):
        found = honest_steps(self, items)
        together.append(max(map(len, found)))
        return found

    def through_experts(batches, announce):
        shapes = Counter(tuple(batch.x.shape) for batch in batches)
        if len(batches) > 2 and min(shapes)[0] > 2:  # of prompts
            gc.collect()
            states = Counter({
                found.untyped_storage().data_ptr(): found.shape[-2:] for found in gc.get_objects()
                if type(found) is torch.Tensor and 2 <= found.dim() <= 3 and id(found) not in before
            }.values())  # fmt: skip
            kept.append(max(states[shape] / count for shape, count in shapes.items()))
        return honest_experts(batches, announce)

    monkeypatch.setattr(routing, "through_experts", through_experts)
    monkeypatch.setattr(Executor, "run", run)
    monkeypatch.setattr(Executor, "_steps", steps)
    with_expert_slots(monkeypatch, 2)
    before = {id(found) for found in gc.get_objects() if type(found) is torch.Tensor}
    asked = [
        GenerationRequest(prompt_token_ids=[*[7, 9, 11, 7, 5, 3, 8][: 7 * (i % 2)], *range(3 + i, 6 + 3 * i)],
                          max_tokens=4, echo_logprobs=True, ignore_eos=True)
        for i in range(9)
    ]  # fmt: skip
    options = dict(
        device=device,
        limits=MemoryLimits(gpu=64 * MIB, cpu=64 * MIB),
        offload_dir=tmp_path / "tiers",
    )
    with Engine.from_pretrained(
        tmp_path / "model",
        unverified=True,
        policy="2x5,0,0,0,100,0,50",
        schedule="zigzag",
        **options,
    ) as engine:
        results, copies = engine.run(asked), engine.model_config.waiting_copies
        claims(engine)
    assert max(off(model, result) for result in results) < TOLERANCE
    assert set(passes) <= {0, 1} and max(passes) == 1, passes
    assert max(together) >= 3, "or nothing was shared"
    assert kept and max(kept) <= copies - 1, "and the sum of their results"


def test_short_batches_wait_beside_the_longest_one_and_an_interrupt_leaves_nothing_claimed(
    tiny, tmp_path, monkeypatch
):
    """The longest is workspace, but for the half that rests, and another one leaves its rest only
    in the layer.
    """
    asked = [
        GenerationRequest(prompt_token_ids=[5] * count, max_tokens=1) for count in (5, 20, 12, 8)
    ]
    parts, honest, begin, stops = [], Executor._layer_batches, Executor._begin, []
    steps = Executor._steps

    def batches(self, layer, left, current):
        self.expert_tokens = 20 / 2 + 5 + 8 + 12 + 12 / 2
        parts.append(0)
        for batch in honest(self, layer, left, current):
            parts[-1] += 1
            yield batch

    def begin_or_stop(self, item, current):
        if stops and parts and parts[-1] == 2:
            raise Interrupted("now")
        return begin(self, item, current)

    # the longest comes last
    monkeypatch.setattr(Executor, "_steps", lambda *of: [step[::-1] for step in steps(*of)])
    monkeypatch.setattr(Executor, "_layer_batches", batches)
    monkeypatch.setattr(Executor, "_begin", begin_or_stop)
    with offloaded(tiny, "mixtral", tmp_path, "1x4,0,0,0,100,0,100", schedule="zigzag") as engine:
        parts.clear()
        engine.run(asked)
        assert parts == [4] * engine.model_config.num_layers
        before = claims(engine)
        parts.clear()
        stops.append(True)
        with pytest.raises(Interrupted):
            engine.run(asked)
        assert parts == [2]
        assert claims(engine) == before


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
