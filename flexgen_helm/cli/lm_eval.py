"""`flexgen-helm lm-eval`: lm-evaluation-harness on the engine, with its own arguments."""

from __future__ import annotations

import os
from importlib.util import find_spec

import typer

from flexgen_helm.cli.typer_commands import refuse_twice
from flexgen_helm.errors import Interrupted, UsageError

# Ends of the harness's flags that may be given twice: it joins their values.
_JOINED_FLAG_ENDS = ("_args", "_kwargs", "--tasks", "-t", "-a", "--metadata")


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on the engine, with the harness's own arguments.

    The model is `flexgen` unless `--model` or a `--config` names another one. Its `--model_args`
    are `pretrained=NAME` and engine options by the names of their flags:
    `precision=4bit,cpu_memory=8GiB`. The answers to all requests of a kind are computed together.
    After an interruption the same command goes on: what was computed comes from the response cache.
    `lm-eval run --help` lists the harness's arguments.

    Needs the extra `lm-eval`: pip install 'flexgen-helm[lm-eval]'.

    Example:
      flexgen-helm lm-eval --tasks arc_easy --limit 100 \\
        --model_args pretrained=smollm2-135m-instruct-q4_1
    """
    require_lm_eval()
    names = [
        word.partition("=")[0]
        for word in context.args
        if word.startswith("-") and not word[1:2].isdigit()
    ]
    refuse_twice(name for name in names if not name.endswith(_JOINED_FLAG_ENDS))
    from flexgen_helm.harnesses.lm_eval_command import run_command

    try:
        run_command(context.args)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; finished answers are stored, and tokens of the others"
        ) from None


def require_lm_eval() -> None:
    """Raise `UsageError` where lm-evaluation-harness is not installed; silence its progress before
    it is imported.
    """
    if find_spec("lm_eval") is None:
        raise UsageError(
            "lm-evaluation-harness is not installed; run pip install 'flexgen-helm[lm-eval]'"
        )
    os.environ.setdefault("TQDM_DISABLE", "1")  # the screen shows it
