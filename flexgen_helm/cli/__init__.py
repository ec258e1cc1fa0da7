"""The `flexgen-helm` command. Data goes to stdout, progress and errors to stderr; every error is one sentence.

Exit codes: 0 done, 1 failed, 2 wrong usage or refused, 130 interrupted. A command imports torch, transformers and
HELM when it needs them, so `--help` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from flexgen_helm.checkpoint.paths import explain
from flexgen_helm.errors import FlexgenError
from flexgen_helm.hardware.process_state import rank_of_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. argv: None for the arguments of the process"""
    import typer

    from flexgen_helm.cli.app import app
    from flexgen_helm.cli.console import say
    from flexgen_helm.cli.engine_flags import complete_dummy_weights
    from flexgen_helm.cli.ranks import as_rank, follow_rank_0

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?' instead of ending the program
    arguments = complete_dummy_weights(sys.argv[1:] if argv is None else list(argv))
    is_debugging = bool(os.environ.get("FLEXGEN_HELM_DEBUG"))
    rank = rank_of_process()
    try:
        with _terminated_like_interrupted(), nullcontext() if rank is None else as_rank(rank):
            if rank is not None and rank.number:
                return follow_rank_0()
            typer.main.get_command(app).main(args=arguments, prog_name="flexgen-helm", standalone_mode=True)
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except FlexgenError as error:
        if is_debugging:
            traceback.print_exc()
        say(f"flexgen-helm: {explain(error)}")
        return error.exit_code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python says so again at its end
        return 0
    except KeyboardInterrupt:
        say("flexgen-helm: interrupted")
        return 130
    except Exception as error:  # the last resort
        if is_debugging:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            say(f"flexgen-helm: {error.filename} is too long for the name of a file; give a shorter one")
            return 2
        hint = "" if is_debugging else " (set FLEXGEN_HELM_DEBUG=1 to see where)"
        is_known = isinstance(error, OSError) and error.filename
        say(f"flexgen-helm: {explain(error)}" if is_known else f"flexgen-helm: unexpected {explain(error)}{hint}")
        return 1


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: batch systems send it when the time is up, and answers are stored then."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
