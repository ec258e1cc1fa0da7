"""`flexgen-helm lm-eval`: the command line of lm-evaluation-harness, with models of the engine."""

from __future__ import annotations

import os
from importlib.util import find_spec

import typer

from flexgen_helm.cli.engine_flags import refuse_twice
from flexgen_helm.errors import Interrupted, UsageError

# Ends of the harness's flags whose values it joins.
_JOINED = ("_args", "_kwargs", "--tasks", "-t", "-a", "--metadata")


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on the engine, with the harness's own arguments.

    The model is `flexgen` unless `--model` or a `--config` names another one. Its `--model_args` are `pretrained=NAME`
    and engine options by the names of their flags: `precision=4bit,cpu_memory=8GiB`. The answers to all requests of a
    kind are computed together. After an interruption the same command goes on: what was computed comes from the
    response cache. `lm-eval run --help` lists the harness's arguments.

    Needs the extra `lm-eval`: pip install 'flexgen-helm[lm-eval]'.

    Example:
      flexgen-helm lm-eval --model_args pretrained=smollm2-135m-instruct-q4_1 --tasks arc_easy --limit 100
    """
    if find_spec("lm_eval") is None:
        raise UsageError("lm-evaluation-harness is not installed; run pip install 'flexgen-helm[lm-eval]'")
    names = [word.partition("=")[0] for word in context.args if word.startswith("-") and not word[1:2].isdigit()]
    refuse_twice(name for name in names if not name.endswith(_JOINED))
    os.environ.setdefault("TQDM_DISABLE", "1")  # the screen shows progress
    from flexgen_helm.harnesses.lm_eval import run_command

    try:
        run_command(context.args)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; finished answers are stored, and the same command computes the rest") from None
