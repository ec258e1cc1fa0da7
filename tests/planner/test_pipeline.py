"""Layers and requests of a pipeline: every layer on one rank, every request in one lane, limits
that suit all.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm import GenerationRequest
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.engine.pipeline import divide_layers
from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import EMBED_TABLE, stage_names, tensor_shapes
from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.schedules import PREFILL_ONLY, ROW, ZIGZAG
from flexgen_helm.scheduling.lanes import common_limits, divide, into_lanes
from flexgen_helm.scheduling.sequence import Request

MODELS = (
    "opt-125m",
    "opt-350m",
    "gemma-2-9b",
    "qwen3-30b-a3b",
    "mixtral-8x7b-v0.1",
    "bloom-560m",
)


def config_of(name):
    entry = resolve(name).entry
    assert entry is not None
    return entry.config


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_parts_have_every_tensor_of_the_model_and_a_tied_table_twice(name, num_ranks):
    config = config_of(name)
    parts = [config.part(layers) for layers in divide_layers(config, num_ranks)]
    assert [stage for part in parts for stage in stage_names(part)] == stage_names(config)
    names = [name for part in parts for name in tensor_shapes(part)]
    twice = {EMBED_TABLE} if config.tied_head and num_ranks > 1 else set()
    assert set(names) == set(tensor_shapes(config)) and len(names) == len({*names}) + len(twice)
    layer = 0
    for part in parts:
        for index in range(part.num_layers):
            assert part.window(index) == config.window(layer) and part.layer_rope(
                index
            ) == config.layer_rope(layer)
            assert (part.moe(index) is None) == (config.moe(layer) is None)
            layer += 1
    assert sum(part.linear_flops_per_token for part in parts) == config.linear_flops_per_token
    assert [part.head_flops_per_token for part in parts][:-1] == [0] * (num_ranks - 1)


@given(st.integers(2, 100), st.integers(2, 16))
def test_no_other_division_has_a_smaller_largest_share(layers, num_ranks):
    config = replace(config_of("opt-125m"), num_layers=layers)
    if layers < num_ranks:
        with pytest.raises(UsageError, match=f"{layers} layers"):
            divide_layers(config, num_ranks)
        return
    counts = [len(part) for part in divide_layers(config, num_ranks)]
    assert sum(counts) == layers and min(counts) >= 1
    head = config.head_flops_per_token * layers / config.linear_flops_per_token

    def largest(last):
        return max(last + head, math.ceil((layers - last) / (num_ranks - 1)))

    assert (
        max(*counts[:-1], counts[-1] + head)
        <= min(map(largest, range(1, layers - num_ranks + 2))) + 1e-9
    )


def test_layers_are_divided_as_the_user_says():
    config = config_of("opt-125m")
    assert divide_layers(config, 2, (5, 7)) == [range(5), range(5, 12)]
    for counts in ((5, 6), (12,), (0, 12)):
        with pytest.raises(UsageError, match="12 layers and 2 ranks"):
            divide_layers(config, 2, counts)


LIMITS = SchedulerLimits(64, 64, 100, 4000, 512)
asked = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 20)), max_size=30
)


@given(asked, st.integers(1, 8))
def test_every_request_is_in_one_lane_and_lanes_have_similar_loads(asked, lanes):
    requests = [
        Request(GenerationRequest(prompt_token_ids=ids, max_tokens=n), ids, 0, None)
        for ids, n in asked
    ]
    divided = divide(requests, lanes)
    assert len(divided) == lanes and sorted(map(id, requests)) == sorted(
        id(r) for lane in divided for r in lane
    )
    loads = [sum(len(r.tokens) + r.original.max_tokens for r in lane) for lane in divided]
    largest = max((len(ids) + n for ids, n in asked), default=0)
    assert max(loads) - min(loads) <= 2 * largest


def test_common_beginnings_share_a_lane():
    shared = [[k] * 20 for k in (1, 2)]
    requests = [Request(GenerationRequest(prompt_token_ids=[1], max_tokens=4), shared[i % 2] + [i], 0, None)
                for i in range(10)]  # fmt: skip
    assert [sorted(r.tokens[0] for r in lane) for lane in divide(requests, 2)] == [[1] * 5, [2] * 5]


@pytest.mark.parametrize(
    ("num_requests", "cache_tokens", "num_ranks", "schedule", "expected"),
    [
        (9, 4000, 4, ZIGZAG, 2),  # 4,000 positions hold two of 1,501
        (3, 100_000, 4, ZIGZAG, 3),
        (9, 10, 4, ZIGZAG, 1),
        (81, 4000, 2, PREFILL_ONLY, 8),
        (0, 4000, 4, ROW, 1),
    ],
)
def test_a_lane_has_room_for_the_longest_request(
    num_requests, cache_tokens, num_ranks, schedule, expected
):
    request = GenerationRequest(prompt_token_ids=[1], max_tokens=500)
    requests = [Request(request, [1] * 1000, 0, None) for _ in range(num_requests)]
    limits = replace(LIMITS, cache_tokens=cache_tokens)
    lanes, shared_limits = into_lanes(requests, limits, num_ranks, schedule)
    assert len(lanes) == expected and sum(map(len, lanes)) == num_requests
    assert (
        shared_limits.cache_tokens == cache_tokens // expected
        and shared_limits.max_sequences == 100 // expected
    )


def test_common_limits_suit_every_rank():
    smaller = replace(LIMITS, batch_tokens=32, cache_tokens=9000, slot_overhead=3, page_tokens=16)
    assert common_limits([LIMITS, smaller]) == replace(LIMITS, batch_tokens=32, slot_overhead=3)
