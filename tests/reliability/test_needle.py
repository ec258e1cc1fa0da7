"""A needle: one request alone, and inside blocks of random company under everything that a plan may
decide.

Schedule, block, placement, device, precision, shared prefixes, delays and failures of transfers:
the same tokens, and of one plan the same bits. `tests/engine`, `tests/offload` and `tests/kv_cache`
vary each of these alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, GenerationResult
from flexgen_helm.engine import loop_attention
from flexgen_helm.offload import copy_engine, disk
from flexgen_helm.quant import precisions
from tests.helpers.offload import offloaded, policies
from tests.helpers.parity import assert_same, prompts, seeing_longer_neighbours
from tests.helpers.shares import share_of

# A packed cache rounds: where another order of sums moves a value over the border of two codes,
# log-probabilities move by more than sums do. So these have the same bits with the same plan, and
# `tests/kv_cache` compares what they see.
EXACT, ROUNDED = ["fp16", "4bit-weights"], ["4bit", "paper-4bit"]
NEEDLE_IDS = prompts(1, 30, seed=5)[0]
NEEDLE = GenerationRequest(
    prompt_token_ids=NEEDLE_IDS, max_tokens=10, echo_logprobs=True, ignore_eos=True
)

company = st.lists(
    st.fixed_dictionaries(
        {
            # beginning that it has in common with the needle
            "shared": st.integers(0, len(NEEDLE_IDS)),
            "more": st.integers(1, 30),
            "max_tokens": st.sampled_from([0, 1, 3, 12]),
            "n": st.sampled_from([1, 1, 3]),
            "temperature": st.sampled_from([0.0, 0.9]),
            "echo_logprobs": st.booleans(),
        }
    ),
    max_size=9,
)
plans = st.fixed_dictionaries(
    {
        "policy": policies(),
        "schedule": st.sampled_from(["row", "zigzag"]),
        "device": st.sampled_from(["cpu", "sim"]),
        "overlap": st.booleans(),
        "cpu_attention": st.booleans(),
    }
)


def haystack(
    neighbours: list[dict[str, Any]], position: int
) -> tuple[list[GenerationRequest], int]:
    """The needle among its neighbours, and where it is."""
    requests = []
    for seed, neighbour in enumerate(neighbours):
        ids = NEEDLE_IDS[: neighbour["shared"]] + prompts(1, neighbour["more"], seed=seed)[0]
        kept = {key: value for key, value in neighbour.items() if key not in ("shared", "more")}
        requests.append(GenerationRequest(prompt_token_ids=ids, seed=seed, **kept))
    position = min(position, len(requests))
    return [*requests[:position], NEEDLE, *requests[position:]], position


@pytest.fixture(scope="module", autouse=True)
def weights_alone():
    """A precision whose cache is whole."""
    with pytest.MonkeyPatch.context() as patch:
        packed = replace(precisions.PRECISIONS["4bit"], name="4bit-weights", cache=None)
        patch.setitem(precisions.PRECISIONS, "4bit-weights", packed)
        yield


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """The needle's answer by precision."""
    answers = {}
    for precision in EXACT:
        folder = tmp_path_factory.mktemp("alone")
        with Engine.from_pretrained(
            tiny("llama").path, precision=precision, offload_dir=folder
        ) as engine:
            (answers[precision],) = engine.run([NEEDLE])
    return answers


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Every transfer and every read or write of the disk waits for up to three milliseconds."""
    draw = random.Random(seed)

    def slow(honest: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.random() * 0.003)
            return honest(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk.DirectFile, "_transfer", slow(disk.DirectFile._transfer))
        patch.setattr(
            copy_engine.SimulatedCopyEngine,
            "_copy",
            slow(copy_engine.SimulatedCopyEngine._copy),
        )
        yield


def find(
    folder: Path,
    alone: dict[str, GenerationResult],
    asked: tuple[list[GenerationRequest], int],
    **plan: Any,
) -> None:
    """Ask for the needle in its company; plan: of an engine."""
    requests, where = asked
    with offloaded(folder=folder, **plan) as engine:
        first = engine.run(requests)
        if (precision := plan["precision"]) in alone:
            assert_same([first[where]], [alone[precision]])
        with delayed(len(requests)):
            second = engine.run(requests)
        bits = [
            [(result.completions, result.prompt_logprobs) for result in results]
            for results in (first, second)
        ]
        assert bits[0] == bits[1]


@pytest.mark.fast(2)
@settings(max_examples=share_of(24, 4))
@given(asked=st.builds(haystack, company, st.integers(0, 9)), plan=plans)
@pytest.mark.parametrize("precision", [*EXACT, *ROUNDED])
def test_the_needle_keeps_its_answer(tiny, tmp_path, alone, precision, asked, plan):
    find(tmp_path, alone, asked, tiny=tiny, variant="llama", precision=precision, **plan)


def test_the_needle_would_notice_a_neighbour(tiny, tmp_path, alone):
    """The inverse: if every sequence sees the columns of longer neighbours, its answer changes in
    this harness too.
    """
    neighbours = [
        {"shared": 0, "more": 40, "max_tokens": 12, "n": 1, "temperature": 0.0, "echo_logprobs": False}
    ] * 5  # fmt: skip
    plan = {"policy": "6x1,0,100,0,100,0,100", "schedule": "zigzag"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_attention, "attend_segments", seeing_longer_neighbours)
        with pytest.raises(AssertionError):
            find(
                tmp_path,
                alone,
                haystack(neighbours, 0),
                tiny=tiny,
                variant="llama",
                precision="fp16",
                **plan,
            )
