"""What an engine exchanges with other processes of the same model; here, in one process, nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from flexgen_helm.errors import FlexgenError
from flexgen_helm.hardware.process_state import Rank

T = TypeVar("T")


class Exchange:
    """The exchange of a process that has the whole model. `Pipeline` is that of one rank of several.

    num_engines: that were opened so far.
    """

    def __init__(self, rank: Rank = Rank(0, 1, 0, 1)) -> None:
        self.rank = rank
        self.num_engines = 0

    @property
    def is_whole(self) -> bool:
        """Whether this process computes all stages, and so decides alone what a pass computes."""
        return self.rank.size == 1

    def command(self, command: object) -> AbstractContextManager[object]:
        """Let all ranks do what this one does in the context, one command at a time.

        command: `OpenEngine`, `AnswerRequests` or `CloseEngine`.
        """
        return nullcontext()

    def agree(self, own: T | FlexgenError) -> list[T]:
        """Return what all ranks have, in their order; if one has an error, raise the first of them on every rank."""
        if isinstance(own, FlexgenError):
            raise own
        return [own]

    def send_hidden(self, checksum: int, hidden: Tensor, nonfinite_layer: Tensor) -> None:
        """Send a batch's hidden states to the rank that has the next layer."""
        self._refuse()

    def receive_hidden(
        self, checksum: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Wait for a batch's hidden states from the rank that has the layer before."""
        self._refuse()

    def send_values(self, values: list[float]) -> None:
        """Send what the head has computed for a batch to the other ranks."""

    def receive_values(self, count: int) -> list[float]:
        """Wait for what another rank's head has computed for a batch."""
        self._refuse()

    def flush(self) -> None:
        """Wait until what was sent has arrived."""

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""

    def record(self, num_lanes: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a run's record says of the ranks; own: what it says of this one."""
        return {}

    def _refuse(self) -> NoReturn:
        raise AssertionError("no other process has stages of this model")
