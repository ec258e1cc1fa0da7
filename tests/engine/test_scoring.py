"""`Engine.score` equals `transformers` in float32, with pairs encoded as lm-evaluation-harness
does.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.errors import RequestError
from tests.helpers.chat_models import add_template
from tests.helpers.tiny_models import VOCABULARY

WINDOW = 96  # of the tiny models
EOS = 0
TEXTS = [
    ("the quick", " brown fox"),
    ("the quick ", "brown fox"),  # the blank moves
    ("the qu", "ick brown"),  # tokens may join over the boundary
    ("the quick\n\n", " fox"),
    ("", "the quick"),
    (" \n", "the"),
    ("", "<|endoftext|>the"),  # it brings the token that stands for an empty context
    ("über", " naïve 世界"),
    ("the", "\n"),
]


def harness_ids(tokenizer, context, continuation):
    """`TemplateLM.loglikelihood` and `_encode_pair` of lm-evaluation-harness, with a tokenizer that
    adds nothing.
    """
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces > 0:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    if context == "":
        ids = tokenizer(continuation)["input_ids"]
        return ([EOS], ids) if ids[0] != EOS else (ids[:1], ids[1:])
    whole, alone = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
    return alone, whole[len(alone) :]


def expected(model, context, continuation):
    """Sum of log-probabilities, and greediness, of the last `WINDOW + 1` ids, by `transformers`."""
    ids = [*context, *continuation][-(WINDOW + 1) :]
    logprobs = model.logprobs(ids[:-1])[-len(continuation) :]
    chosen = logprobs[range(len(continuation)), continuation]
    return float(chosen.double().sum()), logprobs.argmax(-1).tolist() == list(continuation)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return add_template(tiny("llama").path, tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.from_pretrained(folder) as loaded:
        loaded.share_every_beginning()
        yield loaded


def test_texts_meet_as_in_the_harness_and_score_as_in_transformers(tiny, engine):
    from transformers import PreTrainedTokenizerFast

    model = tiny("llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.path)
    scores = engine.score(TEXTS)
    joined = 0
    for (context, continuation), score in zip(TEXTS, scores):
        ids = harness_ids(tokenizer, context, continuation)
        assert score.token_ids == tuple(ids[1])
        logprob, is_greedy = score
        assert (logprob, is_greedy) == (
            pytest.approx(expected(model, *ids)[0], rel=1e-4),
            expected(model, *ids)[1],
        )
        assert math.fsum(score.token_logprobs) == logprob and score.error is None
        joined += [*ids[0], *ids[1]] != [*ids[0], *tokenizer(continuation)["input_ids"]]
    assert joined >= 2  # or the boundary does not matter


@pytest.mark.parametrize("variant", ["llama", "opt"])
def test_ids_of_any_kind_score_as_in_transformers(tiny, variant):
    model = tiny(variant)
    token = st.integers(2, VOCABULARY - 1)
    pair = st.tuples(
        st.lists(token, max_size=12),
        st.lists(token, min_size=1, max_size=5),
        st.integers(0, 5),
        st.booleans(),
    )
    with Engine.from_pretrained(model.path) as engine:
        engine.share_every_beginning()

        @settings(max_examples=15)
        @given(st.lists(pair, min_size=1, max_size=6))
        def check(drawn):
            pairs = []
            for context, continuation, num_greedy, repeats in drawn:
                # a common beginning
                context = [*pairs[0][0], *context] if pairs and repeats else context
                greedy = []
                for _ in range(num_greedy):
                    greedy.append(int(model.logprobs([*(context or [EOS]), *greedy])[-1].argmax()))
                pairs.append(
                    (
                        context,
                        [*greedy, *continuation[: max(not greedy, len(continuation) - num_greedy)]],
                    )
                )
            for (context, continuation), score in zip(pairs, engine.score(pairs), strict=True):
                logprob, is_greedy = expected(model, context or [EOS], continuation)
                assert score == (pytest.approx(logprob, rel=1e-4, abs=1e-4), is_greedy)

        check()


def test_what_greedy_decoding_writes_is_greedy_and_nothing_else_is(engine):
    chat = [{"role": "user", "content": "the quick"}]
    prompts = [{"prompt": "the quick"}, {"prompt_token_ids": [5, 9, 7]}, {"messages": chat}]
    results = engine.run(
        [GenerationRequest(**prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
    )
    contexts = [*(next(iter(prompt.values())) for prompt in prompts)]
    answers = [list(result.completions[0].token_ids) for result in results]
    right = engine.score(list(zip(contexts, answers)))
    wrong = engine.score(
        [(context, [*ids[:-1], (ids[-1] + 1) % 300 + 2]) for context, ids in zip(contexts, answers)]
    )
    assert [score.is_greedy for score in right] == [True] * 3 and not any(
        score.is_greedy for score in wrong
    )
    for score, result in zip(right, results):
        assert score.logprob == pytest.approx(result.completions[0].logprob, rel=1e-4)
    rendered = engine.tokenizer.encode("[user] the quick\n[assistant] ")
    assert engine.score([(chat, [5, 6])]) == engine.score([(rendered, [5, 6])])
    whole = engine.tokenizer.encode("[user] the quick\n[assistant] fox")
    assert engine.score([(chat, "fox")])[0].token_ids == tuple(whole[len(rendered) :])


def test_a_pair_beyond_the_window_fails_unless_it_may_be_cut(tiny, engine):
    ids = [2 + i * 7 % 300 for i in range(WINDOW + 20)]
    pairs = [
        (ids[:cut], ids[cut:]) for cut in (len(ids) - 3, len(ids) - WINDOW, len(ids) - WINDOW - 1)
    ]
    pairs.append((ids[: WINDOW - 2], ids[WINDOW - 2 : WINDOW + 1]))  # as much as the window scores
    refused = engine.score(pairs)
    assert all(
        "beyond the" in str(score.error) and math.isnan(score.logprob) for score in refused[:3]
    )
    cut = engine.score(pairs, truncate=True)
    assert "continuation has 97 tokens" in str(cut[2].error)
    for number in (0, 1, 3):
        logprob, is_greedy = expected(tiny("llama"), *pairs[number])
        assert cut[number] == (pytest.approx(logprob, rel=1e-4), is_greedy)
    assert refused[3] == cut[3]


@pytest.mark.parametrize(
    "pair, why",
    [
        (("the", ""), "nothing to score"),
        (("", "<|endoftext|>"), "nothing to score"),
        (([5], []), "nothing to score"),
        ("ab", "a pair is"),
        ((5,), "a pair is"),
        ((5, "the"), "context is 5"),
        (("the", 5), "continuation is 5"),
        (([5], [10**6]), "outside the vocabulary"),
        (([5], ["x"]), "no token id"),
        (("the", "\ud800"), "not valid Unicode"),
        (([{"content": "the"}], "quick"), "no role"),
    ],
)
def test_a_bad_pair_fails_alone(engine, pair, why):
    good = ("the quick", " fox")
    first, bad, last = engine.score([good, pair, good])
    assert isinstance(bad.error, RequestError) and why in str(bad.error)
    assert math.isnan(bad.logprob) and not bad.is_greedy
    assert first == last == engine.score([good])[0] and first.error is None
    assert engine.score([]) == []


def test_drawn_tokens_stay_what_they_are_beside_greedy_scores(engine):
    plain = GenerationRequest(
        prompt_token_ids=[5, 6, 7], max_tokens=3, temperature=1.5, seed=4, ignore_eos=True
    )
    scored = GenerationRequest(**{**vars(plain), "echo_logprobs": True, "echo_greedy": True})
    (alone,), both = engine.run([plain]), engine.run([scored, plain])
    for result in both:
        assert result.completions[0].token_ids == alone.completions[0].token_ids
    assert (
        len(both[0].prompt_greedy) == len(both[0].prompt_logprobs) == 3
        and both[0].prompt_greedy[0] is None
    )
    (error,) = (
        result.error for result in engine.run([GenerationRequest(prompt="the", echo_greedy=True)])
    )
    assert "echo_greedy needs echo_logprobs" in str(error)
