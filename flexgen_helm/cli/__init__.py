"""The `flexgen-helm` command. Data goes to stdout, progress and errors to stderr; every error is
one sentence.

Exit codes: 0 done, 1 failed, 2 wrong usage or refused, 130 interrupted. A command imports torch,
transformers and HELM when it needs them, so `--help` answers at once.
"""

from __future__ import annotations

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

from flexgen_helm.cli.console import say
from flexgen_helm.cli.pipeline_rank import as_rank, follow_rank_0
from flexgen_helm.engine.rank import rank_of_process
from flexgen_helm.errors import FlexgenError, Interrupted
from flexgen_helm.service import process
from flexgen_helm.system_errors import explain, system_error

# Commands that continue from the cache when repeated; `run` says so itself.
_RESUMABLE = {"batch", "divergence", "lm-eval"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. argv: None for the arguments of the process"""
    process.command_exit_code = code = _run(argv)
    return code


def _run(argv: Sequence[str] | None) -> int:
    from flexgen_helm.cli.engine_flags import complete_dummy_weights

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without UTF-8 shows '?' instead of ending the program
            stream.reconfigure(errors="replace")
    arguments = complete_dummy_weights(sys.argv[1:] if argv is None else list(argv))
    try:
        return _dispatch(arguments)
    except SystemExit as stop:
        if isinstance(broken := stop.__context__, BrokenPipeError):
            # `| head` has read enough; its context is the error that was being printed
            return getattr(broken.__context__, "exit_code", 0)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        say("flexgen-helm: interrupted")
        return 130
    except Exception as error:
        if is_debugging := bool(os.environ.get("FLEXGEN_HELM_DEBUG")):
            traceback.print_exc()
        if not isinstance(error, FlexgenError):
            return _exit_code_of_unexpected(error, is_debugging)
        say(f"flexgen-helm: {explain(error)}")
        if isinstance(error, Interrupted) and {*arguments[:1]} & _RESUMABLE:
            say(f"Go on with:\n  {shlex.join(['flexgen-helm', *arguments])}")
        return error.exit_code


def _dispatch(arguments: Sequence[str]) -> int:
    """Run the command, or follow rank 0; return the exit code."""
    from flexgen_helm.cli.app import command_line

    rank = rank_of_process()
    with _terminated_like_interrupted(), nullcontext() if rank is None else as_rank(rank):
        if rank is not None and rank.number:
            return follow_rank_0()
        root = command_line(next(iter(arguments), None))
        root.main(args=[*arguments], prog_name="flexgen-helm", standalone_mode=True)
    return 0


def _exit_code_of_unexpected(error: Exception, is_debugging: bool) -> int:
    """Say what the system refused, or which defect was met; return the exit code."""
    if isinstance(error, OSError):
        if error.errno == errno.ENAMETOOLONG:
            say(
                f"flexgen-helm: {error.filename} is too long for the name of a file; give a "
                "shorter one"
            )
            return 2
        if not error.filename and _stdout_fails():
            error.filename = "/dev/stdout"
        if error.filename or system_error(error):
            say(f"flexgen-helm: {explain(error)}")
            return 1
    hint = "" if is_debugging else " (set FLEXGEN_HELM_DEBUG=1 to see where)"
    say(f"flexgen-helm: unexpected {explain(error)}{hint}")
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
