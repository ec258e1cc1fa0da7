"""The commands by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from flexgen_helm import __version__
from flexgen_helm.cli.bench import bench
from flexgen_helm.cli.convert import convert
from flexgen_helm.cli.doctor import doctor
from flexgen_helm.cli.engine_flags import with_engine_flags
from flexgen_helm.cli.entries import entries
from flexgen_helm.cli.fetch import fetch
from flexgen_helm.cli.generate import generate
from flexgen_helm.cli.models import models
from flexgen_helm.cli.perplexity import perplexity
from flexgen_helm.cli.plan import plan
from flexgen_helm.cli.profile import profile
from flexgen_helm.cli.report import compare, report
from flexgen_helm.cli.run import run
from flexgen_helm.cli.screen import Screen
from flexgen_helm.errors import Interrupted

app = typer.Typer(
    help="Large language models under HELM on a machine too small for them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"flexgen-helm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Large language models under HELM on a machine too small for them."""


def _add(command: Callable[..., None], *, has_screen: bool = True, **settings: Any) -> None:
    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        try:
            with Screen() if has_screen else nullcontext():
                command(**values)
        except KeyboardInterrupt:  # what typer does with it differs between its versions
            raise Interrupted("interrupted") from None

    app.command(**settings)(wrapper)


# All other flags are passed to helm-run, in the order given.
_add(
    with_engine_flags(run),
    has_screen=False,  # it has one with a log
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
_add(with_engine_flags(generate))
_add(with_engine_flags(perplexity))
_add(profile)
_add(with_engine_flags(plan))
_add(compare)
_add(report)
_add(models)
_add(entries)
_add(fetch)
_add(convert)
_add(doctor)
_add(with_engine_flags(bench), has_screen=False)  # a panel takes time of what is measured
