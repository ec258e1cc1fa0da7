"""One run of the engine: rows through passes until every request has its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch

from flexgen_helm.core.errors import MemoryLimitError, NumericalError, RequestError
from flexgen_helm.core.records import GenerationRequest, GenerationResult, Progress
from flexgen_helm.core.rows import Batch, Chunk, Family, Row
from flexgen_helm.exec.executor import BatchOutcome, Executor, RowOutcome
from flexgen_helm.exec.prepare import Prepared, families
from flexgen_helm.exec.running import RunningRequest
from flexgen_helm.exec.sampling import Draw
from flexgen_helm.exec.schedule import work_items
from flexgen_helm.exec.scheduler import BlockLimits, Scheduler
from flexgen_helm.models.spec import ModelSpec
from flexgen_helm.policy.policy import Schedule
from flexgen_helm.store.kv import KVCache

OnResult = Callable[[int, GenerationResult], None]


class Run:
    """State of one call of `Engine.run`. Results are reported the moment a request is finished."""

    def __init__(
        self,
        spec: ModelSpec,
        executor: Executor,
        cache: KVCache,
        limits: BlockLimits,
        schedule: Schedule,
        eos_ids: Collection[int],
    ) -> None:
        self._spec = spec
        self._executor = executor
        self._cache = cache
        self._limits = limits
        self._schedule = schedule
        self._eos_ids = eos_ids
        self._branches_left: dict[Row, int] = {}
        self.halvings = 0

    def answer(
        self,
        requests: Sequence[GenerationRequest],
        prepared: Prepared,
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
        # A row feeds its prompt and every drawn token but the last.
        self._total_tokens = sum(running.max_fed for running in prepared.running if running.rows_left)
        self._scheduler = Scheduler(waiting, self._limits)
        while batches := self._scheduler.next_pass():
            again = self._scheduler.will_go_on(batches)
            self._pass(batches, again, should_stop)
        missing = [place for place, result in enumerate(self._results) if result is None]
        assert not missing, f"requests {missing[:5]} were never answered"
        return [result for result in self._results if result is not None]

    def _pass(self, batches: Sequence[Batch], again: bool, should_stop: Callable[[], bool]) -> None:
        """One pass; where memory runs out, what is left of it goes on in halves, and so do all later passes."""
        done: set[Batch] = set()

        def settle(outcome: BatchOutcome) -> None:
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
                halves = self._scheduler.halve(left)
                if len(halves) == len(left):
                    raise MemoryLimitError(
                        f"memory ran out with {max(b.num_tokens for b in left)} tokens in a batch that cannot be "
                        "divided; lower --gpu-memory or --cpu-memory so that more is kept free"
                    ) from error
                batches, self.halvings = halves, self.halvings + 1
                done.clear()

    def _queue(self, running: Sequence[RunningRequest]) -> list[Family]:
        """Longest prompts first: neighbours share shapes, and what does not fit shows early."""
        waiting: list[Family] = []
        for request in sorted(running, key=lambda r: (len(r.tokens), r.request.max_tokens), reverse=True):
            scores = request.request.echo_logprobs and len(request.tokens) > 1
            if not request.request.max_tokens and not scores:
                self._finish(request)  # nothing to compute
                continue
            try:
                limits = self._limits
                # Groups of tokens that are packed together would reach from a shared prompt into its continuations.
                shares = self._cache.codec is None
                waiting += families(request, limits.cache_tokens, limits.max_rows, limits.row_tokens, shares)
            except RequestError as error:
                request.error = error
                self._finish(request)
        return waiting

    def _draws(self, row: Row) -> list[Draw]:
        running: RunningRequest = row.owner
        return [running.completions[row.branch + i].next_draw() for i in range(row.draws)]

    def _settle(self, outcome: BatchOutcome) -> None:
        """Give every row of a finished batch what the head found for it."""
        chunks = outcome.batch.chunks
        flops = [self._flops(chunk, outcome.batch.is_prefill) for chunk in chunks]
        total = sum(flops)
        for chunk, mine, found in zip(chunks, flops, outcome.rows):
            seconds = outcome.seconds * mine / total
            chunk.row.owner.charge(outcome.batch.is_prefill, chunk.count, mine, seconds, len(chunks))
            self._done_tokens += chunk.count
            self._advance(chunk.row, found)
        if self._progress is not None:
            elapsed = time.perf_counter() - self._began
            self._progress(Progress(self._done_tokens, self._total_tokens, self._finished, len(self._results), elapsed))

    def _advance(self, row: Row, found: RowOutcome) -> None:
        running: RunningRequest = row.owner
        if found.bad_stage is not None:
            running.error = NumericalError(
                f"a value that is not finite appeared at stage {found.bad_stage}; "
                "the checkpoint may be corrupt: check it with flexgen-helm doctor"
            )
        if running.error is not None:
            if row.is_trunk:
                self._scheduler.branch(row, [])
            self._end(row)
            return
        running.scores += found.scores
        alive = []
        for offset, (token, logprob) in enumerate(found.drawn):
            index = row.branch + offset
            if not running.completions[index].push(token, logprob, self._eos_ids):
                alive.append((index, token))
        if row.is_trunk:
            self._branch(row, alive)
        elif alive:
            row.tokens.append(alive[0][1])
        else:
            self._end(row)

    def _branch(self, prompt: Row, alive: list[tuple[int, int]]) -> None:
        """Continuations of a prompt go on as rows of their own that attend to the prompt's cache."""
        branches = [
            Row([token], 0, prompt.owner, start=prompt.prompt_len, parents=(prompt,), branch=index, draws=1,
                max_new=prompt.owner.request.max_tokens, keeps_cache=True)
            for index, token in alive
        ]  # fmt: skip
        self._scheduler.branch(prompt, branches)
        prompt.owner.rows_left += len(branches)
        self._branches_left[prompt] = len(branches)
        if branches:
            prompt.owner.rows_left -= 1  # the branches speak for it now
        else:
            self._end(prompt)

    def _end(self, row: Row) -> None:
        """The row is done: its slot goes back, and its parent's with the last branch."""
        self._release(row)
        for parent in row.parents:
            self._branches_left[parent] -= 1
            if not self._branches_left[parent]:
                del self._branches_left[parent]
                self._release(parent)
        running: RunningRequest = row.owner
        running.rows_left -= 1
        if not running.rows_left:
            self._finish(running)

    def _release(self, row: Row) -> None:
        gone = self._scheduler.retire(row)
        if gone is None:
            return
        if not gone.group.rows:
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

    def _flops(self, chunk: Chunk, is_prefill: bool) -> float:
        """Operations of one chunk: linear layers, attention over what each token sees, and the head where asked."""
        spec, row, count = self._spec, chunk.row, chunk.count
        seen = row.start + row.computed - count + (count + 1) / 2  # `computed` already counts this chunk
        heads = (min(count, row.prompt_len - 1) if row.score and is_prefill else 0) + (1 if row.draws else 0)
        attention = spec.attention_flops(1, 1) * count * seen
        return spec.linear_flops_per_token * count + attention + spec.head_flops_per_token * heads


def _is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a type of its own for devices only; the host's allocator says it in words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
