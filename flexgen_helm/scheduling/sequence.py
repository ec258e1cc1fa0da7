"""What moves through the model: requests, their sequences, cache blocks and the batches of a pass.
No torch.

A request becomes one or more sequences, lines of tokens that have caches:

    SHARED_PREFIX   "Answer the question. Q: … A: …"      computed once for several requests
      PROMPT          "Q: 2 + 2 = ? A:"                   attends to the prefix; decodes there ...
        CONTINUATION    " 4"                              ... or each completion is a sequence
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter, abc
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.request import (
    Completion,
    Cost,
    DrawnToken,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    TopLogprobs,
)
from flexgen_helm.tiers import Tier
from flexgen_helm.tokenizer.stop_strings import StopMatcher
from flexgen_helm.tokenizer.thinking import ThinkingTracker

Score = TypeVar("Score")

# How tokens are drawn: parameters, and randomness that belongs to the request alone.


@dataclass(frozen=True)
class SamplingParams:
    """How one token is chosen.

    temperature: 0 takes the most probable token.
    top_p: probability mass of the nucleus, in (0, 1].
    key: 64 bits with a sign, from which the noise of each token id follows; ignored at temperature
        0.
    forced: the token to take whatever its probability; None for none.
    prompt, drawn: the tokens before it, which generation settings depend on.
    """

    temperature: float
    top_p: float
    key: int
    forced: int | None = None
    prompt: abc.Sequence[int] = ()
    drawn: abc.Sequence[int] = ()


def draw_key(seed: int, completion: int, step: int) -> int:
    """Return the key of token `step` of completion `completion`: a function of these three alone.

    So the same request draws the same tokens in every batch, schedule, order and resumed run.
    """
    digest = hashlib.sha256(f"{seed}/{completion}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class CompletionState:
    """One completion that grows token by token.

    ids: its tokens so far, without EOS.
    num_resumed: tokens that an earlier run has drawn.
    """

    def __init__(
        self, request: GenerationRequest, index: int, token_bytes: Callable[[int], bytes] | None
    ) -> None:
        """Begin with no tokens.

        index: of the completion among those of the request.
        token_bytes: text of a token; None where the model has no tokenizer, then only ids are kept.
        """
        self._request = request
        self._index = index
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []
        self._thinking = (
            ThinkingTracker(request.thinking) if request.thinking and token_bytes else None
        )
        self._forced_from: int | None = None  # the draw from which on the end of thinking is forced
        self._matcher = (
            StopMatcher(token_bytes, request.stop, self._thinking) if token_bytes else None
        )
        self.finish_reason: FinishReason | None = None
        self.num_drawn = self.num_resumed = 0

    @property
    def ids(self) -> list[int]:
        return self._ids

    def resume(self, drawn: Iterable[DrawnToken], eos_ids: Collection[int]) -> None:
        """Take the tokens that an earlier run has drawn."""
        for token in drawn:
            if self.finish_reason is None:
                self._forced()  # notes where the end of thinking began
                self.push(token, eos_ids)
        self.num_resumed = self.num_drawn

    def next_sampling(self, prompt: abc.Sequence[int] = ()) -> SamplingParams:
        """Return how the next token is drawn behind a prompt."""
        request = self._request
        if (forced := self._forced()) is not None:
            return SamplingParams(0.0, 1.0, 0, forced)
        if request.temperature == 0.0:
            return SamplingParams(0.0, 1.0, 0, None, prompt, self._ids)
        key = draw_key(request.seed, self._index, self.num_drawn)
        return SamplingParams(request.temperature, request.top_p, key, None, prompt, self._ids)

    def _forced(self) -> int | None:
        """Return the next token of a forced end of thinking; asked again for a token, the answer is
        the same.
        """
        thinking, tracker = self._request.thinking, self._thinking
        if thinking is None or tracker is None or thinking.budget is None:
            return None
        if (
            self._forced_from is None
            and tracker.is_thinking
            and tracker.num_thinking_tokens >= thinking.budget
        ):
            self._forced_from = self.num_drawn
        if self._forced_from is None:
            return None
        step = self.num_drawn - self._forced_from
        return thinking.end_ids[step] if step < len(thinking.end_ids) else None

    def push(self, drawn: DrawnToken, eos_ids: Collection[int]) -> bool:
        """Append a drawn token; return whether the completion has ended."""
        token, logprob, top = drawn
        self.num_drawn += 1
        if token in eos_ids and not self._request.ignore_eos:
            # `finish` says whether text that seemed to be thinking has a stop string.
            self.finish_reason = (
                "stop" if self._matcher is not None and self._matcher.finish() else "endoftext"
            )
            return True
        self._ids.append(token)
        self._logprobs.append(logprob)
        if top:
            self._top.append(top)
        if self._matcher is not None and self._matcher.push(token):
            self.finish_reason = "stop"
        elif self.num_drawn == self._request.max_tokens:
            self.finish_reason = (
                "stop" if self._matcher is not None and self._matcher.finish() else "length"
            )
        return self.finish_reason is not None

    def result(self) -> Completion:
        reason = self.finish_reason or "length"
        logprobs = tuple(self._logprobs)
        top = tuple(self._top)
        if self._matcher is None:
            return Completion("", ("",) * len(self._ids), tuple(self._ids), logprobs, reason, top)
        kept = self._matcher.result()
        count = len(kept.tokens)
        return Completion(
            kept.text, kept.tokens, kept.token_ids, logprobs[:count], reason, top[:count]
        )


class Request:
    """One distinct request of a run, its completions and its costs.

    request: as the caller asked.
    tokens: the prompt as it is computed.
    num_context: leading tokens that the caller did not ask for (the BOS that an empty prompt is
        conditioned on).
    indices: in the caller's list that asked for exactly this.
    scored: the sequences that score the prompt, outermost shared prefix first.
    num_sequences: sequences that work for this request alone and have not ended.
    length_group: `max_tokens` if answers may end before, else None (`AnswerLengths`).
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokens: abc.Sequence[int],
        num_context: int,
        token_bytes: Callable[[int], bytes] | None,
    ) -> None:
        self.request = request
        self.tokens = list(tokens)
        self.num_context = num_context
        self.indices: list[int] = []
        # Without tokens, and at temperature 0, all completions are the same.
        self.num_completions = (
            1 if request.temperature == 0.0 or not request.max_tokens else request.n
        )
        drawn = self.num_completions if request.max_tokens else 0
        self.completions = [CompletionState(request, i, token_bytes) for i in range(drawn)]
        self.scored: tuple[Sequence, ...] = ()
        self.num_sequences = 0
        self.length_group: int | None = None
        self.error: Exception | None = None
        self._prompt_tokens_computed = self._flops = self._prefill_s = self._decode_s = 0.0
        self._batch_size = 1

    @property
    def unfinished(self) -> list[int]:
        """Indices of the completions that have not ended."""
        return [
            i for i, completion in enumerate(self.completions) if completion.finish_reason is None
        ]

    @property
    def num_resumed(self) -> int:
        """Tokens that an earlier run has drawn."""
        return sum(completion.num_resumed for completion in self.completions)

    @property
    def restart_s(self) -> float:
        """Seconds that its prompt, and what was drawn behind it, take when an interrupted run goes
        on.
        """
        drawn = sum(completion.num_drawn for completion in self.completions)
        computed = len(self.tokens) + self.num_resumed
        return self._prefill_s * (len(self.tokens) + drawn) / max(1, computed)

    def resume(self, eos_ids: Collection[int]) -> None:
        """Take what an earlier run has drawn."""
        for completion, drawn in zip(self.completions, self.request.drawn):
            completion.resume(drawn, eos_ids)

    def charge(
        self, prefill: bool, tokens: float, flops: float, seconds: float, batch_size: int
    ) -> None:
        """Add the request's share of one batch."""
        self._flops += flops
        if prefill:
            self._prompt_tokens_computed += tokens
            self._prefill_s += seconds
        else:
            self._decode_s += seconds
        self._batch_size = max(self._batch_size, batch_size)

    def results(self) -> list[GenerationResult]:
        """Return one result for each index; what was computed is split evenly, and tokens count for
        each.
        """
        request = self.request
        asked = tuple(self.tokens[self.num_context :])
        if self.error is not None:
            return [
                GenerationResult(prompt_token_ids=asked, error=self.error) for _ in self.indices
            ]
        done = [completion.result() for completion in self.completions] or [
            Completion("", (), (), (), "length")
        ]
        completions = done * request.n if len(done) == 1 else done
        scored = [sequence.scores for sequence in self.scored]
        logprobs = greedy = top = None
        if request.echo_logprobs:
            logprobs = self._of_prompt(value for scores in scored for value in scores.logprobs)
        if request.echo_greedy:
            greedy = self._of_prompt(value for scores in scored for value in scores.greedy)
        if request.echo_logprobs and (count := request.top_logprobs):
            # A shared prefix has as many as the user who wants most.
            top = self._of_prompt(value[:count] for scores in scored for value in scores.top)
        share = 1.0 / len(self.indices)
        num_drawn = sum(completion.num_drawn for completion in self.completions)
        output = num_drawn * (request.n if len(done) == 1 else 1)
        cost = Cost(
            prompt_tokens=len(asked),
            prompt_tokens_computed=self._prompt_tokens_computed * share,
            output_tokens=output,
            padded_prompt_tokens=float(len(asked)),
            padded_output_tokens=float(output),
            flops=self._flops * share,
            prefill_s=self._prefill_s * share,
            decode_s=self._decode_s * share,
            batch_size=self._batch_size,
        )
        return [
            GenerationResult(tuple(completions), asked, logprobs, None, cost, greedy, top)
            for _ in self.indices
        ]

    def without_resumed(self, cost: Cost) -> Cost:
        """Return the cost of one of its results with the output tokens that this run has drawn."""
        if not self.num_resumed:
            return cost
        drawn = sum(completion.num_drawn for completion in self.completions)
        new = cost.output_tokens * (drawn - self.num_resumed) // drawn
        return replace(cost, output_tokens=new, padded_output_tokens=float(new))

    def _of_prompt(self, scores: Iterable[Score]) -> tuple[Score | None, ...]:
        """Return a score for each token that was asked for: scores[i] is of tokens[i + 1], and the
        first has none.
        """
        return (None, *scores)[self.num_context : len(self.tokens)]


@dataclass
class PromptScores:
    """Scores of a prompt's tokens, from the second one on.

    greedy: whether each is the most probable token, where that is wanted.
    top: the most probable tokens there, where they are wanted.
    """

    logprobs: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


class SequenceKind(enum.Enum):
    """What a sequence is for."""

    PROMPT = "prompt"  # of one request: decodes there, or continuations branch off it
    # one of several completions of a prompt, whose cache it attends to
    CONTINUATION = "continuation"
    SHARED_PREFIX = "shared prefix"  # the beginning of several prompts, computed once


@dataclass(eq=False)
class CacheBlock:
    """Sequences whose cache lies in the same tensors: `sequences[i]` owns slot `i`.

    Active sequences fill the first slots, so that attention reads one contiguous slice: where a
    sequence ends, the last one takes its slot. A block that must grow is replaced by a new one
    (`Regroup`).

    capacity: tokens of a slot.
    num_slots: sequences that the block was opened for.
    slot_overhead: what every slot takes beside its tokens, in positions.
    block_overhead: what the block takes beside its slots, in positions.
    tier: where the cache has placed it, once it has.
    """

    capacity: int
    num_slots: int
    sequences: list[Sequence]
    slot_overhead: int = 0
    block_overhead: int = 0
    tier: Tier | None = None

    @property
    def positions(self) -> int:
        """Positions of cache that the block takes."""
        return self.num_slots * (self.capacity + self.slot_overhead) + self.block_overhead

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, the one that it computes next included."""
        return max(sequence.num_cached for sequence in self.sequences) + 1


@dataclass(eq=False)
class Sequence:
    """One line of tokens with a cache.

    kind: what it is for.
    requests: those that it works for; several only where a prefix is shared.
    tokens: its own tokens, prompt first; generated ones are appended.
    prompt_len: tokens of the prompt (0 for a continuation, which begins with a drawn token).
    start: absolute position of tokens[0].
    prefixes: sequences whose whole cache precedes this one's, outermost first.
    max_new_tokens: tokens that may follow the prompt in this sequence; 1 for a shared prefix, so
        that its last token is computed.
    num_draws: tokens to draw from the last position: 1, or 0 where only scores are wanted, or one
        for each completion of a prompt.
    first_completion: index of the first completion that it draws for.
    num_continuations, continuation_tokens: sequences that may branch off this prompt, and the cache
        positions that each of them may come to need; 0 where it decodes in place.
    needs_cache: whether later tokens attend to this sequence.
    needs_scores: log-probabilities of the prompt's tokens are wanted, and of `next_token`.
    needs_greedy: whether each of these tokens is the most probable one is wanted too.
    num_top: the most probable tokens that are wanted at each token that is scored or drawn.
    next_token: the token that follows a shared prefix in all its users.
    num_computed: leading tokens that have passed through the model.
    block, slot: where its cache lies, while it has one.
    scores: of the prompt, once they are there.
    num_readers: unfinished sequences that attend to this one's cache.
    length_group: answers of one group are taken to end at one rate (`AnswerLengths`); None: it
        never ends early.
    is_recomputed: it was preempted, and its tokens so far are computed again.
    """

    kind: SequenceKind
    requests: tuple[Request, ...]
    tokens: list[int]
    prompt_len: int
    start: int = 0
    prefixes: tuple[Sequence, ...] = ()
    max_new_tokens: int = 0
    num_draws: int = 0
    first_completion: int = 0
    num_continuations: int = 0
    continuation_tokens: int = 0
    needs_cache: bool = False
    needs_scores: bool = False
    needs_greedy: bool = False
    num_top: int = 0
    next_token: int | None = None
    num_computed: int = 0
    block: CacheBlock | None = None
    slot: int = -1
    scores: PromptScores = field(default_factory=PromptScores)
    num_readers: int = 0
    length_group: int | None = None
    is_recomputed: bool = False

    @property
    def request(self) -> Request:
        """The one request that a prompt or a continuation works for."""
        assert self.kind is not SequenceKind.SHARED_PREFIX
        return self.requests[0]

    @property
    def seat(self) -> tuple[CacheBlock, int]:
        """Its cache block, and its slot there."""
        assert self.block is not None
        return self.block, self.slot

    @property
    def is_shared(self) -> bool:
        """Whether other sequences attend to its cache; then it does not decode itself."""
        return self.kind is SequenceKind.SHARED_PREFIX or self.num_continuations > 0

    @property
    def is_prefill(self) -> bool:
        return self.num_computed < self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens to compute next. The last token of a prompt that nothing follows predicts nothing
        and is left out.
        """
        end = len(self.tokens) if self.max_new_tokens else len(self.tokens) - 1
        return max(0, end - self.num_computed)

    @property
    def targets(self) -> list[int]:
        """What the pending tokens predict, of a prompt whose scores are wanted."""
        if not (self.needs_scores and self.is_prefill):
            return []
        behind = [] if self.next_token is None else [self.next_token]
        return self.tokens[self.num_computed + 1 : self.prompt_len] + behind

    @property
    def cache_tokens(self) -> int:
        """Most cache positions that the sequence may need; the last token that may be drawn is
        never fed.
        """
        return self.prompt_len + max(0, self.max_new_tokens - 1)

    @property
    def num_cached(self) -> int:
        """Tokens that its cache has once the prompt is computed: a prompt is written whole."""
        return max(self.num_computed, self.prompt_len)

    @property
    def remaining_steps(self) -> int:
        """Most tokens that it may still append to its cache behind its prompt."""
        return self.cache_tokens - self.num_cached

    def sampling(self) -> list[SamplingParams]:
        """Return how the next tokens are drawn, one for each completion that it draws for."""
        if not self.num_draws:
            return []
        drawn = self.request.completions[
            self.first_completion : self.first_completion + self.num_draws
        ]
        return [completion.next_sampling(self.request.tokens) for completion in drawn]

    def preempt(self) -> None:
        """Leave the cache: all tokens so far become a prompt that is computed again."""
        self.max_new_tokens -= len(self.tokens) - self.prompt_len
        self.prompt_len, self.num_computed = len(self.tokens), 0
        self.block, self.slot = None, -1
        self.needs_scores = self.needs_greedy = False  # a sequence that decodes has its scores
        self.is_recomputed = True


@dataclass(frozen=True, eq=False)
class ScheduledTokens:
    """`count` tokens of a sequence in one batch, from `sequence.num_computed` on."""

    sequence: Sequence
    count: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens that are computed together, side by side; decoding sequences are in slot order, block
    by block.
    """

    scheduled: tuple[ScheduledTokens, ...]
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.scheduled)


# Predict answer lengths and the cache that they need, from a rate learnt from the run.

Array = NDArray[np.float64]

# Most passes ahead at which a forecast is evaluated, evenly spaced until the last answer must have
# ended.
_POINTS = 48
# Keeps logarithms finite.
_LARGEST_RATE = 0.999


class AnswerLengths:
    """Counts tokens and ends of answers, by group: the `max_tokens` of their requests.

    The group None has answers that never end early.
    """

    def __init__(self) -> None:
        self._drawn = Counter[int | None]()
        self._ended = Counter[int | None]()

    def count_token(self, group: int | None) -> None:
        """Count a token that was drawn."""
        self._drawn[group] += 1

    def count_end(self, group: int | None) -> None:
        """Count an answer that ended before `max_tokens`."""
        self._ended[group] += 1

    def end_rate(self, group: int | None) -> float:
        """Return the probability that a running answer ends at its next token.

        It begins as if one answer had ended after half of `max_tokens`.
        """
        if group is None:
            return 0.0
        return min(1.0, (self._ended[group] + 1) / (self._drawn[group] + group / 2))

    def expected_tokens(self, group: int | None, most: int) -> float:
        """Return the expected number of further tokens of an answer that may have `most` more."""
        rate = self.end_rate(group)
        return (
            float(most)
            if rate == 0.0
            else float(-np.expm1(most * np.log1p(-min(rate, _LARGEST_RATE))) / rate)
        )


@dataclass(frozen=True)
class CacheDemand:
    """Cache that the sequences of one block may need.

    tokens: of the longest sequence, the next one included; each slot is as wide.
    remaining: tokens that each sequence may still append.
    end_rates: of each sequence.
    constant: positions besides these, for as long as a forecast looks.
    """

    tokens: int
    remaining: list[int]
    end_rates: list[float]
    constant: int = 0


class Forecast:
    """Positions of KV cache that running answers are expected to take in the passes to come.

    Means and variances are sums over sequences, which end independently of each other.
    """

    def __init__(self, horizon: int, page_tokens: int, slot_overhead: int) -> None:
        """Begin without any sequences.

        horizon: passes until the last answer must have ended.
        slot_overhead: positions of a slot beside its tokens.
        """
        self._passes: Array = np.unique(np.linspace(0, max(1, horizon), _POINTS).round())
        self._page_tokens, self._slot_overhead = page_tokens, slot_overhead
        self._mean: Array = np.zeros(len(self._passes))
        self._variance: Array = np.zeros(len(self._passes))

    def add(self, demand: CacheDemand) -> None:
        mean, variance = self._moments(demand)
        self._mean, self._variance = self._mean + mean, self._variance + variance

    def peak_with(self, demand: CacheDemand) -> float:
        """Return the largest expectation, plus a standard deviation, with one block more."""
        mean, variance = self._moments(demand)
        return float(np.max(self._mean + mean + np.sqrt(self._variance + variance)))

    def _moments(self, demand: CacheDemand) -> tuple[Array, Array]:
        """Return mean and variance of a block's positions, by pass.

        A sequence with end rate r still runs at pass t with probability p = (1 - r)^t, and 0 once
        its tokens are used up. Its slot then has s positions: means are sums of p s, variances of p
        (1 - p) s^2.
        """
        if not demand.remaining:
            return np.full(len(self._passes), float(demand.constant)), np.zeros(len(self._passes))
        remaining = np.array(demand.remaining, dtype=np.float64)[:, None]
        rates = np.minimum(np.array(demand.end_rates), _LARGEST_RATE)[:, None]
        running = np.exp(self._passes * np.log1p(-rates)) * (self._passes <= remaining)
        most = float(remaining.max())
        # Slots grow by pages, and at last to the longest sequence's end.
        slot = np.ceil((demand.tokens + self._passes) / self._page_tokens) * self._page_tokens
        slot = np.minimum(slot, demand.tokens + most) + self._slot_overhead
        return demand.constant + (running * slot).sum(0), (running * (1 - running) * slot**2).sum(0)
