"""Requests to an engine and their results, as frozen records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from flexgen_helm.errors import RequestError

# More than any evaluation draws; each takes memory before the first token.
MAX_COMPLETIONS = 10_000
# What OpenAI's chats allow; each is kept and stored for every token.
MAX_TOP_LOGPROBS = 20

FinishReason = Literal["length", "stop", "endoftext"]
# The most probable tokens at one place and their log-probabilities; the first is what a temperature
# of 0 draws.
TopLogprobs = tuple[tuple[int, float], ...]


class DrawnToken(NamedTuple):
    """A token that was drawn; top: the most probable ones, where they are wanted."""

    token: int
    logprob: float
    top: TopLogprobs = ()


class ThinkingMarks(NamedTuple):
    """What a model writes around its thoughts, and around the answer behind them ('' if
    nothing).
    """

    begin: str = "<think>"
    end: str = "</think>"
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True)
class ThinkingFormat:
    """What the engine must know of a request whose model thinks: its stop strings count in the
    answer only.

    begins_inside: the prompt ends inside thinking.
    budget: tokens of thinking after which its end is forced; None for no limit.
    end_ids: the tokens of that end.
    """

    begins_inside: bool = False
    budget: int | None = None
    end_ids: tuple[int, ...] = ()
    marks: ThinkingMarks = ThinkingMarks()


@dataclass(frozen=True)
class GenerationRequest:
    """What a caller asks for.

    prompt: text, encoded as the tokenizer does by default (with BOS if the model was trained with
        one).
    prompt_token_ids: used unchanged.
    messages: a chat, {'role': …, 'content': …} each, rendered by the chat template. Exactly one of
        the three is given.
    max_tokens: most tokens to generate; 0 with `echo_logprobs` only scores the prompt.
    temperature: 0 takes the most probable token.
    top_p: probability mass of the nucleus, in (0, 1].
    seed: fixes every random draw together with the completion's index, whatever else is in the
        batch.
    stop: strings; text and tokens end before the earliest.
    n: completions wanted.
    echo_logprobs: also return log-probabilities of the prompt's tokens.
    echo_greedy: also say of each of the prompt's tokens whether it is the most probable one; with
        `echo_logprobs`.
    ignore_eos: generate through EOS, for throughput work with random weights.
    thinking: set by whoever renders a prompt for a model that thinks.
    top_logprobs: also return so many of the most probable tokens at each drawn token, and with
        `echo_logprobs` at each of the prompt's.
    drawn: what an interrupted run has drawn of each completion, which goes on behind it.
    """

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    n: int = 1
    echo_logprobs: bool = False
    ignore_eos: bool = False
    thinking: ThinkingFormat | None = None
    echo_greedy: bool = False
    top_logprobs: int = 0
    drawn: Sequence[Sequence[DrawnToken]] = ()

    @property
    def max_fed_tokens(self) -> int:
        """Most drawn tokens of a completion that pass the model: the last one does not."""
        return max(0, self.max_tokens - 1)

    def validate(self) -> None:
        """Raise `RequestError` if the request contradicts itself; needs no model."""
        for name, (kind, meaning) in _KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise RequestError(f"{name} is {repr(value)[:60]}; it must be {meaning}")
        if (
            sum(given is not None for given in (self.prompt, self.prompt_token_ids, self.messages))
            != 1
        ):
            raise RequestError(
                "a request needs exactly one of prompt, prompt_token_ids and messages"
            )
        if self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 0 or more")
        if not 1 <= self.n <= MAX_COMPLETIONS:
            raise RequestError(
                f"n is {self.n}; it must be at least 1 and at most {MAX_COMPLETIONS:,} completions"
            )
        if not self.temperature >= 0.0:
            raise RequestError(f"temperature is {self.temperature}; it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if isinstance(self.stop, str):
            raise RequestError("stop must be a list of strings, not one string")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("every stop string must be a non-empty string")
        if self.echo_greedy and not self.echo_logprobs:
            raise RequestError("echo_greedy needs echo_logprobs")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_TOP_LOGPROBS}"
            )


# Types of the fields, and their names in messages; numbers of any library, such as NumPy's.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "prompt": ((str, type(None)), "text"),
    "prompt_token_ids": ((Collection, type(None)), "a list of token ids"),
    "messages": ((Sequence, type(None)), "a list of messages"),
    "max_tokens": (Integral, "a whole number"),
    "n": (Integral, "a whole number"),
    "seed": (Integral, "a whole number"),
    "temperature": (Real, "a number"),
    "top_p": (Real, "a number"),
    "stop": (Sequence, "a list of strings"),
    "echo_logprobs": (Integral, "true or false"),
    "echo_greedy": (Integral, "true or false"),
    "ignore_eos": (Integral, "true or false"),
    "top_logprobs": (Integral, "a whole number"),
}


@dataclass(frozen=True)
class Completion:
    """One completion of a request.

    text: without EOS and stop string.
    tokens: texts of the tokens, which join to `text`. The text of a token that the stop string cuts
        in two is trimmed. A token that is not whole UTF-8 is written `bytes:\\xNN`, and does not
        join.
    token_ids, logprobs: parallel to `tokens`; natural logarithms of the raw softmax, temperature 1.
    finish_reason: length, stop or endoftext.
    top_logprobs: parallel to `tokens` where the request wants them, else empty.
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    top_logprobs: tuple[TopLogprobs, ...] = ()

    @property
    def logprob(self) -> float:
        """Sum over the tokens; 0.0 for an empty completion."""
        return float(sum(self.logprobs))


@dataclass(frozen=True)
class Cost:
    """What one request took of its run.

    prompt_tokens, output_tokens: asked for and generated.
    prompt_tokens_computed: fewer than `prompt_tokens` where prompts share a prefix; more where a
        resumed run computes drawn tokens again.
    padded_prompt_tokens, padded_output_tokens: with the padding that was really computed.
    flops: of linear layers and attention; a multiply-add counts two.
    prefill_s, decode_s: seconds; the share of its batches that the request's operations are.
    batch_size: of its largest batch.
    """

    prompt_tokens: int = 0
    prompt_tokens_computed: float = 0.0
    output_tokens: int = 0
    padded_prompt_tokens: float = 0.0
    padded_output_tokens: float = 0.0
    flops: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    batch_size: int = 1


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one request.

    completions: `n` of them; empty if there is an error.
    prompt_token_ids: the prompt as it was computed.
    prompt_logprobs: as long as `prompt_token_ids`, the first entry None; None without
        `echo_logprobs`.
    error: the exception of this request alone, or None.
    prompt_greedy: parallel to `prompt_logprobs`, whether each token is the most probable one, as a
        temperature of 0 draws it; None without `echo_greedy`.
    prompt_top_logprobs: parallel to `prompt_logprobs`; None unless `top_logprobs` and
        `echo_logprobs` are asked for.
    """

    completions: tuple[Completion, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[float | None, ...] | None = None
    error: Exception | None = None
    cost: Cost = field(default_factory=Cost)
    prompt_greedy: tuple[bool | None, ...] | None = None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None = None
