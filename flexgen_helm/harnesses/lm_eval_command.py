"""The command line of lm-evaluation-harness, with `flexgen` as its model."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path

from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

from flexgen_helm.errors import UsageError
from flexgen_helm.harnesses.lm_eval import FlexgenLM, engine_options, register_model
from flexgen_helm.report.verification import one_line


def _raise_unsaved(record: logging.LogRecord, folder: str | None) -> bool:
    """Raise the system's error by which results were not saved: the harness only logs it, and its
    exit code is 0.

    A filter of the harness's log: it is called while the error is handled.
    folder: that results are saved to; None where they are not.
    """
    error = sys.exc_info()[1]
    if isinstance(error, OSError):
        error.filename = error.filename or folder
        raise error
    return True


def run_command(arguments: Sequence[str]) -> None:
    """Run the harness's command line; its model is `flexgen` where no argument names one.

    Raises `UsageError` for what the harness refuses.
    """
    register_model()
    setup_logging()
    before, sys.argv = sys.argv, ["lm-eval", *arguments]  # the harness reads them there
    try:
        command = HarnessCLI()
        parsed = command.parse_args()
    finally:
        sys.argv = before
    if parsed.command == "run" and parsed.config is None:
        parsed.model = parsed.model or "flexgen"
        # The harness hands its own device beside the model's arguments, and its default is a GPU.
        device = (
            parsed.model_args.pop("device", None) if isinstance(parsed.model_args, dict) else None
        )
        parsed.device = parsed.device or device or "auto"
        if parsed.model == "flexgen":  # refused before the harness reads its tasks
            bound = signature(FlexgenLM).bind(**(parsed.model_args or {})).arguments
            engine_options(bound.get("arguments", {}))  # those that the class does not name
    if folder := getattr(parsed, "include_path", None):
        for file in Path(folder).rglob("*.yaml"):
            with suppress(FileNotFoundError):  # a link to nothing, as editors make
                file.open().close()  # the harness leaves out what it cannot read
    raise_unsaved = partial(_raise_unsaved, folder=getattr(parsed, "output_path", None))
    logging.getLogger("lm_eval.loggers.evaluation_tracker").addFilter(raise_unsaved)
    try:
        command.execute(parsed)
    except ValueError as error:  # of tasks and settings that the harness does not know
        raise UsageError(f"lm-evaluation-harness refuses this: {error}") from error
    except OSError as error:
        if error.errno is not None:  # the system's; libraries give none
            raise
        raise UsageError(
            "what this evaluation reads is not here and could not be downloaded "
            f"({one_line(error).partition('. ')[0]}); run it once where there is a network, copy "
            "the Hugging Face cache, and set HF_HUB_OFFLINE=1"
        ) from error
    except IndexError as error:
        # The harness reads the first character of each choice of a task's first document.
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("api/task.py"):
            raise
        raise UsageError(
            "the first document of a task has an empty choice, which has no score; correct the "
            "task's doc_to_choice, or leave that document out"
        ) from error
