"""Hidden states of a long pass on the disk: a stopped run goes on behind the layer that they are
of.

Where nobody decodes, a pass takes all prompts through a layer before the next one, and keeps one
layer of the cache. So between two layers the hidden states are all that there is of it. They are
stored by sequence: a run that goes on with the same prompts finds them, however it divides these
into batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload.ledger import Allocation, Ledger
from flexgen_helm.progress import Message, report
from flexgen_helm.scheduling.sequence import Batch, ScheduledTokens
from flexgen_helm.shared_sizes import KEEP_STATES_EVERY_S

# Share of a pass that may be spent on storing its states.
_MOST_TIME = 0.02
# Bytes that say where the index begins, at the end of the file.
_END_BYTES = 8


class _Entry(NamedTuple):
    """Where the file has a sequence: its hidden states, and then the layers after which a value was
    not finite.

    offset, num_bytes: of both together.
    checksum: CRC-32 of these bytes.
    """

    offset: int
    num_bytes: int
    checksum: int


class KeptStates:
    """The file of an engine's hidden states: all sequences, an index, and where the index begins.

    num_read: sequences that went on from it.
    """

    def __init__(
        self, folder: Path, fingerprint: str, disk: Ledger, on_keep: Callable[[], None]
    ) -> None:
        """fingerprint: of the engine; disk: the file counts there; on_keep: called when all states
        are stored.
        """
        self.path = folder / f"hidden-{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}"
        self._disk, self._on_keep = disk, on_keep
        self._claim: Allocation | None = None
        self._every_s, self._kept_at = KEEP_STATES_EVERY_S, time.perf_counter()
        self._index: dict[str, Any] = {}
        # The file whose index was read. Another process may give its name to another meanwhile.
        self._file: BinaryIO | None = None
        self._is_ours = False  # it was read or written here
        self.num_read = 0

    def first_stage(self, batches: Sequence[Batch]) -> int:
        """Return the first stage that is to be computed of all batches: 0, or behind states that
        are stored whole.
        """
        items = [item for batch in batches for item in batch.scheduled]
        self._close_file()
        try:
            file = self._file = self.path.open("rb")
            file.seek(-_END_BYTES, os.SEEK_END)
            file.seek(int.from_bytes(file.read(_END_BYTES), "little"))
            self._index = json.loads(file.read()[:-_END_BYTES])
            for entry in [self._entry(item) for item in items]:
                file.seek(entry.offset)
                if zlib.crc32(file.read(entry.num_bytes)) != entry.checksum:
                    return 0
            stage = int(self._index["stage"]) + 1
            self._is_ours = True
            return stage
        # there is no file, or one of other prompts, or a damaged one
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def read(self, batch: Batch, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, width] of a batch, and the layer after which a value was not
        finite [T].
        """
        parts, file = [], self._file
        assert file is not None
        for item in batch.scheduled:
            entry = self._entry(item)
            file.seek(entry.offset)
            data = torch.frombuffer(bytearray(file.read(entry.num_bytes)), dtype=torch.uint8)
            hidden, nonfinite = data.split(
                [item.count * width * dtype.itemsize, item.count * torch.int64.itemsize]
            )
            parts.append(
                (
                    hidden.clone().view(dtype).view(-1, width),
                    nonfinite.clone().view(torch.int64),
                )
            )
        self.num_read += len(parts)
        hidden, nonfinite = map(torch.cat, zip(*parts))
        return hidden, nonfinite

    def _entry(self, item: ScheduledTokens) -> _Entry:
        return _Entry(*self._index["sequences"][_key(item)])

    def is_due(self) -> bool:
        """Return whether enough time has passed since states were stored."""
        return time.perf_counter() - self._kept_at >= self._every_s

    def keep(
        self, stage: int, states: Iterable[tuple[Batch, Tensor, Tensor]], total_bytes: int
    ) -> None:
        """Store the states behind a stage, as `read` returns them; a disk without room ends the
        keeping, not the run.

        total_bytes: of all states.
        """
        began = time.perf_counter()
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            if self._claim is None:
                # the last file, and the one before it
                self._claim = self._disk.claim("activations", 2 * total_bytes)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                sequences = {}
                for batch, hidden, nonfinite in states:
                    counts = [item.count for item in batch.scheduled]
                    parts = zip(hidden.cpu().split(counts), nonfinite.cpu().long().split(counts))
                    for item, (rows, layers) in zip(batch.scheduled, parts):
                        hidden_data, layers_data = (
                            x.contiguous().view(torch.uint8).numpy().data for x in (rows, layers)
                        )
                        sequences[_key(item)] = _Entry(
                            file.tell(),
                            hidden_data.nbytes + layers_data.nbytes,
                            zlib.crc32(layers_data, zlib.crc32(hidden_data)),
                        )
                        file.writelines((hidden_data, layers_data))
                end = file.tell()
                file.write(json.dumps({"stage": stage, "sequences": sequences}).encode())
                file.write(end.to_bytes(_END_BYTES, "little"))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)
            self._is_ours = True
        except (OSError, MemoryLimitError) as error:
            unfinished.unlink(missing_ok=True)
            self._every_s = float("inf")
            report(Message(f"hidden states are not kept, so a stop costs the whole pass: {error}"))
            return
        self._kept_at = time.perf_counter()
        self._every_s = max(KEEP_STATES_EVERY_S, (self._kept_at - began) / _MOST_TIME)
        self._on_keep()

    def close(self, is_done: bool) -> None:
        """Give the room back; is_done: remove a file that was read or written here, because nothing
        goes on from it.
        """
        self._close_file()
        if self._claim is not None:
            self._disk.release(self._claim)
        if is_done and self._is_ours:
            with suppress(OSError):
                self.path.unlink()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _key(item: ScheduledTokens) -> str:
    """Name a sequence by all tokens that it sees."""
    sequence = item.sequence
    prefixes: Sequence[Any] = [[prefix.start, prefix.tokens] for prefix in sequence.prefixes]
    text = json.dumps(
        [prefixes, sequence.start, sequence.num_computed, item.count, sequence.tokens]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]
