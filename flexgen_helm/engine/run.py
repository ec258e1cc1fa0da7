"""One call of `Engine.run`: the passes over its sequences until every request has its result, and
who is told of results, tokens and progress meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import Counter, abc
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch

from flexgen_helm.engine.executor import BatchOutput, Executor, SequenceOutput
from flexgen_helm.engine.passes import Pass
from flexgen_helm.errors import MemoryLimitError, NumericalError, RequestError
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.progress import Progress
from flexgen_helm.request import Cost, DrawnToken, GenerationResult
from flexgen_helm.scheduling.forecast import AnswerLengths
from flexgen_helm.scheduling.prefix_tree import (
    PrefixCostModel,
    PrefixNode,
    dissolve,
    prefixes_of,
    shared_prefixes,
)
from flexgen_helm.scheduling.prepare import token_refusal
from flexgen_helm.scheduling.scheduler import Scheduler
from flexgen_helm.scheduling.sequence import (
    Batch,
    Request,
    ScheduledTokens,
    Sequence,
    SequenceKind,
    make_sequences,
)
from flexgen_helm.scheduling.stage_visits import work_items
from flexgen_helm.shared_sizes import KEEP_EVERY_S
from flexgen_helm.tiers import MEMORY_ADVICE

# Called with the index of a request, and its result.
OnResult = Callable[[int, GenerationResult], None]
# Called with the index of a request, completion, step and token; returns the seconds that drawn
# tokens wait to be stored, None if they are not.
OnDrawn = Callable[[int, int, int, DrawnToken], float | None]
# Seconds between two reports of progress in the middle of a batch.
_REPORT_EVERY_S = 0.1


class Position(NamedTuple):
    """Where a run is: the number of its pass, and the layer of how many; 0 before the first."""

    pass_number: int
    layer: int
    num_layers: int


class ResultCollector:
    """The results of one call of `Engine.run`, each reported as soon as it is known, and the
    progress towards them.
    """

    def __init__(
        self,
        num_requests: int,
        on_result: OnResult | None,
        progress: Callable[[Progress], None] | None = None,
        on_drawn: OnDrawn | None = None,
    ) -> None:
        self._results: list[GenerationResult | None] = [None] * num_requests
        self._on_result, self.progress, self._on_drawn = on_result, progress, on_drawn
        self.began = time.perf_counter()
        self._num_finished = 0
        self._reported_at = 0.0
        self.position = Position(0, 0, 0)
        self._keep_s = KEEP_EVERY_S if on_drawn else None
        self._pass_began = self._last_pass_s = self._restart_s = 0.0
        self.runs: list[Run] = []

    @property
    def goes_on(self) -> bool:
        """Whether a run that is stopped goes on later, because what it draws is kept."""
        return self._on_drawn is not None

    def deliver(self, index: int, result: GenerationResult) -> None:
        """Take the result of the request with this index, and report it."""
        self._results[index] = result
        self._num_finished += 1
        if self._on_result is not None:
            self._on_result(index, result)

    def begin_pass(self) -> None:
        """Note what is computed again if the run ends in this pass."""
        now = time.perf_counter()
        self._last_pass_s = now - (self._pass_began or now)
        self._pass_began = now
        self._restart_s = sum(run.restart_s for run in self.runs)

    def _stop_s(self, now: float) -> float:
        """Return the seconds of work that are lost if the run is stopped now."""
        if self._keep_s is None:
            return 0.0
        return self._keep_s + max(self._last_pass_s, now - self._pass_began) + self._restart_s

    def note(self, request: Request, completion: int, step: int, drawn: DrawnToken) -> None:
        """Report a token of a request that has not ended."""
        if self._on_drawn is not None:
            for index in request.indices:
                self._keep_s = self._on_drawn(index, completion, step, drawn)

    def results(self) -> list[GenerationResult]:
        """Return all results, in the order of the requests."""
        assert self._num_finished == len(self._results), "a request was never answered"
        return [result for result in self._results if result is not None]

    def costs(self) -> list[Cost]:
        """Return what each request cost in this call: without tokens that an earlier one drew."""
        costs = [result.cost for result in self.results()]
        for request in chain.from_iterable(run.requests for run in self.runs):
            for index in request.indices:
                costs[index] = request.without_resumed(costs[index])
        return costs

    def report(self, *, at_once: bool = True) -> None:
        """Report progress; at_once: even if it was reported just now."""
        now = time.perf_counter()
        if not at_once and now - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = now
        if self.progress is None:
            return
        tokens = sum(run.computed_tokens for run in self.runs)
        total = max(tokens, sum(run.expected_tokens for run in self.runs))
        self.progress(
            Progress(
                tokens,
                round(total),
                self._num_finished,
                len(self._results),
                now - self.began,
                {},
                *self.position,
                stop_s=self._stop_s(now),
            )
        )


class Run:
    """Some requests of one call of `Engine.run`: all of them, or a lane's where ranks of a pipeline
    take turns.

    requests: as given.
    halvings: how often batches were halved because memory ran out.
    num_preempted: how often a sequence gave its cache back and was computed again.
    most_at_once: most sequences of a pass, without shared prefixes; at least 1.
    saved_tokens: prompt tokens that were not computed because sequences share them.
    """

    def __init__(
        self,
        executor: Executor,
        plan: RunPlan,
        requests: abc.Sequence[Request],
        answers: ResultCollector,
        prefix_cost: PrefixCostModel,
    ) -> None:
        """prefix_cost: what sharing a prefix costs; how much room there is follows from the plan's
        limits.
        """
        self._executor, self._cache, self._config = executor, executor.cache, executor.model.config
        self.requests, self._limits, self._schedule = requests, plan.limits, plan.schedule
        self._prefix_cost, self._answers = prefix_cost, answers
        self.halvings = 0
        self.saved_tokens = 0
        self.most_at_once = 1
        self._done_tokens = 0.0
        self._items_begun: Counter[Batch] = Counter()  # of batches on their way through the stages
        self._in_flight: list[Batch] = []  # that other ranks go on with
        self._lengths = AnswerLengths()
        waiting = self._queue(requests)
        self.goes_on = bool(waiting)  # for certain, unless sequences end early
        self._scheduler = Scheduler(waiting, plan.limits, self._lengths)
        # known before its lane's first turn
        self.expected_tokens = self._scheduler.expected_tokens()
        answers.runs.append(self)

    @property
    def num_preempted(self) -> int:
        return self._scheduler.num_preempted

    @property
    def restart_s(self) -> float:
        """Seconds of computing the prompts of unfinished answers again when an interrupted run goes
        on.
        """
        return sum(
            request.restart_s
            for request in {sequence.request for sequence in self._scheduler.running}
        )

    @property
    def computed_tokens(self) -> float:
        """Tokens computed so far; of a batch between two stages, the share that has been
        computed.
        """
        begun = sum(batch.num_tokens * (items - 1) for batch, items in self._items_begun.items())
        return self._done_tokens + begun / self._executor.num_stages

    def start_pass(self, should_stop: Callable[[], bool], another_lane: bool = False) -> bool:
        """Compute a pass, or its stages that are here; False if nothing is left to compute.

        another_lane: a pass of one is certain to follow.
        Raises `Interrupted`; finished requests were reported.
        """
        batches = self._next_pass()
        if not batches:
            self.goes_on = False
            return False
        at_once = sum(
            item.sequence.kind is not SequenceKind.SHARED_PREFIX
            for b in batches
            for item in b.scheduled
        )
        self.most_at_once = max(self.most_at_once, at_once)
        self.goes_on = self._scheduler.another_pass_follows(batches)
        self._answers.begin_pass()
        self._pass(batches, self.goes_on or another_lane, should_stop)
        return True

    def finish_pass(self) -> None:
        """Wait for the outputs of the pass that other ranks have gone on with, if there is one."""
        batches, self._in_flight = self._in_flight, []
        for batch in batches:
            self._on_batch(self._executor.collect(batch))

    # Making sequences

    def _queue(self, requests: abc.Sequence[Request]) -> list[Sequence]:
        """Return the sequences to compute, each shared prefix before its users."""
        computed = []
        for request in requests:
            needs_scores = request.original.echo_logprobs and len(request.tokens) > 1
            if request.unfinished or needs_scores:
                computed.append(request)
            else:
                self._finish(request)
        limits, multiple = self._limits, self._cache.prefix_multiple
        forest: list[PrefixNode | int] = list(range(len(computed)))
        if multiple is not None and self._prefix_cost.overhead < math.inf:
            cost = replace(
                self._prefix_cost,
                room=limits.cache_tokens,
                group_tokens=math.lcm(multiple, self._prefix_cost.group_tokens),
                slot_overhead=limits.slot_overhead,
                step_overhead=limits.step_overhead,
            )
            by_completion = not self._cache.shares_prompts
            users = (request.prefix_users(by_completion) for request in computed)
            forest = shared_prefixes(users, cost)
            while not self._has_room(forest):  # prefixes that save least are dissolved first
                prefixes = sorted(prefixes_of(forest), key=lambda prefix: prefix.saved)
                forest = dissolve(forest, set(prefixes[: -(-len(prefixes) // 8)]))
        waiting: list[Sequence] = []
        self._add_sequences(forest, (), computed, waiting)
        return waiting

    def _has_room(self, forest: abc.Sequence[PrefixNode | int]) -> bool:
        """Return whether all prefixes that are needed at once have room.

        They are those of one sequence, or, in a single pass, all.
        """
        limits = self._limits
        if not self._schedule.is_single_pass:
            return _depth(forest) < limits.max_states
        prefixes = list(prefixes_of(forest))
        positions = sum(prefix.end - prefix.start + limits.slot_overhead for prefix in prefixes)
        return positions <= limits.cache_tokens and len(prefixes) <= limits.max_states

    def _add_sequences(
        self,
        members: abc.Sequence[PrefixNode | int],
        prefixes: tuple[Sequence, ...],
        requests: abc.Sequence[Request],
        waiting: list[Sequence],
    ) -> int:
        """Append the sequences of a forest's members to `waiting`; return how many read all of
        `prefixes`.
        """
        num_readers = 0
        for member in dict.fromkeys(members):  # the completions of a request come with it
            if isinstance(member, PrefixNode):
                prefix = self._shared_prefix(member, prefixes, requests)
                index = len(waiting)
                waiting.append(prefix)
                prefix.num_readers = self._add_sequences(
                    member.members, (*prefixes, prefix), requests, waiting
                )
                if prefix.num_readers:
                    num_readers += prefix.num_readers + 1
                    prefix.requests = tuple(user for user in prefix.requests if user.error is None)
                    num_users = sum(requests[user].error is None for user in member.users)
                    self.saved_tokens += prefix.prompt_len * (num_users - 1)
                else:  # all its users were refused
                    del waiting[index]
                continue
            request = requests[member]
            try:
                prompts = make_sequences(
                    request, prefixes, self._limits, self._cache.shares_prompts
                )
            except RequestError as error:
                request.error = error
                self._finish(request)
                continue
            waiting += prompts
            self.saved_tokens += (max(1, len(request.unfinished)) - len(prompts)) * len(
                request.tokens
            )
            num_readers += len(prompts)
        return num_readers

    def _shared_prefix(
        self, node: PrefixNode, prefixes: tuple[Sequence, ...], requests: abc.Sequence[Request]
    ) -> Sequence:
        """Return the sequence of a shared prefix, behind those that precede it."""
        users = [requests[user] for user in dict.fromkeys(node.users)]
        scored = any(user.original.echo_logprobs for user in users)
        return Sequence(
            SequenceKind.SHARED_PREFIX,
            tuple(users),
            users[0].tokens[node.start : node.end],
            node.end - node.start,
            node.start,
            prefixes,
            max_new_tokens=1,
            needs_cache=True,
            needs_scores=scored,
            needs_greedy=any(user.original.echo_greedy for user in users),
            num_top=max(user.original.top_logprobs for user in users),
            next_token=users[0].tokens[node.end] if scored else None,
        )

    # Passes

    def _next_pass(self) -> list[Batch]:
        """Make room in the cache for the next tokens and return the batches of the next pass."""
        changes = self._scheduler.make_room()
        for block in changes.freed:
            self._cache.free(block)
        for regroup in changes.regroups:
            try:
                self._cache.regroup(regroup.block, regroup.sources)
            except (MemoryError, MemoryLimitError, RuntimeError) as error:
                if not isinstance(error, MemoryLimitError) and not _is_out_of_memory(error):
                    raise
                if not (
                    self._executor.model.pipeline.is_whole
                    and self._scheduler.preempt_block(regroup.block)
                ):
                    raise MemoryLimitError(
                        f"the KV cache of one sequence does not fit any more: {error}"
                    ) from error
        # Before the pass takes its prompts from the queue: they are yet to be computed, too.
        self.expected_tokens = self._done_tokens + self._scheduler.expected_tokens()
        return self._scheduler.next_pass()

    def _pass(
        self, batches: abc.Sequence[Batch], another_pass: bool, should_stop: Callable[[], bool]
    ) -> None:
        """Run one pass; where memory runs out, go on in half batches, and so in all later
        passes.
        """
        done: set[Batch] = set()
        # of this rank's stages
        config, number = self._executor.model.decoder.config, self._answers.position.pass_number + 1

        def on_batch(output: BatchOutput) -> None:
            done.add(output.batch)
            self._on_batch(output)

        def on_item(batch: Batch) -> None:
            self._items_begun[batch] += 1
            layer = max(1, self._items_begun[batch] - config.has_embedding)
            layer = min(layer, config.num_layers)
            self._answers.position = Position(number, layer, config.num_layers)

        def must_stop() -> bool:
            self._answers.report(at_once=False)
            return should_stop()

        while True:
            first = self._executor.first_stage(batches)
            items = work_items(self._schedule, self._executor.num_stages, len(batches))
            items = [item for item in items if item.stage >= first]
            self._items_begun.update(dict.fromkeys(batches, first))
            try:
                self._executor.run(Pass(batches, items, on_batch, on_item, must_stop, another_pass))
                self._in_flight = [batch for batch in batches if batch not in done]
                return
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                if not self._executor.model.pipeline.is_whole:
                    raise MemoryLimitError(
                        f"memory ran out with {max(batch.num_tokens for batch in batches)} tokens "
                        f"in a batch, and ranks of a pipeline cannot divide it; {MEMORY_ADVICE}"
                    ) from error
                # What was written to the cache is written again, the same; sequences that are done
                # stay done.
                left = [batch for batch in batches if batch not in done]
                if self._cache.one_layer:
                    left = [
                        *_shared_prefixes_again(batch for batch in batches if batch in done),
                        *left,
                    ]
                # none: in the bookkeeping of the last one
                halves = self._scheduler.halve(left) if left else []
                if len(halves) == len(left):
                    raise MemoryLimitError(
                        f"memory ran out with {max((b.num_tokens for b in left), default=0)} "
                        f"tokens in a batch that cannot be divided; {MEMORY_ADVICE}"
                    ) from error
                self._executor.expert_tokens = 0  # from now on none waits for another's experts
                batches, self.halvings = halves, self.halvings + 1
                done.clear()
                self._items_begun.clear()

    def _on_batch(self, output: BatchOutput) -> None:
        """Take the output of a batch that has passed its last stage."""
        del self._items_begun[output.batch]
        self._account(output)
        self._answers.report()

    def _account(self, output: BatchOutput) -> None:
        """Charge a finished batch to its requests, and advance its sequences."""
        items = output.batch.scheduled
        flops = [self._flops(item, output.batch.is_prefill) for item in items]
        total = sum(flops)
        for item, item_flops, computed in zip(items, flops, output.outputs):
            requests = item.sequence.requests
            share = 1 / len(requests)
            seconds = output.seconds * item_flops / total
            is_prompt = output.batch.is_prefill and not item.sequence.is_recomputed
            for request in requests:
                request.charge(
                    is_prompt, item.count * share, item_flops * share, seconds * share, len(items)
                )
            self._done_tokens += item.count
            self._advance(item.sequence, computed)

    def _advance(self, sequence: Sequence, output: SequenceOutput) -> None:
        """Give a sequence's scores and drawn tokens to its requests; end it, or let it go on."""
        if output.nonfinite_stage is not None:
            for request in sequence.requests:
                advice = self._executor.model.nonfinite_advice
                where = f"a value that is not finite appeared at stage {output.nonfinite_stage}"
                request.error = NumericalError(f"{where}; {advice}")
        if output.scores.logprobs:  # assigned: a shared prefix may be computed again
            sequence.scores = output.scores
        if sequence.kind is SequenceKind.SHARED_PREFIX:
            return
        request = sequence.request
        if request.error is not None:
            if sequence.is_shared:
                self._scheduler.branch(sequence, [])
            self._end(sequence)
            return
        alive = []  # completions that go on, with their newest token
        for offset, drawn in enumerate(output.drawn):
            index = sequence.first_completion + offset
            completion = request.completions[index]
            step = completion.num_drawn
            self._lengths.count_token(request.length_group)
            if not completion.push(drawn, self._executor.model.eos_ids):
                alive.append((index, drawn.token))
                request.error = request.error or token_refusal([drawn.token], self._config)
            elif completion.finish_reason != "length":
                self._lengths.count_end(request.length_group)
            if request.error is None:
                self._answers.note(request, index, step, drawn)
        if sequence.is_shared:
            self._branch(sequence, alive)
        elif alive:
            sequence.tokens.append(alive[0][1])
        else:
            self._end(sequence)

    def _branch(self, prompt: Sequence, alive: list[tuple[int, int]]) -> None:
        """Let the completions of a prompt go on as sequences of their own that attend to the
        prompt's cache.
        """
        prefixes = (*prompt.prefixes, prompt)
        continuations = [
            Sequence(
                SequenceKind.CONTINUATION,
                prompt.requests,
                [token],
                0,
                prompt.start + prompt.prompt_len,
                prefixes,
                max_new_tokens=prompt.request.original.max_tokens,
                num_draws=1,
                first_completion=index,
                needs_cache=True,
                num_top=prompt.num_top,
                length_group=prompt.length_group,
            )
            for index, token in alive
        ]
        self._scheduler.branch(prompt, continuations)
        if not continuations:
            self._end(prompt)
            return
        for prefix in prefixes:
            prefix.num_readers += len(continuations)
        prompt.request.num_sequences += len(continuations) - 1  # they speak for the prompt now

    # Endings

    def _end(self, sequence: Sequence) -> None:
        """End a sequence, and its request with the last of its sequences."""
        self._release(sequence)
        request = sequence.request
        request.num_sequences -= 1
        if not request.num_sequences:
            self._finish(request)

    def _release(self, sequence: Sequence) -> None:
        """Give back the sequence's slot, and those of its prefixes that nobody reads any more."""
        move = self._scheduler.retire(sequence)
        if move is not None:
            if not move.block.sequences:
                self._cache.free(move.block)
            elif move.source is not None:
                self._cache.move(
                    move.block, move.source, move.target, move.tokens, move.stale_tokens
                )
        for prefix in sequence.prefixes:
            prefix.num_readers -= 1
            if not prefix.num_readers:
                self._release(prefix)

    def _finish(self, request: Request) -> None:
        """Deliver the results of a request whose sequences have all ended."""
        for index, result in zip(request.indices, request.results()):
            self._answers.deliver(index, result)

    def _flops(self, item: ScheduledTokens, is_prefill: bool) -> float:
        """Return the operations of scheduled tokens: linear layers, attention to what each sees,
        and the head at positions that are scored or drawn from.
        """
        config, sequence, count = self._config, item.sequence, item.count
        # on average; num_computed counts these tokens already
        visible = sequence.start + sequence.num_computed - count + (count + 1) / 2
        positions = int(sequence.num_draws > 0)
        if sequence.needs_scores and is_prefill:
            positions += min(count, sequence.prompt_len - (sequence.next_token is None))
        return (
            config.linear_flops_per_token * count
            + config.attention_flops(1, 1) * count * visible
            + config.head_flops_per_token * positions
        )


def finish(runs: abc.Sequence[Run], should_stop: Callable[[], bool]) -> None:
    """Compute passes until nothing is left: of one run, or of several in turn, which keep a
    pipeline's ranks busy.
    """
    active = list(runs)
    while active:
        for run in list(active):
            run.finish_pass()
            if not run.start_pass(
                should_stop, any(lane.goes_on for lane in active if lane is not run)
            ):
                active.remove(run)


def _shared_prefixes_again(done: Iterable[Batch]) -> list[Batch]:
    """Return batches that compute the shared prefixes of finished batches again, those that still
    have readers.

    After an out-of-memory in prefill-only what is left passes all layers again, and the cache keeps
    one layer only.
    """
    prefixes = [
        item.sequence for batch in done for item in batch.scheduled if item.sequence.num_readers
    ]
    for prefix in prefixes:
        prefix.num_computed = 0
    return [Batch((ScheduledTokens(prefix, prefix.num_pending),), True) for prefix in prefixes]


def _depth(forest: abc.Sequence[PrefixNode | int]) -> int:
    """Return the most prefixes on a path of the forest."""
    return max(
        (1 + _depth(member.members) for member in forest if isinstance(member, PrefixNode)),
        default=0,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Detect an out-of-memory error by its type, or by its message where driver or host have no
    type for it.
    """
    words = "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in words
    )
