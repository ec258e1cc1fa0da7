"""What moves through the model: requests with their completions, the sequences that are made of
them, cache blocks, and the batches of a pass. No torch.

A request becomes one or more sequences, lines of tokens that have caches:

    SHARED_PREFIX   "Answer the question. Q: … A: …"      computed once for several requests
      PROMPT          "Q: 2 + 2 = ? A:"                   attends to the prefix; decodes there ...
        CONTINUATION    " 4"                              ... or each completion is a sequence
"""

from __future__ import annotations

import enum
from collections import abc
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from flexgen_helm.errors import RequestError
from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.request import (
    Completion,
    Cost,
    DrawnToken,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    TopLogprobs,
)
from flexgen_helm.scheduling.prefix_tree import Prompt
from flexgen_helm.scheduling.sampling_params import SamplingParams, draw_key
from flexgen_helm.tiers import Tier
from flexgen_helm.tokenizer.stop_strings import StopMatcher
from flexgen_helm.tokenizer.thinking import ThinkingTracker

Score = TypeVar("Score")


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
        """Take the tokens that an earlier run has drawn; those behind the end are left out."""
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
        """Return the completion so far, up to a stop string."""
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

    original: what the caller asked for.
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
        self.original = request
        self.tokens = list(tokens)
        self.num_context = num_context
        self.indices: list[int] = []
        # Without tokens, and at temperature 0, all completions are the same.
        self.num_completions = (
            1 if request.temperature == 0.0 or not request.max_tokens else request.n
        )
        # A prompt that is only scored has none in progress.
        in_progress = range(self.num_completions if request.max_tokens else 0)
        self.completions = [CompletionState(request, i, token_bytes) for i in in_progress]
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
        for completion, drawn in zip(self.completions, self.original.drawn):
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
        """Return one equal result for each index.

        Computed tokens, FLOPs and seconds are split evenly among them; prompt and output tokens
        count in full for each.
        """
        request = self.original
        prompt_ids = tuple(self.tokens[self.num_context :])
        if self.error is not None:
            return [
                GenerationResult(prompt_token_ids=prompt_ids, error=self.error)
                for _ in self.indices
            ]
        completions = [completion.result() for completion in self.completions] or [
            Completion("", (), (), (), "length")
        ]
        # All completions are the same where one was computed for all.
        repeats = request.n if len(completions) == 1 else 1
        scored = [sequence.scores for sequence in self.scored]
        logprobs = greedy = top = None
        if request.echo_logprobs:
            logprobs = self._of_prompt_tokens(
                value for scores in scored for value in scores.logprobs
            )
        if request.echo_greedy:
            greedy = self._of_prompt_tokens(value for scores in scored for value in scores.greedy)
        if request.echo_logprobs and (count := request.top_logprobs):
            # A shared prefix has as many as the user who wants most.
            top = self._of_prompt_tokens(value[:count] for scores in scored for value in scores.top)
        share = 1.0 / len(self.indices)
        num_drawn = sum(completion.num_drawn for completion in self.completions)
        output_tokens = num_drawn * repeats
        cost = Cost(
            prompt_tokens=len(prompt_ids),
            prompt_tokens_computed=self._prompt_tokens_computed * share,
            output_tokens=output_tokens,
            padded_prompt_tokens=float(len(prompt_ids)),
            padded_output_tokens=float(output_tokens),
            flops=self._flops * share,
            prefill_s=self._prefill_s * share,
            decode_s=self._decode_s * share,
            batch_size=self._batch_size,
        )
        return [
            GenerationResult(
                tuple(completions * repeats), prompt_ids, logprobs, None, cost, greedy, top
            )
            for _ in self.indices
        ]

    def without_resumed(self, cost: Cost) -> Cost:
        """Return the cost of one of its results without the output tokens of earlier runs."""
        if not self.num_resumed:
            return cost
        num_drawn = sum(completion.num_drawn for completion in self.completions)
        output_tokens = cost.output_tokens * (num_drawn - self.num_resumed) // num_drawn
        return replace(cost, output_tokens=output_tokens, padded_output_tokens=float(output_tokens))

    def prefix_users(self, by_completion: bool) -> list[Prompt]:
        """Return its prompt as the tree of shared prefixes sees it, once for each sequence that
        computes it.

        by_completion: continuations of one prompt cannot attend to the cache of all of it, so each
            completion computes the prompt.
        """
        original, num_unfinished = self.original, len(self.unfinished)
        # nothing follows: the last one is not fed
        fed = self.tokens if num_unfinished else self.tokens[:-1]
        prompt = Prompt(fed, original.echo_logprobs, original.max_fed_tokens)
        # Completions that were interrupted are prompts of their own.
        apart = self.num_resumed or (by_completion and original.max_fed_tokens)
        return [prompt] * (max(1, num_unfinished) if apart else 1)

    def _of_prompt_tokens(self, scores: Iterable[Score]) -> tuple[Score | None, ...]:
        """Return the score of each prompt token that the caller gave: scores[i] is of
        tokens[i + 1], and the first token has none.
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
    block, slot: where its cache lies, while it has one; else None and -1.
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
        following = [] if self.next_token is None else [self.next_token]
        return self.tokens[self.num_computed + 1 : self.prompt_len] + following

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
        end = self.first_completion + self.num_draws
        completions = self.request.completions[self.first_completion : end]
        return [completion.next_sampling(self.request.tokens) for completion in completions]

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


# From a request to its sequences


class _CompletionGroup(NamedTuple):
    """Completions that continue one prompt.

    first, size: index of the first, and how many.
    known_ids: tokens that an interrupted run has drawn of the first.
    """

    first: int
    size: int
    known_ids: list[int]


def make_sequences(
    request: Request, prefixes: tuple[Sequence, ...], limits: SchedulerLimits, shares_prompts: bool
) -> list[Sequence]:
    """Return the sequences of one request behind its shared prefixes; the request learns of them.

    Several completions continue one prompt's cache. Those that do not fit at once are split over
    several sequences of the prompt, each of which computes it anew. One that was interrupted has
    its tokens behind the prompt.

    shares_prompts: whether a sequence can attend to all of another's cache; if not, each completion
        computes the prompt.
    Raises `RequestError` where not even one completion fits.
    """
    original, num_completions = request.original, request.num_completions
    at_once = _completions_at_once(request, len(prefixes), limits, shares_prompts)
    groups: list[_CompletionGroup] = []
    if original.max_fed_tokens or request.num_resumed:
        for first in request.unfinished[::at_once]:
            count = min(at_once, num_completions - first)
            groups.append(_CompletionGroup(first, count, request.completions[first].ids))
    elif original.max_tokens:  # one token each, all drawn from the prompt's last position
        groups.append(_CompletionGroup(0, num_completions, request.completions[0].ids))
    prompts = [
        _prompt_sequence(request, prefixes, group, branches=at_once > 1, is_first=number == 0)
        for number, group in enumerate(groups or [_CompletionGroup(0, 0, [])])
    ]
    request.num_sequences += len(prompts)
    if original.echo_logprobs:
        request.scored = (*prefixes, prompts[0])
    return prompts


def _prompt_sequence(
    request: Request,
    prefixes: tuple[Sequence, ...],
    group: _CompletionGroup,
    branches: bool,
    is_first: bool,
) -> Sequence:
    """Return the sequence of a prompt.

    branches: its completions are continuations, sequences of their own.
    is_first: of the request's prompts, which is the one that is scored.
    """
    original, start = request.original, sum(prefix.prompt_len for prefix in prefixes)
    tokens = [*request.tokens[start:], *group.known_ids]
    left = original.max_tokens - len(group.known_ids) if group.size else 0
    return Sequence(
        SequenceKind.PROMPT,
        (request,),
        tokens,
        len(tokens),
        start,
        prefixes,
        # 1 where it branches: the last token is fed, but what follows it lives in continuations.
        max_new_tokens=1 if branches else left,
        num_draws=group.size,
        first_completion=group.first,
        num_continuations=group.size if branches else 0,
        continuation_tokens=original.max_fed_tokens if branches else 0,
        needs_cache=left > 1,
        needs_scores=original.echo_logprobs and is_first,
        needs_greedy=original.echo_greedy and is_first,
        num_top=original.top_logprobs,
        length_group=request.length_group,
    )


def _completions_at_once(
    request: Request, num_prefixes: int, limits: SchedulerLimits, shares_prompts: bool
) -> int:
    """Return how many completions continue the cache of one prompt; with 1 each continues a prompt
    of its own.

    Raises `RequestError` where not even one completion fits.
    """
    steps, completions = request.original.max_fed_tokens, request.num_completions
    room, slots = limits.cache_tokens, 1 + num_prefixes
    needed = len(request.tokens) + steps * (1 + limits.step_overhead) + slots * limits.slot_overhead
    if steps and needed > room:
        raise RequestError(
            f"the request needs a KV cache of {needed} tokens and the memory limit leaves room for "
            f"{room}; raise the limit (--cpu-memory, --gpu-memory) or lower max_tokens"
        )
    if completions == 1 or not steps or not shares_prompts or request.num_resumed:
        return 1
    # As `needed` counts one completion: its prompt has a slot, and each continuation has another,
    # of a page where it grows by pages (`SchedulerLimits`).
    reserved = min(steps, limits.page_tokens or steps) + limits.slot_overhead
    num_fitting = 1 + (room - needed - limits.slot_overhead) // reserved
    return max(
        1, min(completions, num_fitting, limits.max_sequences - 1, limits.max_states - slots)
    )
