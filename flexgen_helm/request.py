"""Frozen records that cross borders: what is asked, what is answered, what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flexgen_helm.errors import RequestError

FinishReason = Literal["length", "stop", "endoftext"]


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Filled by the caller, never changed.

    Exactly one of `prompt` and `prompt_token_ids` is given. `prompt` is encoded as the tokenizer does by
    default (with BOS where the model was trained with one); `prompt_token_ids` is taken as it is.

    temperature: 0 is a true argmax. top_p: nucleus mass in (0, 1]. seed: with the completion's index it fixes
    every random draw, whatever else is in the batch. stop: strings; text and tokens end before the earliest.
    n: completions wanted. echo_logprobs: also score the prompt. ignore_eos: generate through EOS (throughput
    work with random weights, where an early end would change the workload).
    """

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    n: int = 1
    echo_logprobs: bool = False
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise `RequestError` where the request contradicts itself; needs no model."""
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise RequestError("a request needs exactly one of prompt and prompt_token_ids")
        if self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 0 or more")
        if self.n < 1:
            raise RequestError(f"n is {self.n}; at least one completion must be asked for")
        if not self.temperature >= 0.0:
            raise RequestError(f"temperature is {self.temperature}; it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if isinstance(self.stop, str):
            raise RequestError("stop must be a list of strings, not one string")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("every stop string must be a non-empty string")


@dataclass(frozen=True)
class Completion:
    """One continuation. Filled by the engine.

    `tokens`, `token_ids` and `logprobs` are parallel and exclude EOS and the stop string; a token that the stop
    string cuts in two stays, with its text trimmed, so that the tokens' texts join to `text`. (A token that is
    not whole UTF-8 is spelt `bytes:\\xNN`; those spellings do not join.) `logprobs` are natural logarithms of
    the raw, untempered softmax.
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    @property
    def logprob(self) -> float:
        """Sum over the tokens; 0.0 for an empty completion."""
        return float(sum(self.logprobs))


@dataclass(frozen=True)
class Cost:
    """What one request took of the run it was part of.

    Seconds are the request's share by operations of the passes it rode on; `flops` are multiply-adds counted
    twice, in linear layers and attention. Tokens computed are fewer than asked for where work was shared.
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
    """The answer to one request, in the order asked.

    `prompt_logprobs` has the length of `prompt_token_ids`, its first entry None, and is None itself unless the
    request asked for `echo_logprobs`. `error` is None or the exception of this request alone; then
    `completions` is empty.
    """

    completions: tuple[Completion, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[float | None, ...] | None = None
    error: Exception | None = None
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that each tier may hold at rest (staging buffers included); None = what the machine has, less a margin."""

    gpu: int | None = None
    cpu: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Progress:
    """How far a run is, in tokens fed or drawn; the total counts every `max_tokens` in full: an upper
    bound."""

    done_tokens: int
    total_tokens: int
    done_requests: int
    total_requests: int
    elapsed_s: float

    @property
    def remaining_s(self) -> float | None:
        """Expected seconds to go at the mean rate so far; None before the first token."""
        if not self.done_tokens:
            return None
        return self.elapsed_s * (self.total_tokens - self.done_tokens) / self.done_tokens
