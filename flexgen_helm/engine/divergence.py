"""Two models score the same tokens, one after the other; each has all of the memory.

baseline          rows of logits -> a file in the offload folder, by number of the compared token;
                  prompts that are complete there are not computed again
any other model   its rows, and those of the file -> log-probabilities, KL divergence, equal top
tokens
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.engine import Engine
from flexgen_helm.engine.executor import Observer, Prediction
from flexgen_helm.engine.fingerprint import RESULTS_VERSION
from flexgen_helm.engine.opening import offload_folder
from flexgen_helm.errors import FlexgenError, MemoryLimitError, UsageError
from flexgen_helm.files import naming, size
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.scheduling.sequence import Batch
from flexgen_helm.tiers import limit_flag
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Rounding of a log-probability in nats.
_STORED_WITHIN = 1e-3
# Elements that are compared at once, in float64.
_COMPARED_ELEMENTS = 1 << 20

Vector = NDArray[np.float64]


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

    @property
    def num_compared(self) -> int:
        return sum(map(len, self.compared))

    @classmethod
    def joined(cls, parts: Sequence[ComparedPrompts]) -> ComparedPrompts:
        return cls(
            *(
                list(chain.from_iterable(getattr(part, of) for part in parts))
                for of in cls.__annotations__
            )
        )

    def some(self, numbers: Sequence[int]) -> ComparedPrompts:
        return ComparedPrompts(
            *([getattr(self, of)[number] for number in numbers] for of in self.__annotations__)
        )

    def state_numbers(self) -> list[list[int]]:
        """Return for each prompt the numbers of its tokens' hidden states; equal beginnings have
        the same.
        """
        known: dict[int, int] = {}
        beginnings = (
            accumulate(ids, lambda before, token: hash((before, token))) for ids in self.token_ids
        )
        return [
            [known.setdefault(beginning, len(known)) for beginning in of_prompt]
            for of_prompt in beginnings
        ]


@dataclass(frozen=True)
class Compared:
    """What a model computed beside the baseline for some prompts.

    values: [4, tokens] of their compared tokens, prompt by prompt: their log-probabilities by the
        baseline and by the model, KL(baseline ‖ model), and 1 where both have the same most
        probable token, else 0.
    layers: relative error of hidden states after the embedding and each layer; None if it was not
        wanted.
    """

    values: NDArray[np.float64]
    layers: tuple[float, ...] | None


def require_comparable(
    models: Sequence[tuple[Checkpoint, Tokenizer | None]], by_layer: bool
) -> None:
    """Raise `UsageError` where the models have no common vocabulary, or by_layer no layers that
    match.

    Rows of the vocabulary that are no token of the tokenizer are padding: models may have more or
    fewer of them.
    """
    configs = [checkpoint.config for checkpoint, _ in models]
    sizes = [config.vocab_size for config in configs]
    tokenizers = [tokenizer for _, tokenizer in models if tokenizer is not None]
    if len(tokenizers) < 2 and sizes[0] != sizes[1]:
        raise UsageError(
            f"the models have {sizes[0]:,} and {sizes[1]:,} tokens, and not both have tokenizer "
            "files"
        )
    if len(set(tokenizers)) == 2:
        for token in range(sizes[0]):
            texts = [tokenizer.token_bytes(token) for tokenizer in tokenizers]
            if texts[0] and (token >= sizes[1] or texts[1] not in (b"", texts[0])):
                shown = [repr(text.decode(errors="replace")) if text else "none" for text in texts]
                raise UsageError(
                    f"the models have different vocabularies: token {token} is {shown[0]} in the "
                    f"first and {shown[1]} in the second; compare their scores instead, with "
                    "flexgen-helm compare --baseline MODEL"
                )
    shapes = [(config.num_layers, config.hidden_elements) for config in configs]
    if by_layer and shapes[0] != shapes[1]:
        words = " and ".join(f"{layers} layers of {width}" for layers, width in shapes)
        raise UsageError(
            f"--by-layer compares layer with layer, and the models have {words}; leave it out"
        )


class Baseline:
    """The logits of compared tokens by one model, and its hidden states if layers are compared, on
    the disk.
    """

    def __init__(
        self,
        parts: Sequence[ComparedPrompts],
        config: ModelConfig,
        options: EngineConfig,
        by_layer: bool = False,
        weights: str = "",
    ) -> None:
        """Reserve the disk, or find what an interrupted process has left. The file stays until
        `remove`.

        parts: prompts, all of which are computed together.
        config, options: of the baseline, with the folder and the limit of the disk. weights: their
            fingerprint.

        Raises `MemoryLimitError` if there is too little room.
        """
        self.prompts, self.by_layer = ComparedPrompts.joined(parts), by_layer
        self._ends = [*accumulate((len(part.token_ids) for part in parts), initial=0)]
        self.first = np.cumsum([0, *map(len, self.prompts.compared)])
        self.state_numbers = self.prompts.state_numbers() if by_layer else []
        num_states = 1 + max(map(max, self.state_numbers), default=-1)
        logits = self.prompts.num_compared, config.vocab_size
        states = (config.num_layers + 1) * by_layer, num_states, config.hidden_elements
        sizes = prod(logits), prod(states), logits[0]
        self.num_bytes = num_bytes = 4 * sum(sizes)
        identity = repr(
            (RESULTS_VERSION, weights, config.identity_text(), options, self.prompts, by_layer)
        ).encode()
        folder, limit = offload_folder(options), options.limits.disk
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"logits-{hashlib.sha256(identity).hexdigest()[:16]}"
        held = self.path.stat().st_blocks * 512 if self.path.exists() else 0
        free = shutil.disk_usage(folder).free + held if limit is None else limit
        if num_bytes > free:
            raise MemoryLimitError(
                f"the logits of what is compared take {size(num_bytes)} in {folder}, where "
                f"{size(free)} are free; name another folder with --offload-dir, raise "
                f"{limit_flag('disk')}, or compare less with --max-windows"
            )
        self._limits = replace(options.limits, disk=limit and limit - num_bytes)
        with naming(self.path), self.path.open("a+b") as file:
            try:  # a full disk would end the program when it is written
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError:
                self.remove()
                raise
            self.rows = np.memmap(file, np.float32, "r+", shape=num_bytes // 4)
        # Log-probabilities are written behind the rows that they are of; 0 is none.
        rows, hidden, self.logprobs = np.split(self.rows, np.cumsum(sizes)[:2])
        self.logits, self.states = rows.reshape(logits), hidden.reshape(states)
        # numbers of the prompts of a run
        self.asked: Sequence[int] = range(len(self.prompts.token_ids))

    def beside(self, options: EngineConfig) -> EngineConfig:
        """Return the options of an engine that leaves room for the file."""
        return replace(options, limits=self._limits)

    def fill(self, engine: Engine) -> None:
        """Let the baseline compute what is not stored. Raises what `score` raises, as `compare`
        does.
        """
        every, parts = self.asked, np.split(self.logprobs, self.first[1:-1])
        self.asked = [
            number for number, part in enumerate(parts) if not (part.size and (part < 0).all())
        ]
        try:
            score(engine, self.prompts.some(self.asked), _Writer(self), int(self.by_layer))
        finally:
            self.asked = every

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def compare(self, engine: Engine) -> list[Compared]:
        """Let another model compute the same; return what it computed for each part.

        Raises `FlexgenError` for a value that is not finite, and for files that have other rows
        than were computed.
        """
        found = _Comparison(self)
        score(engine, self.prompts, found, int(self.by_layer))
        if missing := int((~np.isfinite(found.values)).sum()):
            raise FlexgenError(
                f"{missing:,} of {found.values.size:,} compared values are not finite numbers"
            )
        if not np.allclose(found.values[0], self.logprobs, atol=_STORED_WITHIN):
            self.remove()
            raise FlexgenError(
                "the stored logits are not those that were computed; check the disk and start again"
            )
        return [self._part(found, first, end) for first, end in pairwise(self._ends)]

    def _part(self, found: _Comparison, first: int, end: int) -> Compared:
        """Return what was found for the prompts from the first one to the end."""
        layers, values = None, found.values[:, self.first[first] : self.first[end]]
        if self.by_layer:
            states = [*{*chain.from_iterable(self.state_numbers[first:end])}]
            layers = tuple(np.sqrt(np.divide(*found.squares[:, :, states].sum(-1))).tolist())
        return Compared(values, layers)

    def rows_of(self, predictions: Sequence[Prediction]) -> tuple[list[int], list[int], list[int]]:
        """Return of compared tokens the rows of logits that predict them, their numbers, and their
        ids.
        """
        prompts = self.prompts
        found = [
            (
                row,
                int(self.first[prompt]) + compared.index(prediction.index),
                prompts.token_ids[prompt][prediction.index],
            )
            for row, prediction in enumerate(predictions)
            for prompt in map(self.asked.__getitem__, prediction.prompts)
            if prediction.index in (compared := prompts.compared[prompt])
        ]
        rows, numbers, targets = map(list, zip(*found)) if found else ([], [], [])
        return rows, numbers, targets

    def states_of(self, batch: Batch) -> list[int]:
        """Return the number of each token of a batch."""
        found: list[int] = []
        for item in batch.scheduled:
            sequence = item.sequence
            begin = sequence.start + sequence.num_computed
            found += self.state_numbers[self.asked[sequence.requests[0].indices[0]]][
                begin : begin + item.count
            ]
        return found


class _Writer:
    """An `Observer` that stores what it is shown."""

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline

    def on_hidden(self, stage: int, batch: Batch, hidden: Tensor) -> None:
        if self._baseline.by_layer:
            self._baseline.states[stage, self._baseline.states_of(batch)] = hidden.float().cpu()

    def on_logits(self, predictions: Sequence[Prediction], logits: Tensor) -> None:
        rows, numbers, targets = self._baseline.rows_of(predictions)
        chosen = logits[rows].cpu()
        self._baseline.logits[numbers] = chosen
        self._baseline.rows.flush()  # a power cut must not leave a log-probability without its row
        at = torch.tensor(targets, dtype=torch.long)[:, None]
        self._baseline.logprobs[numbers] = chosen.log_softmax(-1).gather(1, at)[:, 0]


class _Comparison:
    """An `Observer` that compares what it is shown with what is stored.

    squares: [2, stages, states] of the changes of hidden states, and of the baseline's.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self.values = np.full((4, baseline.prompts.num_compared), np.nan)
        self.squares = np.zeros((2, *baseline.states.shape[:2]))

    def on_hidden(self, stage: int, batch: Batch, hidden: Tensor) -> None:
        if not self._baseline.by_layer:
            return
        numbers = self._baseline.states_of(batch)
        step = max(1, _COMPARED_ELEMENTS // hidden.shape[1])
        for first in range(0, len(numbers), step):
            part = numbers[first : first + step]
            base = torch.from_numpy(self._baseline.states[stage, part]).double()
            changed = hidden[first : first + step].cpu().double() - base
            self.squares[:, stage, part] = torch.stack(
                [changed.square().sum(1), base.square().sum(1)]
            )

    def on_logits(self, predictions: Sequence[Prediction], logits: Tensor) -> None:
        rows, numbers, targets = self._baseline.rows_of(predictions)
        step = max(1, _COMPARED_ELEMENTS // logits.shape[1])
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            base = torch.from_numpy(self._baseline.logits[numbers[part]]).to(logits.device)
            pair = base, logits[rows[part]]
            same_top = pair[0].argmax(-1) == pair[1].argmax(-1)
            p, q = (torch.log_softmax(both.double(), -1) for both in pair)
            at = torch.tensor(targets[part], device=p.device)[:, None]
            width = min(p.shape[1], q.shape[1])
            kl = kl_divergence(p[:, :width], q[:, :width])  # beyond are rows of padding
            columns = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0], kl, same_top
            self.values[:, numbers[part]] = torch.stack(columns).cpu()


def score(
    engine: Engine, prompts: ComparedPrompts, observer: Observer | None = None, num_drawn: int = 0
) -> Vector:
    """Return the log-probabilities of the compared tokens. Raises the first error of a prompt.

    num_drawn: 1 if the last token of a prompt must be computed, too.
    """

    def raise_error(_: int, result: GenerationResult) -> None:
        if result.error is not None:
            raise result.error

    requests = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=num_drawn, echo_logprobs=True)
        for ids in prompts.token_ids
    ]
    if observer is None:
        results = engine.run(requests, on_result=raise_error)
    else:
        results = engine.observe(requests, observer, raise_error)
    logprobs = (result.prompt_logprobs or () for result in results)
    return np.array(
        [of[index] for of, compared in zip(logprobs, prompts.compared) for index in compared]
    )


def kl_divergence(baseline: Tensor, compared: Tensor) -> Tensor:
    """Return KL(baseline ‖ compared) of each row, in nats; log-probabilities [R, C] in float64 ->
    [R].

    What has no chance in the baseline adds nothing (0 log 0 = 0).
    """
    terms = baseline.exp() * (baseline - compared)
    # rounding goes below 0
    return torch.where(baseline == -torch.inf, 0.0, terms).sum(-1).clamp_min(0.0)
