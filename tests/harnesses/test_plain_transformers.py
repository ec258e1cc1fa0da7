"""What a process of transformers says of answers equals its own forward pass, and names tokens that
are not greedy.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.errors import FlexgenError
from flexgen_helm.harnesses.plain_transformers import by_transformers


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama").path


@pytest.fixture(scope="module")
def answers(folder):
    asked = [
        GenerationRequest(prompt_token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True),
        GenerationRequest(
            prompt_token_ids=[9, 4, 8, 3], max_tokens=0, echo_logprobs=True, echo_greedy=True
        ),
        GenerationRequest(
            prompt_token_ids=[7], max_tokens=3, temperature=1.0, n=2, seed=1, ignore_eos=True
        ),
    ]
    with Engine.from_pretrained(folder) as engine:
        return [*zip(asked, engine.run(asked))]


def ask(folder, answers, ends, tolerance=1e-3):
    return [
        (rescored.result, rescored.contradiction)
        for rescored in by_transformers(folder, ends, answers, tolerance)
    ]


def said_of(row, token):
    return f"{float(row.max() - row[token]):.3g} nats below the most probable token"


def forward(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def last(folder, answers):
    """What follows the first answer but for its last token, and what follows all of it."""
    result = answers[0][1]
    return forward(folder, [*result.prompt_token_ids, *result.completions[0].token_ids])[-2:]


@pytest.fixture(scope="module")
def asked(answers, last):
    """The answers; the first with an improbable token, greedy and drawn, and ended; claims: all
    greedy, none greedy.
    """
    (request, result), (scored, score), _ = answers
    (completion,) = result.completions
    wrong, ended = (
        replace(result, completions=(replace(completion, **changes),))
        for changes in (
            {"token_ids": (*completion.token_ids[:-1], int(last[0].argmin()))},
            {"finish_reason": "endoftext"},
        )
    )
    claims = [
        (scored, replace(score, prompt_greedy=(None, *[is_greedy] * 3)))
        for is_greedy in (True, False)
    ]
    return [
        *answers,
        (request, wrong),
        (replace(request, temperature=1.0), wrong),
        (request, ended),
        *claims,
    ]


@pytest.fixture(scope="module")
def found(folder, asked, last):
    return ask(folder, asked, [int(last[1].argmin())])


def test_log_probabilities_are_those_of_its_forward_pass(folder, answers, found):
    for (_, result), (computed, _) in zip(answers, found):
        start = len(result.prompt_token_ids)
        for old, new in zip(result.completions, computed.completions, strict=True):
            ids = [*result.prompt_token_ids, *old.token_ids]
            expected = [row[token].item() for row, token in zip(forward(folder, ids), ids[1:])]
            assert new == replace(old, logprobs=new.logprobs)
            assert new.logprobs == pytest.approx(expected[start - 1 :], abs=1e-6)
            if result.prompt_logprobs is not None:
                assert computed.prompt_logprobs[0] is None
                assert computed.prompt_logprobs[1:] == pytest.approx(
                    expected[: start - 1], abs=1e-6
                )
    assert found[1][0].prompt_greedy == answers[1][1].prompt_greedy


def test_a_token_or_an_end_that_is_not_the_most_probable_one_is_said(found, last):
    token, end = (said_of(row, int(row.argmin())) for row in last)
    assert [said for _, said in found] == ["", "", "", token, "", end, "", ""]


def test_of_several_ends_one_may_be_the_most_probable(folder, asked, last):
    ends = [int(last[1].argmax()), int(last[1].argmin())]
    assert [said for _, said in ask(folder, asked[5:6], ends)] == [""]


def test_what_is_greedy_is_corrected_beyond_the_tolerance(folder, asked, found):
    ids = asked[1][1].prompt_token_ids
    truth = (
        None,
        *(int(row.argmax()) == token for row, token in zip(forward(folder, ids), ids[1:])),
    )
    assert [result.prompt_greedy for result, _ in found[-2:]] == [truth, truth]
    lenient = ask(folder, asked, [2], tolerance=100.0)
    assert [said for _, said in lenient] == [""] * len(asked)
    assert [result.prompt_greedy for result, _ in lenient[-2:]] == [
        result.prompt_greedy for _, result in asked[-2:]
    ]


def test_what_transformers_cannot_open_ends_in_a_sentence(tmp_path, answers):
    with pytest.raises(FlexgenError, match="transformers ended with exit code 1"):
        ask(tmp_path, answers, [2])
