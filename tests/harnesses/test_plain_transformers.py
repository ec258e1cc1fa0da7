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


def forward(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_log_probabilities_are_those_of_its_forward_pass(folder, answers):
    found = ask(folder, answers)
    assert [said for _, said in found] == ["", "", ""]
    for (_, result), (computed, _) in zip(answers, found, strict=True):
        assert len(computed.completions) == len(result.completions)
        for old, new in zip(result.completions, computed.completions):
            ids, start = [*result.prompt_token_ids, *old.token_ids], len(result.prompt_token_ids)
            expected = forward(folder, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            assert replace(new, logprobs=()) == replace(old, logprobs=())
            assert new.logprobs == pytest.approx(expected[start - 1 :], abs=1e-6)
            if result.prompt_logprobs is not None:
                assert computed.prompt_logprobs[0] is None
                assert computed.prompt_logprobs[1:] == pytest.approx(expected[: start - 1], abs=1e-6)
    assert found[1][0].prompt_greedy == answers[1][1].prompt_greedy


def test_a_token_that_is_not_the_most_probable_one_is_said(folder, answers):
    request, result = answers[0]
    ids = [*result.prompt_token_ids, *result.completions[0].token_ids[:-1]]
    last = forward(folder, ids)[-1]
    wrong = int(last.argmin())
    (completion,) = result.completions
    changed = replace(result, completions=(replace(completion, token_ids=(*completion.token_ids[:-1], wrong)),))
    shortfall = float(last.max() - last[wrong])
    sampled = replace(request, temperature=1.0)
    ((_, said), (_, nothing)) = ask(folder, [(request, changed), (sampled, changed)])
    assert said == f"{shortfall:.3g} nats below the most probable token" and nothing == ""
    assert ask(folder, [(request, changed)], tolerance=shortfall + 0.01)[0][1] == ""


def test_an_end_that_is_not_the_most_probable_token_is_said(folder, answers):
    request, result = answers[0]
    last = forward(folder, [*result.prompt_token_ids, *result.completions[0].token_ids])[-1]
    ended = replace(result, completions=(replace(result.completions[0], finish_reason="endoftext"),))
    most, least = int(last.argmax()), int(last.argmin())
    assert ask(folder, [(request, ended)], ends=[most, least])[0][1] == ""
    said = f"{float(last.max() - last[least]):.3g} nats below the most probable token"
    assert ask(folder, [(request, ended)], ends=[least])[0][1] == said


@pytest.mark.parametrize("is_greedy", [True, False])
def test_what_is_greedy_is_corrected_beyond_the_tolerance(folder, answers, is_greedy):
    request, result = answers[1]
    claimed = replace(result, prompt_greedy=(None, *[is_greedy] * 3))
    truth = ask(folder, [(request, claimed)])[0][0].prompt_greedy
    expected = forward(folder, result.prompt_token_ids)[:-1].argmax(1).tolist()
    assert truth == (None, *(a == b for a, b in zip(expected, result.prompt_token_ids[1:])))
    assert ask(folder, [(request, claimed)], tolerance=100.0)[0][0].prompt_greedy == claimed.prompt_greedy


def test_what_transformers_cannot_open_ends_in_a_sentence(tmp_path, answers):
    with pytest.raises(FlexgenError, match="transformers ended with exit code 1"):
        ask(tmp_path, answers)
