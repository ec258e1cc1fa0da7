"""A request while it runs: its completions, their ends, and its share of the work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from flexgen_helm.engine.sampler import SamplingParams, uniform_draw
from flexgen_helm.request import Completion, Cost, FinishReason, GenerationRequest, GenerationResult
from flexgen_helm.tokenizer.stop_strings import StopMatcher


class RunningCompletion:
    """One continuation that grows token by token."""

    def __init__(self, request: GenerationRequest, index: int, token_bytes: Callable[[int], bytes] | None) -> None:
        self._request = request
        self._index = index
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._matcher = StopMatcher(token_bytes, request.stop) if token_bytes else None
        self.finish_reason: FinishReason | None = None
        self.num_drawn = 0

    def next_draw(self) -> SamplingParams:
        request = self._request
        if request.temperature == 0.0:
            return SamplingParams(0.0, 1.0, 0.0)
        return SamplingParams(
            request.temperature, request.top_p, uniform_draw(request.seed, self._index, self.num_drawn)
        )

    def push(self, token: int, logprob: float, eos_ids: Collection[int]) -> bool:
        """Take a drawn token; true when the completion has ended."""
        self.num_drawn += 1
        if token in eos_ids and not self._request.ignore_eos:
            self.finish_reason = "endoftext"
            return True
        self._ids.append(token)
        self._logprobs.append(logprob)
        if self._matcher is not None and self._matcher.push(token):
            self.finish_reason = "stop"
        elif self.num_drawn == self._request.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def result(self) -> Completion:
        reason = self.finish_reason or "length"
        if self._matcher is None:  # no tokenizer: ids only
            return Completion("", ("",) * len(self._ids), tuple(self._ids), tuple(self._logprobs), reason)
        kept = self._matcher.result()
        return Completion(kept.text, kept.tokens, kept.token_ids, tuple(self._logprobs[: kept.n_kept]), reason)


class RunningPrefix:
    """A beginning that several requests share, made after the longer ones that some of them share. scores: as a
    request's, up to the token that all go on with."""

    def __init__(self, users: Sequence["RunningRequest"]) -> None:
        self._users = users
        self.scores: list[float] = []
        for user in users:
            user.prefixes.insert(0, self)

    def charge(self, prefill: bool, tokens: float, flops: float, seconds: float, batch_size: int) -> None:
        """Split the cost of a batch evenly."""
        share = 1 / len(self._users)
        for user in self._users:
            user.charge(prefill, tokens * share, flops * share, seconds * share, batch_size)

    def fail(self, error: Exception) -> None:
        for user in self._users:
            user.fail(error)


class RunningRequest:
    """One distinct request, and the places in the caller's list that asked for it.

    tokens: the prompt as fed. context: leading tokens of it that the caller did not ask for (the BOS that an empty
    prompt is conditioned on).
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokens: Sequence[int],
        context: int,
        token_bytes: Callable[[int], bytes] | None,
    ) -> None:
        self.request = request
        self.tokens = list(tokens)
        self.context = context
        self.places: list[int] = []
        # At temperature 0 all completions are one.
        self.num_branches = 1 if request.temperature == 0.0 else request.n
        wanted = self.num_branches if request.max_tokens else 0
        self.completions = [RunningCompletion(request, i, token_bytes) for i in range(wanted)]
        self.prefixes: list[RunningPrefix] = []  # outermost first
        self.scores: list[float] = []  # of what no prefix has
        self.error: Exception | None = None
        self.rows_left = 0
        self._cost = Cost(prompt_tokens=len(self.tokens) - context)

    @property
    def max_computed_tokens(self) -> int:
        """Upper bound of tokens that pass through the model for this request."""
        return len(self.tokens) + self.num_branches * max(0, self.request.max_tokens - 1)

    def fail(self, error: Exception) -> None:
        self.error = error

    def charge(self, prefill: bool, tokens: float, flops: float, seconds: float, batch_size: int) -> None:
        """Add the request's share of one batch."""
        cost = self._cost
        self._cost = replace(
            cost,
            prompt_tokens_computed=cost.prompt_tokens_computed + (tokens if prefill else 0),
            flops=cost.flops + flops,
            prefill_s=cost.prefill_s + (seconds if prefill else 0.0),
            decode_s=cost.decode_s + (0.0 if prefill else seconds),
            batch_size=max(cost.batch_size, batch_size),
        )

    def results(self) -> list[GenerationResult]:
        """One result for each place; the cost is split evenly among them."""
        request = self.request
        asked = tuple(self.tokens[self.context :])
        if self.error is not None:
            return [GenerationResult(prompt_token_ids=asked, error=self.error) for _ in self.places]
        done = [completion.result() for completion in self.completions]
        if not done:
            done = [Completion("", (), (), (), "length")]
        copies = done * request.n if len(done) == 1 else done
        logprobs = None
        if request.echo_logprobs:
            # scores[i] is the log-probability of tokens[i + 1]
            scores = [score for prefix in self.prefixes for score in prefix.scores] + self.scores
            logprobs = (None, *scores)[self.context :] if asked else ()
        share = 1.0 / len(self.places)
        drawn = sum(completion.num_drawn for completion in self.completions)
        output = drawn * (request.n if len(done) == 1 else 1)
        cost = replace(
            self._cost,
            output_tokens=output,
            prompt_tokens_computed=self._cost.prompt_tokens_computed * share,
            padded_prompt_tokens=float(self._cost.prompt_tokens),
            padded_output_tokens=float(output),
            flops=self._cost.flops * share,
            prefill_s=self._cost.prefill_s * share,
            decode_s=self._cost.decode_s * share,
        )
        return [GenerationResult(tuple(copies), asked, logprobs, None, cost) for _ in self.places]
