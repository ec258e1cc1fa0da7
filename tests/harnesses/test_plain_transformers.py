"""What a process of transformers says of answers equals its own forward pass, and names tokens that are not greedy."""

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
        GenerationRequest(prompt_token_ids=[9, 4, 8, 3], max_tokens=0, echo_logprobs=True, echo_greedy=True),
        GenerationRequest(prompt_token_ids=[7], max_tokens=3, temperature=1.0, n=2, seed=1, ignore_eos=True),
    ]
    with Engine.from_pretrained(folder) as engine:
        return [*zip(asked, engine.run(asked))]


def ask(folder, answers, tolerance=1e-3, ends=(2,)):
    return [(result, said) for (_, result), said in by_transformers(folder, ends, answers, tolerance)]


def shortfall(row, token):
    return float(row.max() - row[token])


def said_of(row, token):
    return f"{shortfall(row, token):.3g} nats below the most probable token"


def forward(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_log_probabilities_are_those_of_its_forward_pass(folder, answers):
    found = ask(folder, answers)
    assert [said for _, said in found] == ["", "", ""]
    for (_, result), (computed, _) in zip(answers, found, strict=True):
        start = len(result.prompt_token_ids)
        for old, new in zip(result.completions, computed.completions, strict=True):
            ids = [*result.prompt_token_ids, *old.token_ids]
            expected = [row[token].item() for row, token in zip(forward(folder, ids), ids[1:])]
            assert new == replace(old, logprobs=new.logprobs)
            assert new.logprobs == pytest.approx(expected[start - 1 :], abs=1e-6)
            if result.prompt_logprobs is not None:
                assert computed.prompt_logprobs[0] is None
                assert computed.prompt_logprobs[1:] == pytest.approx(expected[: start - 1], abs=1e-6)
    assert found[1][0].prompt_greedy == answers[1][1].prompt_greedy


def test_a_token_that_is_not_the_most_probable_one_is_said(folder, answers):
    request, result = answers[0]
    (completion,) = result.completions
    last = forward(folder, [*result.prompt_token_ids, *completion.token_ids[:-1]])[-1]
    wrong = int(last.argmin())
    changed = replace(result, completions=(replace(completion, token_ids=(*completion.token_ids[:-1], wrong)),))
    found = ask(folder, [(request, changed), (replace(request, temperature=1.0), changed)])
    assert [said for _, said in found] == [said_of(last, wrong), ""]
    assert ask(folder, [(request, changed)], tolerance=shortfall(last, wrong) + 0.01)[0][1] == ""


def test_an_end_that_is_not_the_most_probable_token_is_said(folder, answers):
    request, result = answers[0]
    (completion,) = result.completions
    last = forward(folder, [*result.prompt_token_ids, *completion.token_ids])[-1]
    ended = replace(result, completions=(replace(completion, finish_reason="endoftext"),))
    most, least = int(last.argmax()), int(last.argmin())
    for ends, said in (([most, least], ""), ([least], said_of(last, least))):
        assert ask(folder, [(request, ended)], ends=ends)[0][1] == said


@pytest.mark.parametrize("is_greedy", [True, False])
def test_what_is_greedy_is_corrected_beyond_the_tolerance(folder, answers, is_greedy):
    request, result = answers[1]
    claimed = replace(result, prompt_greedy=(None, *[is_greedy] * 3))
    most = forward(folder, result.prompt_token_ids).argmax(1).tolist()
    expected = (None, *(a == b for a, b in zip(most, result.prompt_token_ids[1:])))
    for tolerance, greedy in ((1e-3, expected), (100.0, claimed.prompt_greedy)):
        assert ask(folder, [(request, claimed)], tolerance)[0][0].prompt_greedy == greedy


def test_what_transformers_cannot_open_ends_in_a_sentence(tmp_path, answers):
    with pytest.raises(FlexgenError, match="transformers ended with exit code 1"):
        ask(tmp_path, answers)
