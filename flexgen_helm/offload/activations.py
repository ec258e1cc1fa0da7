"""Hidden states of batches that wait between two stages, split by rows over the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload.copy_engine import Launched
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.shared_sizes import aligned
from flexgen_helm.tiers import TIERS, Tier


@dataclass(eq=False)
class _StoredBatch:
    """The hidden states [T, H] of one batch.

    resident: the first rows, on the compute device.
    stores: tier -> store of the next rows; its result is the rows in host memory, or None on the
        disk.
    claims: releases the memory on all tiers.
    fetch: of all rows to the compute device; None until `prefetch` is called.
    """

    shape: torch.Size
    resident: Tensor
    stores: dict[Tier, Future[Tensor | None]] = field(default_factory=dict)
    claims: ExitStack = field(default_factory=ExitStack)
    fetch: Future[Tensor] | None = None


class ActivationStore:
    """Hidden states [T, H] by batch number. Stores and fetches run in the background; their errors
    surface in `load`.

    placed: tier -> bytes stored so far, of all batches.
    """

    def __init__(self, tiers: TransferManager, fractions: Mapping[Tier, float]) -> None:
        """fractions: share of a batch's rows on each tier."""
        self._tiers, self._fractions = tiers, fractions
        self._batches: dict[int, _StoredBatch] = {}
        self._waiting: dict[int, Allocation] = {}
        self._files: dict[int, DirectFile] = {}
        self.placed = dict.fromkeys(TIERS, 0)

    def store(self, batch: int, hidden: Tensor) -> None:
        """Store a batch's states; blocks while too many bytes wait to be stored.

        Shares are of whole rows, so what one tier has no room for goes to the next.

        Raises `MemoryLimitError` if the last one has no room for its rows.
        """
        compute_tier = self._tiers.compute_tier
        num_rows = hidden.shape[0]
        row_bytes = hidden[:1].nbytes
        # `_fetch` reads what is left of the rows from the disk, so the disk comes last
        tiers = (compute_tier, *(t for t in TIERS if t != compute_tier))
        last = next(tier for tier in reversed(tiers) if self._fractions[tier] > 0)
        stored = self._batches[batch] = _StoredBatch(hidden.shape, hidden[:0])
        num_stored, share = 0, 0.0  # rows and share of the tiers so far
        for tier in tiers:
            share += self._fractions[tier]
            end = num_rows if tier == last else round(min(share, 1.0) * num_rows)
            wanted = max(0, end - num_stored) if self._fractions[tier] > 0 else 0
            num_claimed = self._claim_rows(stored, tier, wanted, row_bytes, tier == last)
            part = hidden[num_stored : num_stored + num_claimed]
            num_stored += num_claimed
            if tier == compute_tier:
                stored.resident = part
            elif num_claimed:
                stored.stores[tier] = self._store_async(batch, tier, part)
            if tier == last:
                break
        if stored.stores:
            # A view, even an empty one, would keep the memory of the other rows.
            stored.resident = stored.resident.clone()

    def _claim_rows(
        self, stored: _StoredBatch, tier: Tier, rows: int, row_bytes: int, needs_all: bool
    ) -> int:
        """Claim memory for up to `rows` rows; return how many have room.

        needs_all: raise `MemoryLimitError` if not all have.
        """
        ledger = self._tiers.ledgers[tier]
        while rows:
            try:
                claim = ledger.claim("activations", rows * row_bytes)
            except MemoryLimitError:
                if needs_all:
                    raise
                rows = min(rows - 1, max(0, ledger.free // row_bytes))
                continue
            stored.claims.callback(ledger.release, claim)
            self.placed[tier] += rows * row_bytes
            break
        return rows

    def claim_waiting(self, batch: int, num_bytes: int) -> bool:
        """Claim memory of the compute tier for a batch that waits within a layer; return whether it
        had room.
        """
        try:
            self._waiting[batch] = self._tiers.ledgers[self._tiers.compute_tier].claim(
                "activations", num_bytes
            )
        except MemoryLimitError:
            return False
        return True

    def release_waiting(self, batch: int) -> None:
        """Release the memory of `claim_waiting`; harmless where nothing was claimed."""
        if batch in self._waiting:
            self._tiers.ledgers[self._tiers.compute_tier].release(self._waiting.pop(batch))

    def prefetch(self, batch: int) -> None:
        """Begin to fetch a batch's states; does nothing if there are none, or all are resident or
        being fetched.
        """
        stored = self._batches.get(batch)
        if stored is not None and stored.stores and stored.fetch is None:
            stored.fetch = self._tiers.submit("activations in", lambda: self._fetch(batch, stored))

    def load(self, batch: int) -> Tensor:
        """Return a batch's states on the compute device and forget them; waits for their stores and
        fetches.
        """
        self.prefetch(batch)
        stored = self._batches[batch]
        hidden = (
            stored.resident
            if stored.fetch is None
            else self._tiers.wait(stored.fetch, "activations")
        )
        self._batches.pop(batch).claims.close()
        return hidden

    def close(self) -> None:
        """Forget all states, after running transfers; their errors are ignored, because one of them
        ended the run.
        """
        for batch in [*self._waiting]:
            self.release_waiting(batch)
        for stored in self._batches.values():
            for future in (*stored.stores.values(), stored.fetch):
                if future is not None:
                    future.exception()  # waits
            stored.claims.close()
        self._batches.clear()
        for file in self._files.values():
            file.close(delete=True)
        self._files.clear()

    def _store_async(self, batch: int, tier: Tier, part: Tensor) -> Future[Tensor | None]:
        """Begin to store rows in host memory or on the disk; a batch's file is kept while it is
        large enough.
        """
        if tier == "disk" and (
            batch not in self._files or self._files[batch].size < aligned(part.nbytes)
        ):
            if batch in self._files:
                self._files.pop(batch).close(delete=True)
            self._files[batch] = self._tiers.directory().scratch(
                f"activations-{batch}", part.nbytes
            )

        def store(after: Launched) -> Tensor | None:
            on_host = self._tiers.to_host(part, "activations", after=after)
            if tier != "disk":
                return on_host
            self._files[batch].write_tensor(0, on_host)
            self._tiers.stats.count_bytes("cpu_to_disk", "activations", part.nbytes)
            return None

        return self._tiers.store_async("activations", part.nbytes, store)

    def _fetch(self, batch: int, stored: _StoredBatch) -> Tensor:
        """Join all rows on the compute device; runs in the background."""
        with self._tiers.stats.timed("load_activations"):
            parts, num_rows = [stored.resident], stored.resident.shape[0]
            for store in stored.stores.values():
                part = store.result()
                if part is None:  # the disk has all other rows
                    shape = stored.shape[0] - num_rows, stored.shape[1]
                    part = self._files[batch].read_tensor(0, shape, stored.resident.dtype)
                    self._tiers.note_fetch(part.nbytes)
                    self._tiers.stats.count_bytes("disk_to_cpu", "activations", part.nbytes)
                num_rows += part.shape[0]
                parts.append(self._tiers.to_device(part, "activations"))
            return torch.cat(parts)
