"""A run that goes on behind the tokens of an interrupted one gives the same answers, without
drawing them again.
"""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.errors import Interrupted
from flexgen_helm.kernels.attention import can_attend_caches
from flexgen_helm.request import DrawnToken, ThinkingFormat
from flexgen_helm.scheduling.sequence import Request
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import VOCABULARY, build_tiny

MIB = 1 << 20
KINDS = [
    ("llama", "fp16"),
    ("gemma2", "fp16"),
    ("opt-350m", "fp16"),
    ("mixtral", "fp16"),
    ("llama", "4bit"),
]


def asked_of(draw):
    """Requests of every kind, some of which share a beginning."""
    stem = [draw.randrange(3, VOCABULARY) for _ in range(30)]

    def ids():
        return stem[: draw.choice([0, 12, 30])] + [
            draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 9))
        ]

    thinking = ThinkingFormat(True, 3, (5, 6))
    return [
        GenerationRequest(
            prompt_token_ids=ids(), max_tokens=draw.choice([1, 2, 9, 16]),
            temperature=draw.choice([0.0, 1.0]), top_p=draw.choice([0.8, 1.0]), seed=seed,
            n=draw.choice([1, 3]),
            echo_logprobs=(scores := draw.random() < 0.5), echo_greedy=scores, top_logprobs=draw.choice([0, 2]),
            stop=draw.choice([(), ("e",)]), ignore_eos=draw.random() < 0.5, thinking=draw.choice([None, thinking]),
        )
        for seed in range(8)
    ]  # fmt: skip


class Kept:
    """Takes the tokens of a run, and stops it after so many."""

    def __init__(self, most):
        self.tokens = defaultdict(list)
        self.num_drawn, self._most = 0, most

    def on_drawn(self, index, completion, step, drawn):
        assert step == len(self.tokens[index, completion])
        self.tokens[index, completion].append(drawn)
        self.num_drawn += 1

    def should_stop(self):
        return self.num_drawn >= self._most

    def of(self, index, lost):
        """What is kept of a request; the newest tokens of a completion may not have been
        written.
        """
        found = [self.tokens[index, completion] for completion in range(3)]
        return [tokens[: len(tokens) - lost.choice([0, 0, 1, 2])] for tokens in found]


def interrupted(model, draw, **options):
    """Results of a run, and those of two of which the first was stopped; tokens drawn of what that
    one left, known to the second one, and drawn by it.
    """
    asked = asked_of(draw)
    with Engine.from_pretrained(model, **options) as engine:
        drawn = Kept(10**9)
        whole = engine.run(asked, on_drawn=drawn.on_drawn)
        kept, done = Kept(draw.randrange(1, drawn.num_drawn)), {}
        with pytest.raises(Interrupted):
            engine.run(
                asked,
                on_result=done.__setitem__,
                should_stop=kept.should_stop,
                on_drawn=kept.on_drawn,
            )
    left = [number for number in range(len(asked)) if number not in done]
    again = [replace(asked[number], drawn=kept.of(number, draw)) for number in left]
    num_kept = sum(len(tokens) for request in again for tokens in request.drawn)
    plan = (
        {"policy": draw.choice(["2x2,0,100,0,100,0,100", "3x1,0,0,0,0,0,100"])}
        if options["policy"]
        else {}
    )
    limits = MemoryLimits(cpu=64 * MIB, disk=256 * MIB)
    with Engine.from_pretrained(model, limits=limits, **{**options, **plan}) as engine:
        rest = Kept(10**9)
        for index, request in enumerate(again):
            rest.tokens.update(
                {(index, completion): [*tokens] for completion, tokens in enumerate(request.drawn)}
            )
        for number, result in zip(left, engine.run(again, on_drawn=rest.on_drawn)):
            done[number] = result
        new = {
            key: len(tokens) - len(again[key[0]].drawn[key[1]])
            for key, tokens in rest.tokens.items()
        }
        # Completions at temperature 0 are drawn once, and count as often as they are wanted.
        output = sum(
            count * (1 if again[i].temperature else again[i].n) for (i, _), count in new.items()
        )
        assert engine.last_run["workload"]["output_tokens"] == output
    num_left = sum(len(tokens) for (number, _), tokens in drawn.tokens.items() if number in left)
    return (
        whole,
        [done[number] for number in range(len(asked))],
        (num_left, num_kept, rest.num_drawn),
    )


def values(result):
    assert result.error is None, result.error
    completions = [(c.text, c.tokens, c.token_ids, c.finish_reason) for c in result.completions]
    numbers = [number for c in result.completions for number in c.logprobs]
    numbers += [logprob for c in result.completions for top in c.top_logprobs for _, logprob in top]
    numbers += [number for number in result.prompt_logprobs or () if number is not None]
    tops = [(c.top_logprobs, result.prompt_top_logprobs) for c in result.completions]
    return completions, numbers, (tops, result.prompt_greedy)


@pytest.mark.skipif(
    not can_attend_caches(torch.device("cpu"), torch.float32),
    reason="no compiled loop attends here",
)
@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_bits_are_those_of_a_run_without_an_interruption(tmp_path, kind, precision):
    model = build_tiny(tmp_path / "model", kind).path
    num_stopped = 0
    for seed in range(share_of(4, 2)):
        draw = random.Random(f"{kind} {seed}")
        options = {"batch_invariant": True, "precision": precision, "offload_dir": tmp_path}
        options["policy"] = draw.choice([None, "2x2,0,50,0,50,0,100"])
        whole, found, (left, kept, drawn) = interrupted(model, draw, **options)
        assert [*map(values, found)] == [*map(values, whole)]
        assert drawn == left - kept  # nothing is drawn twice
        num_stopped += kept > 0
    assert num_stopped


def test_a_token_that_is_none_fails_its_request_alone(tmp_path):
    with Engine.from_pretrained(
        build_tiny(tmp_path / "model", "llama").path, offload_dir=tmp_path
    ) as engine:
        asked = GenerationRequest(prompt_token_ids=[5, 6], max_tokens=4)
        planted = replace(asked, seed=1, temperature=1.0, drawn=[[DrawnToken(10**6, -0.5)]])
        good, bad = engine.run([asked, planted])
    assert good.error is None and "outside the vocabulary" in str(bad.error)


def test_a_run_whose_answers_were_all_drawn_computes_nothing(tmp_path):
    """They were killed before they were stored. Scores of the prompt are computed."""
    asked = GenerationRequest(prompt_token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True)
    scored = replace(asked, echo_logprobs=True, seed=1)
    drawn = Kept(10**9)
    with Engine.from_pretrained(
        build_tiny(tmp_path / "model", "llama").path, offload_dir=tmp_path
    ) as engine:
        whole = engine.run([asked, scored], on_drawn=drawn.on_drawn)
        for numbers in ([0], [0, 1]):
            again = [replace((asked, scored)[i], drawn=[drawn.tokens[i, 0]]) for i in numbers]
            found = engine.run(again, on_drawn=lambda *token: pytest.fail("drawn again"))
            assert [result.completions for result in found] == [
                whole[i].completions for i in numbers
            ]
            assert found[-1].prompt_logprobs == whole[numbers[-1]].prompt_logprobs


def test_a_restart_costs_the_tokens_that_it_computes_again():
    token = DrawnToken(3, -1.0)
    asked = GenerationRequest(
        prompt_token_ids=[5] * 10, max_tokens=100, ignore_eos=True, drawn=[[token] * 30]
    )
    request = Request(asked, [5] * 10, 0, None)
    request.resume(())
    request.charge(True, tokens=40, flops=0.0, seconds=4.0, batch_size=1)
    assert request.restart_s == 4.0
    for _ in range(10):
        request.completions[0].push(token, ())
    assert request.restart_s == 5.0
