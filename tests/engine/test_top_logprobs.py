"""The most probable tokens at each place equal those of `transformers` in float32."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.engine.sampler import most_probable
from flexgen_helm.errors import RequestError
from flexgen_helm.request import MAX_TOP_LOGPROBS
from tests.helpers.tiny_models import VOCABULARY

BEGINNING = [5 + i % 40 for i in range(24)]  # long enough to be shared


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine.from_pretrained(tiny("llama").path) as loaded:
        loaded.share_every_beginning()  # users of one get as many as each asks for
        yield loaded


def compare(model, request, result):
    """Compare a result's most probable tokens, of prompt and completions, with those of the
    model.
    """
    prompt, count = list(request.prompt_token_ids), request.top_logprobs
    for completion in result.completions or [None]:
        drawn = list(completion.token_ids) if completion else []
        rows = model.logprobs([*prompt, *drawn])
        assert completion is None or len(completion.top_logprobs) == (len(drawn) if count else 0)
        found = [
            *(result.prompt_top_logprobs or ())[1:],
            *(completion.top_logprobs if completion else ()),
        ]
        behind = len(prompt) + len(drawn) - len(found)
        for row, top in zip(rows[behind - 1 :], found):
            assert len(top) == count and len(dict(top)) == count
            assert [value for _, value in top] == pytest.approx(
                row.topk(count).values.tolist(), abs=1e-4
            )
            assert [float(row[token]) for token, _ in top] == pytest.approx(
                [value for _, value in top], abs=1e-4
            )


requests = st.builds(
    GenerationRequest,
    prompt_token_ids=st.tuples(
        st.booleans(), st.lists(st.integers(5, VOCABULARY - 1), min_size=1, max_size=9)
    ).map(lambda parts: [*(BEGINNING if parts[0] else ()), *parts[1]]),
    max_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 1.0]),
    n=st.integers(1, 3),
    seed=st.integers(0, 99),
    ignore_eos=st.just(True),
    echo_logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 1, 3, MAX_TOP_LOGPROBS]),
)


@settings(max_examples=15)
@given(asked=st.lists(requests, min_size=1, max_size=6))
def test_they_equal_those_of_transformers(engine, tiny, asked):
    for request, result in zip(asked, engine.run(asked)):
        assert result.error is None
        assert (result.prompt_top_logprobs is None) == (
            not (request.top_logprobs and request.echo_logprobs)
        )
        if result.prompt_top_logprobs is not None:
            assert len(result.prompt_top_logprobs) == len(request.prompt_token_ids)
            assert result.prompt_top_logprobs[0] is None
        compare(tiny("llama"), request, result)


def test_of_equally_probable_tokens_the_first_is_the_drawn_one():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (200, 12), generator=generator).float()  # most rows have ties
    values, tokens = most_probable(logits, 4)
    assert tokens[:, 0].tolist() == logits.argmax(dim=-1).tolist()
    assert torch.equal(logits.gather(1, tokens), values) and torch.equal(
        values, logits.topk(4).values
    )
    assert all(len(set(row)) == 4 for row in tokens.tolist())


def test_stop_strings_cut_them_as_they_cut_the_tokens(engine):
    free = GenerationRequest(
        prompt_token_ids=BEGINNING, max_tokens=8, ignore_eos=True, top_logprobs=1
    )
    (whole,) = engine.run([free])[0].completions
    stop = whole.tokens[4].strip() or whole.tokens[4]
    (cut,) = engine.run([replace(free, stop=(stop,))])[0].completions
    assert cut.finish_reason == "stop" and len(cut.top_logprobs) == len(cut.tokens) < 8


@pytest.mark.parametrize("count", [-1, MAX_TOP_LOGPROBS + 1, "two", None])
def test_other_numbers_are_refused(engine, count):
    (result,) = engine.run([GenerationRequest(prompt_token_ids=[5], top_logprobs=count)])
    assert isinstance(result.error, RequestError) and "top_logprobs is" in str(result.error)
