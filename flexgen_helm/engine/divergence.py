"""KL divergence of two runs of the same prompts, row by row of their logits: no run's rows are all in memory.

baseline   logits -> most probable tokens and the rest of each row, some whole rows -> disk
precision  logits -> compared with what the disk has of the same token              -> a number a token
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexgen_helm.engine.predictions import PromptToken
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.request import GenerationRequest
from flexgen_helm.units import size

# Most probable tokens of the baseline that are kept of every row.
TOP_TOKENS = 64
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
    """What the disk keeps of the baseline's logits. An `OnLogits`: give it to `Engine.run`.

    sampled: [rows] numbers of the tokens whose whole rows are kept, drawn with a fixed seed.

    Tokens that are compared are numbered through the prompts. A row that comes again is written again, the same.
    """

    def __init__(self, folder: Path, compared: Sequence[range], num_sampled: int, vocab_size: int) -> None:
        """folder: of the files, which are unnamed and so end with the process.

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
        top = min(TOP_TOKENS, vocab_size)
        row = np.dtype([("argmax", "<i4"), ("ids", "<i4", (top,)), ("logprobs", "<f8", (top + 1,))])
        whole = np.dtype([("logits", "<f4", (vocab_size,))])
        _require_room(folder, row.itemsize * self.num_tokens + whole.itemsize * len(self.sampled))
        self._has_come = np.zeros(self.num_tokens, bool)
        self._rows, self._whole = _RowFile(folder, row), _RowFile(folder, whole)

    def __call__(self, tokens: Sequence[PromptToken], logits: Tensor) -> None:
        for numbers, part in self.slices(tokens, logits):
            argmax, ids = part.argmax(-1), part.topk(self.top_tokens).indices
            rows = np.empty(len(numbers), self._rows.dtype)
            rows["argmax"], rows["ids"] = argmax.cpu(), ids.cpu()
            rows["logprobs"] = coarse_logprobs(part.double(), ids).cpu()
            for place, own in enumerate(numbers):
                for number in own:
                    self._rows.write(number, rows[place])
                    self._has_come[number] = True
                    if (slot := self._slots.get(number)) is not None:
                        self._whole.write(slot, part[place].cpu().numpy())

    @property
    def top_tokens(self) -> int:
        return int(self._rows.dtype["ids"].shape[0])

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

    def read(self, numbers: Sequence[int]) -> NDArray[Any]:
        """Return what is kept of tokens: their argmax, the ids of the most probable, and their coarse row.

        Raises `FlexgenError` for a token whose row has not come.
        """
        if not self._has_come[list(numbers)].all():
            raise FlexgenError("the baseline has no row of a token that is compared")
        return self._rows.read(numbers)

    def read_whole(self, slots: Sequence[int]) -> Tensor:
        """Return whole rows of logits in float32."""
        return torch.from_numpy(self._whole.read(slots)["logits"])

    def close(self) -> None:
        self._rows.close()
        self._whole.close()

    def __enter__(self) -> BaselineRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowDivergence:
    """The divergence of a run's logits from the baseline's. An `OnLogits`: give it to `Engine.run`.

    same_top: [tokens] 1 where both have the same most probable token, else 0.
    bounds: [tokens] KL divergence of the coarse rows, a lower bound of that of the rows.
    exact: [rows] KL divergence of the whole rows, in the order of `BaselineRows.sampled`.

    They are NaN until a row has come.
    """

    def __init__(self, baseline: BaselineRows) -> None:
        self._baseline = baseline
        self.same_top, self.bounds = np.full((2, baseline.num_tokens), np.nan)
        self.exact = np.full(len(baseline.sampled), np.nan)

    def __call__(self, tokens: Sequence[PromptToken], logits: Tensor) -> None:
        baseline = self._baseline
        for numbers, part in baseline.slices(tokens, logits):
            kept = baseline.read([each[0] for each in numbers])
            ids = torch.from_numpy(kept["ids"].astype(np.int64)).to(part.device)
            coarse = torch.from_numpy(kept["logprobs"].copy()).to(part.device)
            bounds = kl_divergence(coarse, coarse_logprobs(part.double(), ids)).tolist()
            same = part.argmax(-1).cpu().numpy() == kept["argmax"]
            for place, each in enumerate(numbers):
                self.bounds[each], self.same_top[each] = bounds[place], same[place]
            pairs = [(place, slot) for place, each in enumerate(numbers) for slot in baseline.slots(each)]
            if pairs:
                places, slots_ = map(list, zip(*pairs))
                whole = baseline.read_whole(slots_).to(part.device)
                rows = [torch.log_softmax(each.double(), -1) for each in (whole, part[places])]
                self.exact[slots_] = kl_divergence(rows[0], rows[1]).cpu()

    def require_all(self) -> None:
        """Raise `FlexgenError` if a token's row has not come, or is not finite."""
        missing = int((~np.isfinite(self.bounds)).sum() + (~np.isfinite(self.exact)).sum())
        if missing:
            raise FlexgenError(
                f"{missing:,} of {self.bounds.size + self.exact.size:,} divergences are not finite numbers"
            )


def coarse_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities of the tokens `ids`, and of all others together as the last column.

    logits [R, V] in float64, ids [R, K] -> [R, K + 1]. The last column is -inf where there are no others.
    """
    top = logits.gather(1, ids)
    others = logits.scatter(1, ids, -torch.inf).logsumexp(1)
    total = torch.logaddexp(top.logsumexp(1), others)
    return torch.cat([top, others[:, None]], 1) - total[:, None]


def kl_divergence(baseline: Tensor, other: Tensor) -> Tensor:
    """Return KL(baseline ‖ other) of each row, in nats; log-probabilities [R, C] in float64 -> [R].

    What has no chance in the baseline adds nothing (0 log 0 = 0).
    """
    terms = baseline.exp() * (baseline - other)
    return torch.where(baseline == -torch.inf, 0.0, terms).sum(-1).clamp_min(0.0)  # rounding goes below 0


class _RowFile:
    """Rows of a fixed size in an unnamed file: read and written one by one, so none stays in memory."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def write(self, number: int, row: Any) -> None:
        content = row.tobytes()
        try:
            written = os.pwrite(self._file.fileno(), content, number * self.dtype.itemsize)
        except OSError as error:
            raise FlexgenError(f"the baseline's rows cannot be written: {error.strerror}") from error
        if written != len(content):
            raise FlexgenError("the baseline's rows cannot be written: the disk is full")

    def read(self, numbers: Sequence[int]) -> NDArray[Any]:
        itemsize = self.dtype.itemsize
        content = [os.pread(self._file.fileno(), itemsize, number * itemsize) for number in numbers]
        return np.frombuffer(bytearray().join(content), self.dtype)

    def close(self) -> None:
        self._file.close()


def _require_room(folder: Path, needed: int) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise UsageError(
            f"the baseline's rows take {size(needed)} and {folder} has {size(free)} free; name another folder with "
            "--offload-dir, or score less with --max-windows"
        )
