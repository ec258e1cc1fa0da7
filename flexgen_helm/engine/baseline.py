"""What one model computes for compared tokens, on the disk: other models are compared with it one
after the other, and each has all of the memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.compared_prompts import ComparedPrompts, score
from flexgen_helm.engine.engine import Engine
from flexgen_helm.engine.executor import Prediction
from flexgen_helm.engine.fingerprint import RESULTS_VERSION
from flexgen_helm.engine.placing import offload_folder
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import naming
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.scheduling.sequence import Batch
from flexgen_helm.tiers import limit_flag
from flexgen_helm.units import size


class ComparedRows(NamedTuple):
    """Rows of logits that predict compared tokens; a row appears for each prompt that shares it.

    rows: of the logits.
    numbers: of the compared tokens, counted over all prompts.
    targets: ids of these tokens.
    """

    rows: list[int]
    numbers: list[int]
    targets: list[int]


class Baseline:
    """The logits of compared tokens by one model, and its hidden states if layers are compared, in
    a file that is mapped into memory. It is the `Observer` of the model that fills it.

    elements: of the whole file, in float32; the next three are parts of it.
    logits: [N, V], by number of the compared token.
    states: [stages, states, H], after the embedding and each layer; empty without layers.
    state_numbers: of each token of each prompt, whose states equal beginnings share.
    logprobs: [N], of the compared tokens, below 0; 0 where none is stored yet.
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
        config: of the baseline's model.
        options: its engine's, with the folder and the limit of the disk.
        by_layer: store hidden states, too.
        weights: fingerprint of its weights.

        Raises `MemoryLimitError` if there is too little room.
        """
        self.prompts, self.by_layer = ComparedPrompts.joined(parts), by_layer
        # numbers of the prompts that parts begin and end with
        self.part_ends = [*accumulate((len(part.token_ids) for part in parts), initial=0)]
        # of each prompt, the number of its first compared token; then the number of all
        self.first_numbers = np.cumsum([0, *map(len, self.prompts.compared)])
        self.state_numbers = self.prompts.state_numbers() if by_layer else []
        num_states = 1 + max(map(max, self.state_numbers), default=-1)
        logits_shape = self.prompts.num_compared, config.vocab_size
        states_shape = (config.num_layers + 1) * by_layer, num_states, config.hidden_elements
        # elements in float32: logits, hidden states, log-probabilities
        sizes = prod(logits_shape), prod(states_shape), logits_shape[0]
        self.num_bytes = num_bytes = 4 * sum(sizes)
        identity = repr(
            (RESULTS_VERSION, weights, config.identity_text(), options, self.prompts, by_layer)
        ).encode()
        folder, limit = offload_folder(options), options.limits.disk
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"logits-{hashlib.sha256(identity).hexdigest()[:16]}"
        written = self.path.stat().st_blocks * 512 if self.path.exists() else 0
        free = shutil.disk_usage(folder).free + written if limit is None else limit
        if num_bytes > free:
            raise MemoryLimitError(
                f"the logits of what is compared take {size(num_bytes)} in {folder}, where "
                f"{size(free)} are free; name another folder with --offload-dir, raise "
                f"{limit_flag('disk')}, or compare less with --max-windows"
            )
        self._limits = replace(options.limits, disk=limit and limit - num_bytes)
        with naming(self.path), self.path.open("a+b") as file:
            try:  # else a disk that is full later would end the program when it writes to the map
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError:
                self.remove()
                raise
            self.elements = np.memmap(file, np.float32, "r+", shape=num_bytes // 4)
        # A log-probability is written after the row that it is of; 0 means not yet.
        logits, states, self.logprobs = np.split(self.elements, np.cumsum(sizes)[:2])
        self.logits, self.states = logits.reshape(logits_shape), states.reshape(states_shape)
        # number of the prompt that each request of a run scores
        self.run_prompts: Sequence[int] = range(len(self.prompts.token_ids))

    def beside(self, options: EngineConfig) -> EngineConfig:
        """Return the options of an engine that leaves room for the file."""
        return replace(options, limits=self._limits)

    def fill(self, engine: Engine) -> None:
        """Let the baseline compute the prompts that are not stored whole. Raises what `score`
        raises.
        """
        all_prompts, by_prompt = self.run_prompts, np.split(self.logprobs, self.first_numbers[1:-1])
        self.run_prompts = [
            number
            for number, logprobs in enumerate(by_prompt)
            if not (logprobs.size and (logprobs < 0).all())
        ]
        try:
            missing = self.prompts.subset(self.run_prompts)
            score(engine, missing, self, int(self.by_layer))
        finally:
            self.run_prompts = all_prompts

    def remove(self) -> None:
        """Delete the file, which may be gone already."""
        self.path.unlink(missing_ok=True)

    def rows_of(self, predictions: Sequence[Prediction]) -> ComparedRows:
        """Return which rows of logits predict compared tokens."""
        rows = ComparedRows([], [], [])
        for row, prediction in enumerate(predictions):
            for prompt in map(self.run_prompts.__getitem__, prediction.prompts):
                compared, index = self.prompts.compared[prompt], prediction.index
                if index in compared:
                    rows.rows.append(row)
                    rows.numbers.append(int(self.first_numbers[prompt]) + compared.index(index))
                    rows.targets.append(self.prompts.token_ids[prompt][index])
        return rows

    def states_of(self, batch: Batch) -> list[int]:
        """Return the number of the hidden state of each token of a batch."""
        numbers: list[int] = []
        for item in batch.scheduled:
            sequence = item.sequence
            begin = sequence.start + sequence.num_computed
            prompt = self.run_prompts[sequence.requests[0].indices[0]]
            numbers += self.state_numbers[prompt][begin : begin + item.count]
        return numbers

    def on_hidden(self, stage: int, batch: Batch, hidden: Tensor) -> None:
        """Store the hidden states of a batch, if layers are compared."""
        if self.by_layer:
            self.states[stage, self.states_of(batch)] = hidden.float().cpu()

    def on_logits(self, predictions: Sequence[Prediction], logits: Tensor) -> None:
        """Store the rows that predict compared tokens, and their log-probabilities."""
        rows, numbers, targets = self.rows_of(predictions)
        compared = logits[rows].cpu()
        self.logits[numbers] = compared
        self.elements.flush()  # a power cut must not leave a log-probability without its row
        columns = torch.tensor(targets, dtype=torch.long)[:, None]
        logprobs = compared.log_softmax(-1).gather(1, columns)[:, 0]
        self.logprobs[numbers] = logprobs.clamp_max(-torch.finfo(torch.float32).tiny)
