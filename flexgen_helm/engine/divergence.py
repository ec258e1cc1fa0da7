"""KL divergence of two runs of the same prompts, row by row of their logits: no run's rows are all in memory.

baseline   logits -> the most probable token of each row; some whole rows -> disk
precision  logits -> compared with what is kept of the same token
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.engine.predictions import PromptToken
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import size
from flexgen_helm.request import GenerationRequest

# Elements of logits that are in float64 at once.
_SLICE_ELEMENTS = 1 << 20
_SEED = 0


@dataclass(frozen=True)
class ComparedPrompts:
    """Prompts, some of whose tokens are compared.

    token_ids: of each prompt.
    compared: for each prompt, the places of its tokens that are compared, from 1 on.
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
        self._first = np.concatenate([[0], np.cumsum(counts)])[:-1]
        self.num_tokens = sum(counts)
        draw = np.random.default_rng(_SEED)
        self.sampled = np.sort(draw.choice(self.num_tokens, min(num_sampled, self.num_tokens), replace=False))
        self._slots = {int(number): slot for slot, number in enumerate(self.sampled)}
        self._row = np.dtype(("<f4", (vocab_size,)))
        _require_room(folder, self._row.itemsize * len(self.sampled))
        self.argmax = np.full(self.num_tokens, -1)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def __call__(self, tokens: Sequence[PromptToken], logits: Tensor) -> None:
        for numbers, part in self.slices(tokens, logits):
            for row, top, own in zip(part, part.argmax(-1).tolist(), numbers):
                self.argmax[own] = top
                for slot in self.slots(own):
                    self._write(slot, row.cpu().numpy().tobytes())

    def slices(self, tokens: Sequence[PromptToken], logits: Tensor) -> Iterator[tuple[list[list[int]], Tensor]]:
        """Return the numbers and the rows of the tokens that are compared, some at a time."""
        numbers = [self._numbers(token) for token in tokens]
        wanted = [place for place, own in enumerate(numbers) if own]
        rows = max(1, _SLICE_ELEMENTS // logits.shape[1])
        for first in range(0, len(wanted), rows):
            places = wanted[first : first + rows]
            yield [numbers[place] for place in places], logits[places]

    def _numbers(self, token: PromptToken) -> list[int]:
        return [
            int(self._first[place]) + self._compared[place].index(token.index)
            for place in token.places
            if token.index in self._compared[place]
        ]

    def slots(self, numbers: Sequence[int]) -> list[int]:
        """Return the places in `sampled` of those tokens that it has."""
        return [slot for number in numbers if (slot := self._slots.get(number)) is not None]

    def _write(self, slot: int, row: bytes) -> None:
        try:
            written = os.pwrite(self._file.fileno(), row, slot * self._row.itemsize)
        except OSError as error:
            raise FlexgenError(f"the baseline's rows cannot be written: {error.strerror}") from error
        if written != len(row):
            raise FlexgenError("the baseline's rows cannot be written: the disk is full")

    def read(self, slots: Sequence[int]) -> Tensor:
        """Return whole rows of logits in float32."""
        itemsize = self._row.itemsize
        content = [os.pread(self._file.fileno(), itemsize, slot * itemsize) for slot in slots]
        return torch.from_numpy(np.frombuffer(bytearray().join(content), self._row))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> BaselineRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        for numbers, part in baseline.slices(tokens, logits):
            for row, top, own in zip(part, part.argmax(-1).tolist(), numbers):
                if (baseline.argmax[own] < 0).any():
                    raise FlexgenError("the baseline has no row of a token that is compared")
                self.same_top[own] = baseline.argmax[own] == top
                if slots := baseline.slots(own):
                    whole = baseline.read(slots).to(row.device)
                    rows = (torch.log_softmax(each.double(), -1) for each in (whole, row[None]))
                    self.exact[slots] = kl_divergence(*rows).cpu()

    def require_all(self) -> None:
        """Raise `FlexgenError` if a token's row has not come, or is not finite."""
        missing = int(np.isnan(self.same_top).sum() + (~np.isfinite(self.exact)).sum())
        if missing:
            raise FlexgenError(
                f"{missing:,} of {self.same_top.size + self.exact.size:,} divergences are not finite numbers"
            )


def kl_divergence(baseline: Tensor, other: Tensor) -> Tensor:
    """Return KL(baseline ‖ other) of each row, in nats; log-probabilities [R, C] in float64 -> [R].

    What has no chance in the baseline adds nothing (0 log 0 = 0).
    """
    terms = baseline.exp() * (baseline - other)
    return torch.where(baseline == -torch.inf, 0.0, terms).sum(-1).clamp_min(0.0)  # rounding goes below 0


def _require_room(folder: Path, needed: int) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise UsageError(
            f"the baseline's rows take {size(needed)} and {folder} has {size(free)} free; name another folder with "
            "--offload-dir, or score less with --max-windows"
        )
