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

_HELP_NAMES = {"help_option_names": ["-h", "--help"]}
# Flags of helm-run and lm-eval are passed on, in the order given. Without -h, which would be found
# in words such as -ohome.
_PASSED_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": ["--help"],
}


class _CommandEntry(NamedTuple):
    """Where a command is, and what it gets.

    panel: of --help, which shows it.
    module: below `flexgen_helm.cli`, with a function of the command's name.
    has_engine: it has the engine flags.
    has_screen: it runs inside a `Screen`; False where it opens one itself.
    passes_on: flags that it does not know go to another program.
    """

    panel: str
    module: str
    has_engine: bool = False
    has_screen: bool = True
    passes_on: bool = False


COMMANDS = {
    "quickstart": _CommandEntry("Start here", "quickstart", has_screen=False),
    "models": _CommandEntry("Start here", "models"),
    "entries": _CommandEntry("Start here", "entries"),
    "run": _CommandEntry("Evaluate", "run", has_engine=True, has_screen=False, passes_on=True),
    "lm-eval": _CommandEntry("Evaluate", "lm_eval", passes_on=True),
    "serve": _CommandEntry("Evaluate", "serve", has_engine=True, has_screen=False),
    "report": _CommandEntry("Evaluate", "report"),
    "compare": _CommandEntry("Evaluate", "report"),
    "verify": _CommandEntry("Evaluate", "verify", has_engine=True),
    "plan": _CommandEntry("Plan", "plan", has_engine=True),
    "profile": _CommandEntry("Plan", "plan"),
    "fetch": _CommandEntry("Models", "models"),
    "convert": _CommandEntry("Models", "models"),
    "batch": _CommandEntry("Without HELM", "batch", has_engine=True),
    "divergence": _CommandEntry("Without HELM", "divergence", has_engine=True),
    "doctor": _CommandEntry("This installation", "doctor"),
    "clean": _CommandEntry("This installation", "clean"),
}


def command_line(first: str | None = None) -> Any:
    """Return the command line of all commands.

    first: its first word; if that is a command, no other one is imported.
    """
    app = typer.Typer(
        cls=Group,
        help="Evaluate large language models with HELM on a machine too small for them.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback(context_settings=_HELP_NAMES)(_root)
    names = [] if first == "--version" else [first] if first in COMMANDS else COMMANDS
    for name in names:
        _add_command(app, name, COMMANDS[name])
    return typer.main.get_command(app)


def _add_command(app: typer.Typer, name: str, entry: _CommandEntry) -> None:
    module = import_module(f"flexgen_helm.cli.{entry.module}")
    command, command_class = getattr(module, name.replace("-", "_")), Command
    if entry.has_engine:
        command = with_engine_flags(command)
    if name == "run":
        from flexgen_helm.cli.helm_flags import RunCommand, with_helm_flags

        command, command_class = with_helm_flags(command), RunCommand

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
        cls=command_class,
        context_settings=_PASSED_ON if entry.passes_on else _HELP_NAMES,
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
