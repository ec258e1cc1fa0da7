"""Hidden states of batches that wait between two stages, split by rows over the tiers as the policy says."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.staging import aligned
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.planner.placement import TIERS, Tier


@dataclass(eq=False)
class _Waiting:
    """One batch's states: the part beside the computing, parts on their way out, and the whole on its way back."""

    shape: torch.Size
    near: Tensor
    leaving: dict[Tier, Future[Tensor | None]] = field(default_factory=dict)
    claims: list[tuple[Tier, Allocation]] = field(default_factory=list)
    coming: Future[Tensor] | None = None


class ActivationStore:
    """Holds the hidden states [T, H] of batches by number, claimed from their tiers as 'activations'."""

    def __init__(self, tiers: Tiers, fractions: Mapping[Tier, float]) -> None:
        self._tiers, self._fractions = tiers, fractions
        self._waiting: dict[int, _Waiting] = {}
        self._files: dict[int, DirectFile] = {}
        self.placed = dict.fromkeys(TIERS, 0)  # bytes ever put, by tier

    def store(self, batch: int, hidden: Tensor) -> None:
        """Keep a batch's states; what goes elsewhere leaves in the background."""
        rows, home = hidden.shape[0], self._tiers.compute_tier
        cuts, done = {}, 0.0
        for tier in (home, *(t for t in TIERS if t != home)):
            begin, done = round(done * rows), done + self._fractions[tier]
            cuts[tier] = slice(begin, round(min(done, 1.0) * rows))
        width = hidden[:1].numel() * hidden.element_size()
        held = _Waiting(hidden.shape, hidden[cuts[home]])
        self._waiting[batch] = held
        for tier, cut in cuts.items():
            size = (cut.stop - cut.start) * width
            if not size:
                continue
            held.claims.append((tier, self._tiers.ledgers[tier].claim("activations", size)))
            self.placed[tier] += size
            if tier != home:
                held.leaving[tier] = self._leave(batch, tier, hidden[cut])
        if held.leaving:
            held.near = held.near.clone()  # a view, even an empty one, would keep the parts that left alive

    def prefetch(self, batch: int) -> None:
        """Begin to bring a batch's states back; harmless where they are here or coming."""
        held = self._waiting.get(batch)
        if held is not None and held.leaving and held.coming is None:
            held.coming = self._tiers.submit("activations in", lambda: self._bring(batch, held))

    def load(self, batch: int) -> Tensor:
        """The states, which are kept no more."""
        held = self._waiting[batch]
        if held.leaving:
            self.prefetch(batch)
            assert held.coming is not None
            hidden = self._tiers.wait(held.coming, "activations")
        else:
            hidden = held.near
        self._forget(batch)
        return hidden

    def close(self) -> None:
        for batch in list(self._waiting):
            held = self._waiting[batch]
            for future in (*held.leaving.values(), *([held.coming] if held.coming else ())):
                future.exception()  # waits; the error that ended the run is reported elsewhere
            self._forget(batch)
        for file in self._files.values():
            file.close(delete=True)
        self._files.clear()

    def _forget(self, batch: int) -> None:
        for tier, claim in self._waiting.pop(batch).claims:
            self._tiers.ledgers[tier].release(claim)

    def _leave(self, batch: int, tier: Tier, part: Tensor) -> Future[Tensor | None]:
        size = part.numel() * part.element_size()
        if tier == "disk" and (batch not in self._files or self._files[batch].size < aligned(size)):
            if batch in self._files:
                self._files.pop(batch).close(delete=True)
            self._files[batch] = self._tiers.directory().scratch(f"activations-{batch}", size)

        def store() -> Tensor | None:
            near = part
            if self._tiers.copy_engine is not None:
                near = self._tiers.copy_engine.to_host(part)
                self._tiers.stats.count_bytes("gpu_to_cpu", "activations", size)
            if tier != "disk":
                return near
            self._files[batch].write_tensor(0, near)
            self._tiers.stats.count_bytes("cpu_to_disk", "activations", size)
            return None

        return self._tiers.store_async("activations", size, store)

    def _bring(self, batch: int, held: _Waiting) -> Tensor:
        with self._tiers.stats.timed("load_activations"):
            parts, first = [held.near], held.near.shape[0]
            for tier, future in held.leaving.items():
                there = future.result()
                if tier == "disk":
                    rows = held.shape[0] - first  # the disk's part is the last
                    there = self._read(batch, rows, held)
                assert there is not None
                first += there.shape[0]
                if self._tiers.copy_engine is not None:
                    size = there.numel() * there.element_size()
                    there = self._tiers.copy_engine.to_device(there)
                    self._tiers.stats.count_bytes("cpu_to_gpu", "activations", size)
                parts.append(there)
            return torch.cat(parts)

    def _read(self, batch: int, rows: int, held: _Waiting) -> Tensor:
        size = rows * held.shape[1] * held.near.element_size()
        self._tiers.note_fetch(size)
        self._tiers.stats.count_bytes("disk_to_cpu", "activations", size)
        return self._files[batch].read_tensor(0, (rows, held.shape[1]), held.near.dtype)
