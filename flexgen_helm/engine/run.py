"""One run of the engine: rows through passes until every request has its answer."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch

from flexgen_helm.engine.executor import BatchOutput, Executor, SequenceOutput
from flexgen_helm.engine.prefix_tree import PrefixCostModel, PrefixNode, dissolve, prefixes_of
from flexgen_helm.engine.prepare import PreparedRequests, make_sequences, shared_prefixes
from flexgen_helm.engine.running_request import RunningPrefix, RunningRequest
from flexgen_helm.engine.sampler import SamplingParams
from flexgen_helm.engine.schedule import work_items
from flexgen_helm.engine.scheduler import Scheduler
from flexgen_helm.errors import MemoryLimitError, NumericalError, RequestError
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.memory import SchedulerLimits
from flexgen_helm.planner.policy import Schedule
from flexgen_helm.request import GenerationRequest, GenerationResult, Progress
from flexgen_helm.sequence import Admission, Batch, ScheduledTokens, Sequence

OnResult = Callable[[int, GenerationResult], None]


class Run:
    """State of one call of `Engine.run`. Results are reported the moment a request is finished."""

    def __init__(
        self,
        config: ModelConfig,
        executor: Executor,
        cache: KVCache,
        limits: SchedulerLimits,
        schedule: Schedule,
        eos_ids: Collection[int],
        rules: PrefixCostModel,
    ) -> None:
        """rules: what sharing a prefix costs; how much room there is, the limits say."""
        self._config = config
        self._executor = executor
        self._cache = cache
        self._limits = limits
        self._schedule = schedule
        self._eos_ids = eos_ids
        self._rules = rules
        self._readers: dict[Sequence, int] = {}  # of a trunk: rows that need its cache and are not done
        self.halvings = 0
        self.saved_tokens = 0  # of prompts, because prefixes were shared

    def answer(
        self,
        requests: abc.Sequence[GenerationRequest],
        prepared: PreparedRequests,
        on_result: OnResult | None,
        should_stop: Callable[[], bool],
        progress: Callable[[Progress], None] | None,
    ) -> list[GenerationResult]:
        """Results in the order asked; raises `Interrupted` with every finished result already reported."""
        self._results: list[GenerationResult | None] = [None] * len(requests)
        self._on_result = on_result
        self._progress = progress
        self._began = time.perf_counter()
        self._done_tokens = 0
        self._finished = 0
        for place, error in prepared.refused.items():
            self._deliver(place, GenerationResult(error=error))
        waiting = self._queue(prepared.running)
        self._total_tokens = sum(family.max_computed_tokens for family in waiting)
        self._scheduler = Scheduler(waiting, self._limits)
        while batches := self._scheduler.next_pass():
            again = self._scheduler.will_go_on(batches)
            self._pass(batches, again, should_stop)
        missing = [place for place, result in enumerate(self._results) if result is None]
        assert not missing, f"requests {missing[:5]} were never answered"
        return [result for result in self._results if result is not None]

    def _pass(self, batches: abc.Sequence[Batch], again: bool, should_stop: Callable[[], bool]) -> None:
        """One pass; where memory runs out, what is left of it goes on in halves, and so do all later passes."""
        done: set[Batch] = set()

        def settle(outcome: BatchOutput) -> None:
            done.add(outcome.batch)
            self._settle(outcome)

        while True:
            items = work_items(self._schedule, self._executor.num_stages, len(batches))
            try:
                self._executor.run(batches, items, self._draws, settle, should_stop, again)
                return
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                # What was written to the cache is written again, the same; rows that are done stay done.
                left = [batch for batch in batches if batch not in done]
                if self._cache.one_layer:
                    left = [*self._again(batch for batch in batches if batch in done), *left]
                halves = self._scheduler.halve(left)
                if len(halves) == len(left):
                    raise MemoryLimitError(
                        f"memory ran out with {max(b.num_tokens for b in left)} tokens in a batch that cannot be "
                        "divided; lower --gpu-memory or --cpu-memory so that more is kept free"
                    ) from error
                batches, self.halvings = halves, self.halvings + 1
                done.clear()

    def _again(self, done: Iterable[Batch]) -> list[Batch]:
        """The prefixes of finished batches that are still needed: what is left goes through all layers anew, and of
        these only the last one is kept."""
        found = []
        for row in [chunk.sequence for batch in done for chunk in batch.scheduled if chunk.sequence in self._readers]:
            row.num_computed = 0
            found.append(Batch((ScheduledTokens(row, row.num_pending),), True))
        return found

    def _queue(self, running: abc.Sequence[RunningRequest]) -> list[Admission]:
        """What is to be computed, each shared beginning before the prompts that go on from it."""
        asked = []
        for request in running:
            scores = request.request.echo_logprobs and len(request.tokens) > 1
            if request.request.max_tokens or scores:
                asked.append(request)
            else:
                self._finish(request)  # nothing to compute
        limits, group = self._limits, self._cache.prefix_tokens
        beside = {"slot_overhead": limits.slot_overhead, "step_overhead": limits.step_overhead}
        rules = replace(self._rules, room=limits.cache_tokens, group_tokens=group or 1, **beside)
        if group is None:
            forest: list[PrefixNode | int] = list(range(len(asked)))
        else:
            forest = shared_prefixes(asked, rules, not self._cache.shares_prompts)
            while not self._holds(forest):  # those that save least go first
                found = sorted(prefixes_of(forest), key=lambda prefix: prefix.saved)
                forest = dissolve(forest, set(found[: -(-len(found) // 8)]))
        waiting: list[Admission] = []
        self._enqueue(forest, (), asked, waiting)
        return waiting

    def _holds(self, forest: abc.Sequence[PrefixNode | int]) -> bool:
        """Whether there is room for all prefixes that are needed at once: those of one row, or, in the one pass of
        prefill-only, all."""
        limits = self._limits
        if self._schedule != "prefill-only":
            return _depth(forest) < limits.max_windows
        prefixes = list(prefixes_of(forest))
        taken = sum(prefix.end - prefix.start + limits.slot_overhead for prefix in prefixes)
        return taken <= limits.cache_tokens and len(prefixes) <= limits.max_windows

    def _enqueue(
        self,
        members: abc.Sequence[PrefixNode | int],
        parents: tuple[Sequence, ...],
        asked: abc.Sequence[RunningRequest],
        waiting: list[Admission],
    ) -> int:
        """Rows that will need the cache of all of `parents`."""
        needed = 0
        limits = self._limits
        for member in dict.fromkeys(members):  # the branches of a request come with it
            if isinstance(member, PrefixNode):
                users = [asked[place] for place in dict.fromkeys(member.users)]
                row = Sequence(
                    users[0].tokens[member.start : member.end], member.end - member.start, None, member.start, parents,
                    max_new_tokens=1, needs_cache=True,
                )  # fmt: skip
                row.needs_scores = any(user.request.echo_logprobs for user in users)
                row.next_token = users[0].tokens[member.end] if row.needs_scores else None
                place = len(waiting)
                waiting.append(Admission(row))
                readers = self._enqueue(member.members, (*parents, row), asked, waiting)
                kept = [user for user in users if user.error is None]  # the others were refused
                if readers:
                    row.owner = RunningPrefix(kept)
                    self._readers[row] = readers
                    rows = sum(asked[place].error is None for place in member.users)
                    self.saved_tokens += (member.end - member.start) * (rows - 1)
                    needed += readers + 1
                else:
                    del waiting[place]
                continue
            request = asked[member]
            try:
                found = make_sequences(
                    request,
                    limits.cache_tokens,
                    limits.max_sequences,
                    limits.slot_overhead,
                    limits.step_overhead,
                    self._cache.shares_prompts,
                    parents,
                )
                waiting += found
                needed += len(found)
                self.saved_tokens += (request.num_branches - len(found)) * len(request.tokens)
            except RequestError as error:
                request.error = error
                self._finish(request)
        return needed

    def _draws(self, row: Sequence) -> list[SamplingParams]:
        running: RunningRequest = row.owner
        return [running.completions[row.completion + i].next_draw() for i in range(row.num_draws)]

    def _settle(self, outcome: BatchOutput) -> None:
        """Give every row of a finished batch what the head found for it."""
        chunks = outcome.batch.scheduled
        flops = [self._flops(chunk, outcome.batch.is_prefill) for chunk in chunks]
        total = sum(flops)
        for chunk, mine, found in zip(chunks, flops, outcome.outputs):
            seconds = outcome.seconds * mine / total
            chunk.sequence.owner.charge(outcome.batch.is_prefill, chunk.count, mine, seconds, len(chunks))
            self._done_tokens += chunk.count
            self._advance(chunk.sequence, found)
        if self._progress is not None:
            elapsed = time.perf_counter() - self._began
            self._progress(Progress(self._done_tokens, self._total_tokens, self._finished, len(self._results), elapsed))

    def _advance(self, row: Sequence, found: SequenceOutput) -> None:
        if found.nonfinite_stage is not None:
            row.owner.fail(
                NumericalError(
                    f"a value that is not finite appeared at stage {found.nonfinite_stage}; "
                    "the checkpoint may be corrupt: check it with flexgen-helm doctor"
                )
            )
        if row.is_shared_prefix:
            row.owner.scores = found.scores
            return
        running: RunningRequest = row.owner
        if running.error is not None:
            if row.is_shared:
                self._scheduler.branch(row, [])
            self._end(row)
            return
        running.scores += found.scores
        alive = []
        for offset, (token, logprob) in enumerate(found.drawn):
            index = row.completion + offset
            if not running.completions[index].push(token, logprob, self._eos_ids):
                alive.append((index, token))
        if row.is_shared:
            self._branch(row, alive)
        elif alive:
            row.tokens.append(alive[0][1])
        else:
            self._end(row)

    def _branch(self, prompt: Sequence, alive: list[tuple[int, int]]) -> None:
        """Continuations of a prompt go on as rows of their own that attend to the prompt's cache."""
        branches = [
            Sequence(
                [token],
                0,
                prompt.owner,
                start=prompt.start + prompt.prompt_len,
                prefixes=(*prompt.prefixes, prompt),
                completion=index,
                num_draws=1,
                max_new_tokens=prompt.owner.request.max_tokens,
                needs_cache=True,
            )
            for index, token in alive
        ]
        self._scheduler.branch(prompt, branches)
        prompt.owner.rows_left += len(branches)
        if branches:
            for parent in (*prompt.prefixes, prompt):
                self._readers[parent] = self._readers.get(parent, 0) + len(branches)
            prompt.owner.rows_left -= 1  # the branches speak for it now
        else:
            self._end(prompt)

    def _end(self, row: Sequence) -> None:
        """The row is done, and its request with the last of its rows."""
        self._leave(row)
        running: RunningRequest = row.owner
        running.rows_left -= 1
        if not running.rows_left:
            self._finish(running)

    def _leave(self, row: Sequence) -> None:
        """The row's slot goes back, and those of trunks that nobody else needs."""
        self._release(row)
        for parent in row.prefixes:
            self._readers[parent] -= 1
            if not self._readers[parent]:
                del self._readers[parent]
                self._leave(parent)

    def _release(self, row: Sequence) -> None:
        gone = self._scheduler.retire(row)
        if gone is None:
            return
        if not gone.group.sequences:
            self._cache.free(gone.group)
        elif gone.source is not None:
            self._cache.move(gone.group, gone.source, gone.target, gone.length, gone.stale)

    def _finish(self, running: RunningRequest) -> None:
        for place, result in zip(running.places, running.results()):
            self._deliver(place, result)

    def _deliver(self, place: int, result: GenerationResult) -> None:
        self._results[place] = result
        self._finished += 1
        if self._on_result is not None:
            self._on_result(place, result)

    def _flops(self, chunk: ScheduledTokens, is_prefill: bool) -> float:
        """Operations of one chunk: linear layers, attention over what each token sees, and the head where asked."""
        config, row, count = self._config, chunk.sequence, chunk.count
        seen = row.start + row.num_computed - count + (count + 1) / 2  # `computed` already counts this chunk
        scored = min(count, row.prompt_len - (row.next_token is None)) if row.needs_scores and is_prefill else 0
        heads = scored + (1 if row.num_draws else 0)
        attention = config.attention_flops(1, 1) * count * seen
        return config.linear_flops_per_token * count + attention + config.head_flops_per_token * heads


def _depth(forest: abc.Sequence[PrefixNode | int]) -> int:
    """Prefixes behind each other, at most."""
    return max((1 + _depth(member.members) for member in forest if isinstance(member, PrefixNode)), default=0)


def _is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a type of its own for devices only; the host's allocator says it in words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
