"""Which process of a pipeline this is, from the environment that `torchrun` made. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """One process of several.

    number, size: of all processes; local_number, local_size: of those on this machine.
    """

    number: int
    size: int
    local_number: int
    local_size: int


def rank_of_process() -> Rank | None:
    """Return the rank that torchrun has given to this process; None where it is the only one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(
        os.environ.get(name, "").isdecimal() for name in names
    ):
        return None
    rank = Rank(*(int(os.environ[name]) for name in names))
    return rank if rank.size > 1 else None
