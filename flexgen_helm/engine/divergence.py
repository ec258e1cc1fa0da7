"""KL divergence of two runs of the same prompts, row by row of their logits: no run's rows are all in memory.

baseline   logits -> the most probable token of each row; some whole rows -> disk
precision  logits -> compared with what is kept of the same token
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.engine.executor import PromptToken
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import size
from flexgen_helm.request import GenerationRequest

_SEED = 0


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


class BaselineRows:
    """What is kept of the baseline's logits. An `OnLogits`: give it to `Engine.run`.

    sampled: [rows] numbers of the tokens whose whole rows are kept, drawn with a fixed seed.
    argmax: [tokens] their most probable tokens; -1 until a row has come.

    Tokens that are compared are numbered through the prompts. A row that comes again is written again, the same.
    """

    def __init__(self, folder: Path, compared: Sequence[range], num_sampled: int, vocab_size: int) -> None:
        """folder: of the file, which is unnamed and so ends with the process.

        compared: as in `ComparedPrompts`. num_sampled: whole rows to keep; all if there are fewer tokens.
        Raises `UsageError` if the disk has no room.
        """
        self._compared = compared
        counts = list(map(len, compared))
        self._first = np.cumsum([0, *counts])
        self.num_tokens = sum(counts)
        draw = np.random.default_rng(_SEED)
        self.sampled = np.sort(draw.choice(self.num_tokens, min(num_sampled, self.num_tokens), replace=False))
        self._slots = {int(number): slot for slot, number in enumerate(self.sampled)}
        self.argmax = np.full(self.num_tokens, -1)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        needed = max(1, len(self.sampled)) * vocab_size * 4
        try:
            os.posix_fallocate(self._file.fileno(), 0, needed)
        except OSError:
            self._file.close()
            free = size(shutil.disk_usage(folder).free)
            raise UsageError(
                f"the baseline's rows take {size(needed)} and {folder} has {free} free; "
                "name another folder with --offload-dir, or score less with --max-windows"
            ) from None
        self.rows = np.memmap(self._file, np.float32, "r+", shape=(len(self.sampled), vocab_size))

    def __call__(self, tokens: Sequence[PromptToken], logits: Tensor) -> None:
        for numbers, slots, row, top in self.rows_of(tokens, logits):
            self.argmax[numbers] = top
            if slots:
                self.rows[slots] = row.cpu().numpy()

    def rows_of(
        self, tokens: Sequence[PromptToken], logits: Tensor
    ) -> Iterator[tuple[list[int], list[int], Tensor, int]]:
        """Yield each row that is compared: numbers of its tokens, their indices in `sampled`, the row, its argmax."""
        for token, row, top in zip(tokens, logits, logits.argmax(-1).tolist()):
            numbers = [
                int(self._first[prompt]) + self._compared[prompt].index(token.index)
                for prompt in token.prompts
                if token.index in self._compared[prompt]
            ]
            if numbers:
                yield numbers, [self._slots[number] for number in numbers if number in self._slots], row, top

    def __enter__(self) -> BaselineRows:
        return self

    def __exit__(self, *_: object) -> None:
        del self.rows
        self._file.close()


class RowDivergence:
    """The divergence of a run's logits from the baseline's. An `OnLogits`: give it to `Engine.run`.

    same_top: [tokens] 1 where both have the same most probable token, else 0.
    exact: [rows] KL divergence of the whole rows, in the order of `BaselineRows.sampled`.

    They are NaN until a row has come.
    """

    def __init__(self, baseline: BaselineRows) -> None:
        self._baseline = baseline
        self.same_top = np.full(baseline.num_tokens, np.nan)
        self.exact = np.full(len(baseline.sampled), np.nan)

    def __call__(self, tokens: Sequence[PromptToken], logits: Tensor) -> None:
        baseline = self._baseline
        for numbers, slots, row, top in baseline.rows_of(tokens, logits):
            if (baseline.argmax[numbers] < 0).any():
                raise FlexgenError("the baseline has no row of a token that is compared")
            self.same_top[numbers] = baseline.argmax[numbers] == top
            if slots:
                known = torch.from_numpy(baseline.rows[slots]).to(row.device)
                self.exact[slots] = kl_divergence(
                    *(torch.log_softmax(logits.double(), -1) for logits in (known, row))
                ).cpu()

    def require_all(self) -> None:
        """Raise `FlexgenError` if a token's row has not come, or is not finite."""
        missing = int(np.isnan(self.same_top).sum() + (~np.isfinite(self.exact)).sum())
        if missing:
            raise FlexgenError(
                f"{missing:,} of {self.same_top.size + self.exact.size:,} divergences are not finite numbers"
            )


def kl_divergence(baseline: Tensor, compared: Tensor) -> Tensor:
    """Return KL(baseline ‖ compared) of each row, in nats; log-probabilities [R, C] in float64 -> [R].

    What has no chance in the baseline adds nothing (0 log 0 = 0).
    """
    terms = baseline.exp() * (baseline - compared)
    return torch.where(baseline == -torch.inf, 0.0, terms).sum(-1).clamp_min(0.0)  # rounding goes below 0
