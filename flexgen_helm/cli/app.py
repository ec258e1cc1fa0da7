"""The commands by name; each module is imported when its command is asked for."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from flexgen_helm import __version__
from flexgen_helm.cli.engine_flags import with_engine_flags
from flexgen_helm.cli.screen import Screen
from flexgen_helm.cli.typer_commands import Command, Group, help_text
from flexgen_helm.concurrency import require_linux
from flexgen_helm.errors import Interrupted

_NAMES_OF_HELP = {"help_option_names": ["-h", "--help"]}
# Flags of helm-run and lm-eval are passed on, in the order given. Without -h, which would be found
# in words such as -ohome.
_PASSED_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": ["--help"],
}


class _Entry(NamedTuple):
    """A command: the panel of --help that shows it, and its module below `flexgen_helm.cli`.

    has_screen: it shows progress; False where it does so itself.
    """

    panel: str
    module: str
    has_engine: bool = False
    has_screen: bool = True
    passes_on: bool = False


COMMANDS = {
    "quickstart": _Entry("Start here", "quickstart", has_screen=False),
    "models": _Entry("Start here", "models"),
    "entries": _Entry("Start here", "entries"),
    "run": _Entry("Evaluate", "run", has_engine=True, has_screen=False, passes_on=True),
    "lm-eval": _Entry("Evaluate", "serve", passes_on=True),
    "serve": _Entry("Evaluate", "serve", has_engine=True, has_screen=False),
    "report": _Entry("Evaluate", "report"),
    "compare": _Entry("Evaluate", "report"),
    "verify": _Entry("Evaluate", "verify", has_engine=True),
    "plan": _Entry("Plan", "plan", has_engine=True),
    "profile": _Entry("Plan", "plan"),
    "fetch": _Entry("Models", "models"),
    "convert": _Entry("Models", "models"),
    "batch": _Entry("Without HELM", "batch", has_engine=True),
    "divergence": _Entry("Without HELM", "divergence", has_engine=True),
    "doctor": _Entry("This installation", "doctor"),
    "clean": _Entry("This installation", "clean"),
}


def command_line(first: str | None = None) -> Any:
    """Return the command line; first: its first word, a command that is imported alone."""
    app = typer.Typer(
        cls=Group,
        help="Evaluate large language models with HELM on a machine too small for them.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback(context_settings=_NAMES_OF_HELP)(_root)
    names = [] if first == "--version" else [first] if first in COMMANDS else COMMANDS
    for name in names:
        _add(app, name, COMMANDS[name])
    return typer.main.get_command(app)


def _add(app: typer.Typer, name: str, entry: _Entry) -> None:
    module = import_module(f"flexgen_helm.cli.{entry.module}")
    command, kind = getattr(module, name.replace("-", "_")), Command
    if entry.has_engine:
        command = with_engine_flags(command)
    if name == "run":
        from flexgen_helm.cli.helm_flags import RunCommand, with_helm_flags

        command, kind = with_helm_flags(command), RunCommand

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        require_linux()
        try:
            with Screen() if entry.has_screen else nullcontext():
                command(**values)
            sys.stdout.flush()
        except KeyboardInterrupt:  # what typer does with it differs between its versions
            raise Interrupted("interrupted") from None

    app.command(
        name,
        cls=kind,
        context_settings=_PASSED_ON if entry.passes_on else _NAMES_OF_HELP,
        help=help_text(command.__doc__ or ""),
        rich_help_panel=entry.panel,
    )(wrapper)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"flexgen-helm {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass
