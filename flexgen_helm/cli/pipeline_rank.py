"""What torchrun changes for a command: rank 0 runs it, the others follow, and all end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flexgen_helm.engine.rank import Rank
from flexgen_helm.errors import Interrupted, PipelineError
from flexgen_helm.service import process

# Seconds to wait after SIGTERM: a broken connection tells which rank was lost, and torchrun, which
# ends all, does not.
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@contextmanager
def as_rank(rank: Rank) -> Iterator[None]:
    """Be a rank of a pipeline: end with the parent, or a little after SIGTERM, and tell the others
    at the end.
    """
    from flexgen_helm.engine.pipeline import leave_pipeline

    @process.dropped_in_forks
    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted("ended by a signal; what is finished is kept")

    signal.signal(
        signal.SIGTERM,
        process.dropped_in_forks(lambda *_: signal.setitimer(signal.ITIMER_REAL, _GRACE_S)),
    )
    signal.signal(signal.SIGALRM, end)
    end_with_parent()
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        leave_pipeline()


def end_with_parent() -> None:
    """Get SIGTERM when the parent process ends, however it ends: torchrun cannot end its ranks if
    it is killed.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGTERM)


def follow_rank_0() -> int:
    """Follow rank 0 and return the exit code. A lost rank is for rank 0, or torchrun, to report."""
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.engine.pipeline import follow

    try:
        follow(Engine)
    except PipelineError:
        return PipelineError.exit_code
    return 0
