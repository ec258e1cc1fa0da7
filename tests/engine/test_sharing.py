"""Shared prefixes: the answers of requests that are computed alone, for fewer tokens, on every
path.
"""

import os
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.engine import loop_attention
from flexgen_helm.models import attention
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.quant.precisions import PRECISIONS, Precision
from flexgen_helm.scheduling import prefix_tree
from tests.helpers.faults import replaced
from tests.helpers.offload import DECODING_SCHEDULES, MIB, offloaded, policies
from tests.helpers.packed_caches import FORMATS, LARGEST, MEAN
from tests.helpers.parity import assert_equals_reference, assert_same
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import VARIANTS, VOCABULARY, kv_bytes_per_token


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    """However tiny the models are, that one token is saved is worth it."""
    monkeypatch.setattr(prefix_tree, "_SEGMENT_S", 0.0)
    monkeypatch.setattr(prefix_tree, "_SEGMENT_FLOPS", 0.0)


def alone(monkeypatch):
    """The engine as if nothing were worth sharing."""
    monkeypatch.setattr(prefix_tree, "_SEGMENT_S", 1e9)


def tree(seed=0, count=12):
    """Prompts that share beginnings at several depths; one is a beginning of the rest, two are
    equal.
    """
    draw = random.Random(seed)

    def some(longest):
        return [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, longest))]

    first = some(12)
    made = [first, [*first, 5], [*first, 5]]
    while len(made) < count:
        stem = draw.choice(made)
        made.append([*stem[: draw.randint(0, len(stem))], *some(9)][:50])
    return made


def requests_of(prompts, seed=0):
    draw = random.Random(seed)
    return [
        GenerationRequest(
            prompt_token_ids=prompt, max_tokens=draw.choice([0, 0, 1, 2, 7]), echo_logprobs=draw.random() < 0.5,
            n=draw.choice([1, 1, 3]), temperature=draw.choice([0.0, 0.9]), seed=i, ignore_eos=draw.random() < 0.7,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.mark.fast(6)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_prefixes_equal_the_reference(tiny, variant):
    model = tiny(variant)
    requests = [
        GenerationRequest(
            prompt_token_ids=prompt, max_tokens=3, echo_logprobs=True, ignore_eos=True
        )
        for prompt in tree()
    ]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
        computed = engine.last_run["workload"]["prompt_tokens_computed"]
    assert computed < 0.8 * sum(len(prompt) for prompt in tree())
    for request, result in zip(requests, results):
        assert_equals_reference(model, request.prompt_token_ids, request, result)


PLACEMENTS = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(DECODING_SCHEDULES),
        "device": st.sampled_from(["cpu", "sim"]),
        "overlap": st.booleans(),
        "cpu_attention": st.booleans(),
        "limits": st.sampled_from([4, 8, 64]).map(
            lambda mib: MemoryLimits(gpu=mib * MIB, cpu=64 * MIB, disk=256 * MIB)
        ),
    }
)
variants = st.sampled_from(["llama", "llama-untied-biases", "opt", "gemma2", "bloom", "mixtral"])


def compare_with_alone(tiny, folder, variant, policy, requests, **options):
    """Compare a run on tiers with one in memory in which nothing is shared; return both runs'
    computed tokens.
    """
    with offloaded(tiny, variant, folder, policy, **options) as engine:
        found, computed = (
            engine.run(requests),
            [engine.last_run["workload"]["prompt_tokens_computed"]],
        )
    precision = options.get("precision", "fp16")
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        with Engine.from_pretrained(
            tiny(variant).path, precision=precision, offload_dir=folder
        ) as engine:
            expected = engine.run(requests)
            computed.append(engine.last_run["workload"]["prompt_tokens_computed"])
    if precision == "fp16":
        assert_same(found, expected)
    else:  # a key of a prefix that falls to the other side is seen by all prompts behind it
        assert_near(found, expected, mean=5 * MEAN, borders=1)
    return computed


@settings(max_examples=share_of(12, 2))
@given(policy=policies(), variant=variants, options=PLACEMENTS, seed=st.integers(0, 5))
# A slot is moved with a prompt whose batch has not passed the head; a prefix without a head, then
# batches with one.
@example(Policy(2, 3, 0, 1, 0, 1, 0, 1), "opt", {"schedule": "row", "device": "cpu"}, 3)
@example(Policy(5, 3, 0, 1, 0, 1, 0, 1), "opt", {"schedule": "zigzag", "device": "cpu"}, 3)
@example(Policy(1, 1, 0, 0, 0, 0, 0, 0), "llama-untied-biases", {"schedule": "row"}, 4)
@example(Policy(1, 1, 0, 0, 0, 0, 0, 0), "llama-untied-biases", {"schedule": "zigzag"}, 4)
def test_any_placement_with_shared_prefixes(tiny, tmp_path, policy, variant, options, seed):
    compare_with_alone(tiny, tmp_path, variant, policy, requests_of(tree(seed), seed), **options)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "prefill-only"])
def test_scores_of_choices_share_their_question(tiny, tmp_path, monkeypatch, schedule):
    """What is computed is the plan's: a question once, and each branch its last shared token
    again.
    """
    draw = random.Random(3)
    question = [draw.randrange(2, VOCABULARY) for _ in range(30)]
    requests = [
        GenerationRequest(prompt_token_ids=[*question, *choice], max_tokens=0, echo_logprobs=True)
        for choice in ([7, 8, 9], [7, 8, 4], [11], [12, 13])
    ]
    policy = Policy(2, 2, 0, 0, 0, 1, 0, 1)
    with offloaded(tiny, "llama", tmp_path, policy, schedule=schedule) as engine:
        results = engine.run(requests)
        computed = engine.last_run["workload"]["prompt_tokens_computed"]
        costs = [result.cost for result in results]
    # [question less its last] 29, [last, 7] 2 for two of them, then [8, …]: 8 9 and 8 4 feed one
    # each (their last token predicts nothing), last 11 feeds 1, last 12 13 feeds 2.
    assert computed == pytest.approx(29 + 2 + 1 + 1 + 1 + 2)
    assert sum(cost.flops for cost in costs) == pytest.approx(engine.last_run["flops"])
    alone(monkeypatch)
    with Engine.from_pretrained(tiny("llama").path) as engine:
        assert_same(results, engine.run(requests))
        assert engine.last_run["workload"]["prompt_tokens_computed"] == sum(
            len(request.prompt_token_ids) - 1 for request in requests
        )


def scoring(count=8):
    draw = random.Random(8)
    stem = [draw.randrange(2, VOCABULARY) for _ in range(40)]
    tails = [[10 + i, *(draw.randrange(2, VOCABULARY) for _ in range(i % 4))] for i in range(count)]
    whole = [
        [*stem[:25], 9, *tail] if i % 3 == 0 else [*stem, *tail] for i, tail in enumerate(tails)
    ]
    return [
        GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in whole
    ]


# ---- packed caches: prefixes end where a group of tokens does ----

PACKED = {name: fmt for name, fmt in FORMATS.items() if not fmt.is_sparse}


@pytest.fixture
def packed(monkeypatch):
    for name, fmt in FORMATS.items():
        monkeypatch.setitem(PRECISIONS, name, Precision(name, cache=fmt))


def long_tree(seed=0, count=10):
    """Prompts of up to 85 tokens that share beginnings of all lengths."""
    draw = random.Random(seed)
    made = [[draw.randrange(2, VOCABULARY) for _ in range(60)]]
    while len(made) < count:
        stem = draw.choice(made)
        tail = [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, 25))]
        made.append([*stem[: draw.randint(0, len(stem))], *tail][:85])
    return made


def assert_near(found, expected, mean=MEAN, borders=0):
    """As far as a value between two codes allows, which may fall to either side
    (`helpers/packed_caches.py`).

    mean: of the differences, less than.
    borders: completions that may part where a draw falls on the border between two neighbouring
        tokens.
    """
    apart = []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None and theirs.error is None
        apart += [
            abs(x - y)
            for x, y in zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or ())
            if x is not None
        ]
        for one, two in zip(ours.completions, theirs.completions, strict=True):
            same = len(os.path.commonprefix([one.token_ids, two.token_ids]))
            if one.token_ids != two.token_ids:
                borders -= 1
                assert borders >= 0 and abs(one.token_ids[same] - two.token_ids[same]) == 1, (
                    one,
                    two,
                )
            apart += [
                abs(x - y) for x, y in zip(one.logprobs[:same], two.logprobs[:same], strict=True)
            ]
    assert sum(apart) / len(apart) < mean and max(apart) < LARGEST, (
        sum(apart) / len(apart),
        max(apart),
    )


@pytest.mark.slow
@settings(max_examples=10)
@given(
    policy=policies(),
    variant=variants,
    options=PLACEMENTS,
    name=st.sampled_from(list(PACKED)),
    seed=st.integers(0, 5),
)
def test_packed_prefixes_are_seen_as_own_tokens_are(
    tiny, tmp_path, packed, policy, variant, options, name, seed
):
    requests = requests_of(long_tree(seed), seed)
    options = {
        **options,
        "precision": name,
        "limits": MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB),
    }
    shared, computed = compare_with_alone(tiny, tmp_path, variant, policy, requests, **options)
    # whose prompts have no whole group in common
    assert shared < computed or (name, seed) == ("paper", 1)


@pytest.mark.parametrize("name", ["fp16", "channels"])
@pytest.mark.parametrize("cache", [(1, 0), (0, 1), (0, 0)])
def test_scoring_keeps_one_layer_of_its_prefixes(tiny, tmp_path, monkeypatch, packed, name, cache):
    """By one name for all layers; where memory runs out, what was brought of a layer is not read as
    the next one.
    """
    taken, honest = [], Ledger.claim

    def claim(self, kind, num_bytes, *, ahead=False):
        taken.append(num_bytes if kind == "cache" else 0)
        return honest(self, kind, num_bytes, ahead=ahead)

    monkeypatch.setattr(Ledger, "claim", claim)
    requests = scoring()
    # What attends to a prefix: with a plain cache, all segments of a prompt at once.
    owner, function = (
        (loop_attention, "attend_segments") if name == "fp16" else (attention, "attend_prefix")
    )
    limits = MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB)
    options = dict(
        schedule="prefill-only", device="sim", limits=limits, precision=name, cpu_attention=False
    )
    with offloaded(tiny, "llama", tmp_path, Policy(3, 4, 0, 1, *cache, 0, 1), **options) as engine:
        with monkeypatch.context() as patch:
            count = replaced(patch, owner, function, 1 << 30, MemoryError)
            found = engine.run(requests)
        # 24 tokens of all, and behind them 1 and 15 of a part
        if name == "fp16" and cache != (0, 0):
            assert (
                sum(taken)
                == (24 + 1 + 15)
                * kv_bytes_per_token(engine.model_config, 4)
                // engine.model_config.num_layers
            )
        assert engine.last_run["workload"]["prompt_tokens_computed"] < 200 and count.calls > 6
        for call in range(0, count.calls, 5):
            with monkeypatch.context() as patch:
                replaced(patch, owner, function, call, MemoryError)
                assert_near(engine.run(requests), found)
            assert engine.last_run["halvings"] == 1
    alone(monkeypatch)
    with Engine.from_pretrained(tiny("llama").path, precision=name, offload_dir=tmp_path) as engine:
        assert_near(found, engine.run(requests))


@pytest.mark.parametrize("name", ["fp16", "channels"])
def test_little_memory_refuses_nobody_for_a_prefix(tiny, tmp_path, monkeypatch, packed, name):
    """A cache that holds hardly more than the largest request: prefixes come and go, or are not
    shared.
    """
    requests = requests_of(long_tree(4, 12), 4)
    with Engine.from_pretrained(tiny("llama").path, precision=name, offload_dir=tmp_path) as engine:
        weights, token = engine.ledger.in_use, kv_bytes_per_token(engine.model_config, 4)
        expected = engine.run(requests)
    answered = 0
    for tokens in (90, 150, 260, 520):
        limit = int(weights * 1.3) + tokens * token
        refused = []
        for way in (alone, lambda patch: None):
            with monkeypatch.context() as patch:
                way(patch)
                options = dict(precision=name, limits=MemoryLimits(cpu=limit), offload_dir=tmp_path)
                with Engine.from_pretrained(tiny("llama").path, **options) as engine:
                    results = engine.run(requests)
                    assert engine.ledger.peak <= limit
            refused.append([result.error is not None for result in results])
        assert refused[0] == refused[1]
        if kept := [pair for pair in zip(results, expected) if pair[0].error is None]:
            assert_near(*zip(*kept), borders=1)
            answered += len(kept)
    assert answered


@pytest.mark.parametrize("schedule, room", [("prefill-only", 0.05), ("zigzag", 0.3)])
def test_the_newest_tokens_of_prefixes_rest_elsewhere_too(tiny, tmp_path, packed, schedule, room):
    """A packed cache elsewhere takes no room beside the computing: all prefixes are shared, however
    little that has.
    """
    draw = random.Random(3)
    stems = [[draw.randrange(2, VOCABULARY) for _ in range(40)] for _ in range(60)]
    prompts = [
        [*stem, *(draw.randrange(2, VOCABULARY) for _ in range(3))]
        for stem in stems
        for _ in range(2)
    ]
    more = (
        {"max_tokens": 0, "echo_logprobs": True}
        if schedule == "prefill-only"
        else {"max_tokens": 4}
    )
    asked = [GenerationRequest(prompt_token_ids=p, ignore_eos=True, **more) for p in prompts]
    with Engine.from_pretrained(
        tiny("llama").path, precision="channels", offload_dir=tmp_path
    ) as engine:
        whole = engine.ledger.in_use
        expected = engine.run(asked)
        assert (shared := engine.last_run["workload"]["prompt_tokens_computed"]) < 60 * 55
    limits = MemoryLimits(gpu=whole + int(room * MIB), cpu=64 * MIB, disk=64 * MIB)
    options = dict(precision="channels", device="sim", limits=limits, schedule=schedule)
    with offloaded(tiny, "llama", tmp_path, Policy(4, 4, 1, 0, 0, 1, 1, 0), **options) as engine:
        assert_near(engine.run(asked), expected)
        assert engine.last_run["workload"]["prompt_tokens_computed"] == shared


def test_a_value_that_is_not_finite_in_a_prefix_fails_its_users_alone(tiny, monkeypatch):
    from flexgen_helm.models.decoder import Decoder

    honest = Decoder.embed

    def broken(self, weights, token_ids, positions):
        hidden = honest(self, weights, token_ids, positions)
        return hidden.masked_fill((token_ids.on_device == 77)[:, None], float("nan"))

    monkeypatch.setattr(Decoder, "embed", broken)
    requests = [
        GenerationRequest(prompt_token_ids=[*stem, *tail], max_tokens=3, ignore_eos=True)
        for stem in ([77, 6, 7, 8], [9, 6, 7, 8])
        for tail in ([1, 2], [1, 3], [4])
    ]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        results = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
    assert [result.error is not None for result in results] == [True] * 3 + [False] * 3
