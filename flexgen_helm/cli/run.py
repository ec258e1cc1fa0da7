"""`flexgen-helm run`: helm-run with suite-wide blocks, progress and the engine flags."""

from __future__ import annotations

import typer

from flexgen_helm.cli.console import TokenProgress
from flexgen_helm.config import EngineOptions


def run(context: typer.Context, engine: EngineOptions) -> None:
    """Run a HELM suite: every flag of helm-run is accepted (-r, -c, -m, --suite, -o, …; -m is mandatory there too).

    The requests of all runs are computed in one block a model. Interrupted, the same command continues where it
    stopped. The engine flags below go before what a deployment file says; --precision may name several, with commas
    between, for `flexgen-helm compare`. `helm-run --help` lists the other flags.

    Example: flexgen-helm run -r simple_mcqa:model=flexgen/smollm2-135m-instruct-q4_1 -m 10 --suite first
    """
    if not context.args:
        raise typer.BadParameter("nothing to run: give helm-run's flags, at least -r or -c, and -m")
    from flexgen_helm.plugin import suite

    with TokenProgress() as progress:
        code = suite.main(context.args, progress=progress, options=engine)
    raise typer.Exit(code)
