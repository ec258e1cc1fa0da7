"""The `flexgen-helm` command. Data goes to stdout, progress and errors to stderr; every error is
one sentence.

Exit codes: 0 done, 1 failed, 2 wrong usage or refused, 130 interrupted. A command imports torch,
transformers and HELM when it needs them, so `--help` answers at once.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType

from flexgen_helm.checkpoint.paths import explain, system_error
from flexgen_helm.errors import FlexgenError, Interrupted, PipelineError
from flexgen_helm.hardware.rank import Rank, rank_of_process
from flexgen_helm.service import process

# Commands that go on behind what was computed when they are given again; `run` says so itself.
_GO_ON = {"batch", "divergence", "lm-eval"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. argv: None for the arguments of the process"""
    process.command_exit_code = code = _run(argv)
    return code


def _run(argv: Sequence[str] | None) -> int:
    from flexgen_helm.cli.app import command_line
    from flexgen_helm.cli.console import say
    from flexgen_helm.cli.engine_flags import complete_dummy_weights

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without UTF-8 shows '?' instead of ending the program
            stream.reconfigure(errors="replace")
    arguments = complete_dummy_weights(sys.argv[1:] if argv is None else list(argv))
    is_debugging = bool(os.environ.get("FLEXGEN_HELM_DEBUG"))
    rank = rank_of_process()
    try:
        with _terminated_like_interrupted(), nullcontext() if rank is None else as_rank(rank):
            if rank is not None and rank.number:
                return follow_rank_0()
            root = command_line(next(iter(arguments), None))
            root.main(args=arguments, prog_name="flexgen-helm", standalone_mode=True)
        return 0
    except SystemExit as stop:
        if isinstance(broken := stop.__context__, BrokenPipeError):
            # `| head` has read enough, perhaps of a refusal
            return getattr(broken.__context__, "exit_code", 0)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except FlexgenError as error:
        if is_debugging:
            traceback.print_exc()
        say(f"flexgen-helm: {explain(error)}")
        if isinstance(error, Interrupted) and {*arguments[:1]} & _GO_ON:
            say(f"Go on with:\n  {shlex.join(['flexgen-helm', *arguments])}")
        return error.exit_code
    except KeyboardInterrupt:
        say("flexgen-helm: interrupted")
        return 130
    except Exception as error:  # the last resort
        if is_debugging:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            say(
                f"flexgen-helm: {error.filename} is too long for the name of a file; give a "
                "shorter one"
            )
            return 2
        if isinstance(error, OSError) and not error.filename and _stdout_fails():
            error.filename = "/dev/stdout"
        hint = "" if is_debugging else " (set FLEXGEN_HELM_DEBUG=1 to see where)"
        is_known = isinstance(error, OSError) and (error.filename or system_error(error))
        say(
            f"flexgen-helm: {explain(error)}"
            if is_known
            else f"flexgen-helm: unexpected {explain(error)}{hint}"
        )
        return 1


def _stdout_fails() -> bool:
    """Whether nothing more can be printed, not even a newline; what is left is dropped then."""
    try:
        print(flush=True)
    except OSError:
        # Python flushes it at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: batch systems send it when the time is up, and answers are
    stored then.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# What torchrun changes for a command: rank 0 runs it, the others follow, and all end together.

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

    @process.ours
    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted("ended by a signal; what is finished is kept")

    signal.signal(
        signal.SIGTERM, process.ours(lambda *_: signal.setitimer(signal.ITIMER_REAL, _GRACE_S))
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
