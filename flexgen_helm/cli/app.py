"""The commands by name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from flexgen_helm import __version__
from flexgen_helm.cli.batch import batch
from flexgen_helm.cli.clean import clean
from flexgen_helm.cli.divergence import divergence
from flexgen_helm.cli.doctor import doctor
from flexgen_helm.cli.engine_flags import Command, Group, help_text, with_engine_flags
from flexgen_helm.cli.entries import entries
from flexgen_helm.cli.helm_flags import RunCommand, with_helm_flags
from flexgen_helm.cli.models import convert, fetch, models
from flexgen_helm.cli.plan import plan, profile
from flexgen_helm.cli.quickstart import quickstart
from flexgen_helm.cli.report import compare, report
from flexgen_helm.cli.run import run
from flexgen_helm.cli.screen import Screen
from flexgen_helm.cli.serve import lm_eval, serve
from flexgen_helm.cli.verify import verify
from flexgen_helm.concurrency import require_linux
from flexgen_helm.errors import Interrupted

app = typer.Typer(
    cls=Group,
    help="Evaluate large language models with HELM on a machine too small for them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_NAMES_OF_HELP = {"help_option_names": ["-h", "--help"]}


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"flexgen-helm {__version__}")
        raise typer.Exit


@app.callback(context_settings=_NAMES_OF_HELP)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _add(panel: str, command: Callable[..., None], *, has_screen: bool = True, **settings: Any) -> None:
    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        require_linux()
        try:
            with Screen() if has_screen else nullcontext():
                command(**values)
            sys.stdout.flush()
        except KeyboardInterrupt:  # what typer does with it differs between its versions
            raise Interrupted("interrupted") from None

    settings = {"cls": Command, "context_settings": _NAMES_OF_HELP, **settings}
    app.command(help=help_text(command.__doc__ or ""), rich_help_panel=panel, **settings)(wrapper)


_add("Start here", quickstart, has_screen=False)  # it shows that of each run
_add("Start here", models)
_add("Start here", entries)
# Flags of helm-run and lm-eval are passed on, in the order given. Without -h, which would be found in words such as
# -ohome.
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": ["--help"]}
_add(
    "Evaluate",
    with_helm_flags(with_engine_flags(run)),
    has_screen=False,  # it has one with a log
    cls=RunCommand,
    context_settings=_PASSED_ON,
)
_add("Evaluate", lm_eval, context_settings=_PASSED_ON)
_add("Evaluate", with_engine_flags(serve), has_screen=False)  # it has one while it loads
_add("Evaluate", report)
_add("Evaluate", compare)
_add("Evaluate", with_engine_flags(verify))
_add("Plan", with_engine_flags(plan))
_add("Plan", profile)
_add("Models", fetch)
_add("Models", convert)
_add("Without HELM", with_engine_flags(batch))
_add("Without HELM", with_engine_flags(divergence))
_add("This installation", doctor)
_add("This installation", clean)
