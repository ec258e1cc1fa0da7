"""Log-probabilities of continuations: pairs become prompts to score, and their results scores. No
torch.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flexgen_helm.errors import RequestError
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.tokenizer.chat import ChatFormat
from flexgen_helm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

Context = str | abc.Sequence[int] | abc.Sequence[Mapping[str, Any]]
ScoredPair = tuple[Context, str | abc.Sequence[int]]


class _LogprobAndGreedy(NamedTuple):
    logprob: float
    is_greedy: bool


class Score(_LogprobAndGreedy):
    """The score of a pair, a tuple (logprob, is_greedy).

    logprob: natural logarithm of the continuation's probability behind its context; NaN where the
        pair failed.
    is_greedy: every token of the continuation is the most probable one, so a temperature of 0 would
        draw it.
    token_ids, token_logprobs: of the continuation.
    error: why the pair failed, or None.
    """

    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of a context, and of the continuation that is scored behind it; neither is
    empty.
    """

    context: abc.Sequence[int]
    continuation: abc.Sequence[int]


def score_pairs(engine: Engine, pairs: abc.Sequence[ScoredPair], truncate: bool) -> list[Score]:
    """Return the scores of pairs, in order; the arguments are those of `Engine.score`."""
    scores: list[Score | None] = []
    lengths, requests = [], []
    for pair in pairs:
        try:
            encoded = encode_pair(pair, engine.tokenizer, engine.chat)
            requests.append(scoring_request(encoded, engine.model_config.max_positions, truncate))
            lengths.append(len(encoded.continuation))
            scores.append(None)
        except RequestError as error:
            scores.append(_failed(error))
    answered = map(read_score, engine.run(requests) if requests else (), lengths)
    return [next(answered) if score is None else score for score in scores]


def encode_pair(
    pair: ScoredPair, tokenizer: Tokenizer | None, chat: ChatFormat | None
) -> EncodedPair:
    """Return the ids of a pair, neither empty. Raises `RequestError` for what is no pair or cannot
    be encoded.

    Source: `TemplateLM._encode_pair` of lm-evaluation-harness 0.4.
    """
    if isinstance(pair, str) or not isinstance(pair, abc.Sequence) or len(pair) != 2:
        raise RequestError(f"a pair is (context, continuation), not {repr(pair)[:60]}")
    context, continuation = pair
    if isinstance(continuation, str):
        encoded = _encode_text_behind(context, continuation, tokenizer, chat)
    else:
        encoded = EncodedPair(
            _context_ids(context, tokenizer, chat), _ids("continuation", continuation)
        )
    context_ids = encoded.context or (
        [] if tokenizer is None or tokenizer.first_id is None else [tokenizer.first_id]
    )
    following = encoded.continuation
    if not context_ids:
        raise RequestError(
            "the context is empty and the model names no token to begin a text with; give one token"
        )
    if not encoded.context and isinstance(continuation, str) and following[:1] == context_ids:
        following = following[1:]  # the text begins with the text of that token
    if not following:
        raise RequestError(
            "the continuation has no tokens of its own, so there is nothing to score"
        )
    return EncodedPair(context_ids, following)


def _encode_text_behind(
    context: Context, continuation: str, tokenizer: Tokenizer | None, chat: ChatFormat | None
) -> EncodedPair:
    """Encode context and continuation as one text; ids behind as many as the context has alone are
    the continuation's.

    Spaces at the end of the context belong to the continuation: most vocabularies have them at the
    beginning of a word.
    """
    tokenizer = _required(tokenizer)
    if isinstance(context, str):
        text = context.rstrip()
        if not text:
            return EncodedPair(
                [], tokenizer.encode(context + continuation, add_special_tokens=False)
            )
        ids, whole = tokenizer.encode(text), tokenizer.encode(context + continuation)
    elif _is_chat(context):
        ids, whole = _encode_chat(context, ("", continuation), chat)
    else:
        return EncodedPair(
            _ids("context", context), tokenizer.encode(continuation, add_special_tokens=False)
        )
    #  The capital of France is Paris
    #  a   b       c  d      e  f       the context alone has five ids, so f is scored
    return EncodedPair(ids, whole[len(ids) :])


def _context_ids(
    context: Context, tokenizer: Tokenizer | None, chat: ChatFormat | None
) -> list[int]:
    if isinstance(context, str):
        return _required(tokenizer).encode(context) if context else []
    return _encode_chat(context, ("",), chat)[0] if _is_chat(context) else _ids("context", context)


def _is_chat(context: Context) -> bool:
    return (
        isinstance(context, abc.Sequence) and len(context) > 0 and isinstance(context[0], Mapping)
    )


def _encode_chat(
    messages: Any, endings: abc.Sequence[str], chat: ChatFormat | None
) -> list[list[int]]:
    """Return the ids of messages with each of several endings behind them."""
    if chat is None:
        raise RequestError("this model has no chat template; send a text instead of messages")
    rendered = chat.render_messages(messages)
    return chat.tokenizer.encode_batch([rendered + ending for ending in endings])


def _ids(what: str, ids: Any) -> list[int]:
    """Return a list of ids; whether each is in the vocabulary is checked with the request."""
    if isinstance(ids, Mapping | bytes) or not isinstance(ids, abc.Iterable):
        raise RequestError(
            f"the {what} is {repr(ids)[:60]}; it must be a text or a list of token ids"
        )
    return list(ids)


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises `RequestError` where there is none."""
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer files, so texts cannot be scored; give token ids"
        )
    return tokenizer


def scoring_request(pair: EncodedPair, window: int, truncate: bool) -> GenerationRequest:
    """Return the request that scores a pair.

    window: positions of the model; one token more can be scored, for the last is never fed.
    Raises `RequestError` for a pair beyond the window; truncate: such a context loses its first
    tokens instead.
    """
    ids = (*pair.context, *pair.continuation)
    most, length = window + 1, len(ids)
    if length > most and len(pair.continuation) > window:
        raise RequestError(
            f"the continuation has {len(pair.continuation)} tokens, beyond the model's window of "
            f"{window} tokens"
        )
    if length > most and not truncate:
        raise RequestError(
            f"the pair has {length} tokens, beyond the {most} that a window of {window} tokens can "
            "score; shorten the context, or pass truncate=True to drop its first tokens"
        )
    return GenerationRequest(
        prompt_token_ids=ids[-most:], max_tokens=0, echo_logprobs=True, echo_greedy=True
    )


def read_score(result: GenerationResult, length: int) -> Score:
    """Return the score of the last `length` tokens of a request that `scoring_request` made."""
    if result.error is not None:
        return _failed(result.error)
    logprobs = [
        logprob for logprob in (result.prompt_logprobs or ())[-length:] if logprob is not None
    ]
    greedy = (result.prompt_greedy or ())[-length:]
    assert len(logprobs) == len(greedy) == length
    score = Score(math.fsum(logprobs), all(greedy))
    score.token_ids, score.token_logprobs = result.prompt_token_ids[-length:], tuple(logprobs)
    return score


def _failed(error: Exception) -> Score:
    score = Score(math.nan, False)
    score.error = error
    return score
