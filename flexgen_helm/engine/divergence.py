"""Two models compute the same tokens in lockstep, and are compared while both are there: nothing is stored.

    first engine    stage 0 | lays its tensor down, waits |           stage 1 | …
    second engine           | stage 0, compares, drops it | stage 1, waits    | …

One computes at a time, in a thread of its own; the prefetcher of the one that waits goes on loading.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.device import compute_device, tier_capacities
from flexgen_helm.engine.engine import Engine, offload_folder
from flexgen_helm.engine.executor import PromptToken, checksum
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.planner.placement import UNLIMITED
from flexgen_helm.planner.policy import ZIGZAG, Schedule
from flexgen_helm.planner.problem import without_margin
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.progress import silenced
from flexgen_helm.request import GenerationRequest, GenerationResult, MemoryLimits
from flexgen_helm.scheduling.prefix_tree import PrefixCostModel
from flexgen_helm.scheduling.prepare import common_limits
from flexgen_helm.scheduling.sequence import Batch
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Elements that are compared at once, in float64.
_COMPARED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class ComparedPrompts:
    """Prompts, some of whose tokens are compared.

    token_ids: of each prompt.
    compared: for each prompt, the indices of its tokens that are compared, from 1 on.
    documents: for each prompt, what it is a part of; intervals resample them.
    """

    token_ids: Sequence[Sequence[int]]
    compared: Sequence[range]
    documents: Sequence[Hashable]

    def requests(self) -> list[GenerationRequest]:
        return [GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in self.token_ids]


def half_limits(options: EngineConfig) -> MemoryLimits:
    """Return half of what an engine with these options may hold in memory, for one of two."""
    limits, device = options.limits, compute_device(options.device)
    free = tier_capacities(limits, offload_folder(options))
    if device.type == "cuda" and limits.gpu is None:
        free["gpu"] = without_margin(*torch.cuda.mem_get_info(device))
    # Without a limit of the disk both may use what is free: weight files that are there take no more of it.
    return MemoryLimits(free["gpu"] // 2, free["cpu"] // 2, limits.disk and limits.disk // 2)


def require_comparable(models: Sequence[tuple[Checkpoint, Tokenizer | None]], by_layer: bool) -> None:
    """Raise `UsageError` where the models have no common vocabulary, or by_layer no layers that match.

    Rows of the vocabulary that are no token of the tokenizer are padding: models may have more or fewer of them.
    """
    configs = [checkpoint.config for checkpoint, _ in models]
    sizes = [config.vocab_size for config in configs]
    tokenizers = [tokenizer for _, tokenizer in models if tokenizer is not None]
    if len(tokenizers) < 2 and sizes[0] != sizes[1]:
        raise UsageError(f"the models have {sizes[0]:,} and {sizes[1]:,} tokens, and not both have tokenizer files")
    if len(set(tokenizers)) == 2:
        for token in range(sizes[0]):
            texts = [tokenizer.token_bytes(token) for tokenizer in tokenizers]
            if texts[0] and (token >= sizes[1] or texts[1] not in (b"", texts[0])):
                shown = [repr(text.decode(errors="replace")) if text else "none" for text in texts]
                raise UsageError(
                    f"the models have different vocabularies: token {token} is {shown[0]} in the first and {shown[1]} "
                    "in the second; compare their scores instead, with flexgen-helm compare --baseline MODEL"
                )
    shapes = [(config.num_layers, config.state_size) for config in configs]
    if by_layer and shapes[0] != shapes[1]:
        words = " and ".join(f"{layers} layers of {width}" for layers, width in shapes)
        raise UsageError(f"--by-layer compares layer with layer, and the models have {words}; leave it out")


class Lockstep:
    """One comparison of two engines over some prompts; an `Observer` of both.

    values: [4, tokens] of the compared tokens, numbered through the prompts: their log-probabilities by the first and
        the second model, KL(first ‖ second), and 1 where both have the same most probable token, else 0.
    """

    def __init__(self, engines: Sequence[Engine], prompts: ComparedPrompts, by_layer: bool = False) -> None:
        self._engines, self._prompts, self._by_layer = engines, prompts, by_layer
        self._first = np.cumsum([0, *map(len, prompts.compared)])
        self.values = np.full((4, self._first[-1]), np.nan)
        # Squares of the changes, and of the first model's hidden states, after the embedding and each layer.
        self._squares = np.zeros((2, engines[0].config.num_layers + 1))
        self.vocab_size = max(engine.config.vocab_size for engine in engines)
        formats = [engine.cache_format for engine in engines]
        multiples = [1 if fmt is None else fmt.prefix_multiple or 0 for fmt in formats]  # 0: it can share none
        self.prefix_cost = PrefixCostModel(UNLIMITED, math.inf)
        if all(multiples):
            self.prefix_cost = replace(engines[0].prefix_cost, group_tokens=math.lcm(*multiples))
        self._second = threading.Thread(target=self._compute, name="second model")
        self._changed = threading.Condition()
        self._turn, self._has_ended = 0, False
        self._error: BaseException | None = None
        self._laid: tuple[object, Any] | None = None
        self._plans: list[RunPlan] = []

    @property
    def layers(self) -> tuple[float, ...] | None:
        """The relative error of hidden states after the embedding and each layer; None if it was not wanted."""
        return tuple(np.sqrt(np.divide(*self._squares)).tolist()) if self._by_layer else None

    def run(self) -> None:
        """Compare. Raises the first error of either engine, and `FlexgenError` for a value that is not finite."""
        with self._ending():
            self._second.start()
            self._compute()  # in this thread, which Ctrl-C interrupts
            self._second.join()
        self._second.join()
        if self._error is not None:
            raise self._error
        if missing := int((~np.isfinite(self.values)).sum()):
            raise FlexgenError(f"{missing:,} of {self.values.size:,} compared values are not finite numbers")

    @property
    def _number(self) -> int:
        """The engine of this thread: 0 or 1."""
        return int(threading.current_thread() is self._second)

    def _compute(self) -> None:
        def raise_error(_: int, result: GenerationResult) -> None:
            if result.error is not None:
                raise result.error

        number = self._number
        with self._ending(), silenced() if number else nullcontext():
            self._engines[number].run(
                self._prompts.requests(), on_result=raise_error, should_stop=self._pass_turn, observer=self
            )

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Let the other engine go on alone at the end, or end too after an error."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._has_ended, self._turn = True, 1 - self._number
            self._changed.notify_all()

    def _pass_turn(self) -> bool:
        """Let the other engine compute until it passes the turn back; return whether the comparison has failed."""
        number = self._number
        with self._changed:
            if not self._has_ended:
                self._turn = 1 - number
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == number or self._error is not None)
            return self._error is not None

    def _meet(self, key: object, value: Any, compare: Callable[[Any], None]) -> None:
        """Let the second engine compare the first one's value with its own; nothing of it is kept.

        key: says what the value is of.
        compare: called in the second engine's thread, with the first one's value.
        """
        if not (number := self._number):
            self._laid = key, value
        while (self._laid is None) == bool(number) and not self._has_ended:
            self._pass_turn()
        found, base = self._laid or (None, None)
        if found != (key if number else None):
            raise FlexgenError(
                "the two models have computed different tokens; this is a bug of flexgen_helm, please report it"
            )
        if number:
            compare(base)
            self._laid = None

    def plan(self, make: Callable[[Schedule | None], RunPlan]) -> RunPlan:
        def join(make_first: Callable[[Schedule | None], RunPlan]) -> None:
            plans = [plan(None) for plan in (make_first, make)]
            if plans[0].schedule != plans[1].schedule:
                plans = [plan(ZIGZAG) for plan in (make_first, make)]  # both can follow that
            limits = common_limits([plan.limits for plan in plans])
            self._plans = [replace(plan, limits=limits) for plan in plans]

        self._meet("plan", make, join)
        return self._plans[self._number]

    def on_hidden(self, stage: int, batch: Batch, hidden: Tensor) -> None:
        def compare(base: Tensor) -> None:
            step = max(1, _COMPARED_ELEMENTS // hidden.shape[1])
            for pair in zip(base.split(step), hidden.split(step)):
                states, changed = (part.double() for part in pair)
                self._squares[:, stage] += [part.square().sum().item() for part in (changed - states, states)]

        if self._by_layer:
            self._meet((stage, checksum(batch)), hidden, compare)

    def on_logits(self, tokens: Sequence[PromptToken], logits: Tensor) -> None:
        prompts = self._prompts
        found = [
            (row, int(self._first[prompt]) + compared.index(token.index), prompts.token_ids[prompt][token.index])
            for row, token in enumerate(tokens)
            for prompt in token.prompts
            if token.index in (compared := prompts.compared[prompt])
        ]
        step = max(1, _COMPARED_ELEMENTS // logits.shape[1])

        def compare(base: Tensor) -> None:
            for first in range(0, len(found), step):
                rows, numbers, targets = map(list, zip(*found[first : first + step]))
                pair = base[rows], logits[rows]
                same_top = pair[0].argmax(-1) == pair[1].argmax(-1)
                p, q = (torch.log_softmax(both.double(), -1) for both in pair)
                at, width = torch.tensor(targets, device=p.device)[:, None], min(p.shape[1], q.shape[1])
                kl = kl_divergence(p[:, :width], q[:, :width])  # beyond are rows of padding
                columns = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0], kl, same_top
                self.values[:, numbers] = torch.stack(columns).cpu().numpy()

        self._meet(tokens, logits, compare)


def kl_divergence(baseline: Tensor, compared: Tensor) -> Tensor:
    """Return KL(baseline ‖ compared) of each row, in nats; log-probabilities [R, C] in float64 -> [R].

    What has no chance in the baseline adds nothing (0 log 0 = 0).
    """
    terms = baseline.exp() * (baseline - compared)
    return torch.where(baseline == -torch.inf, 0.0, terms).sum(-1).clamp_min(0.0)  # rounding goes below 0
