"""The flags of helm-run: shown and completed by `flexgen-helm run`, checked before HELM is
imported, and passed on.

tests/cli/test_helm_flags.py compares them with HELM's own parser.
"""

from __future__ import annotations

import inspect
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from flexgen_helm.cli.arguments import RAY_FLAGS
from flexgen_helm.cli.completion import complete_helm_models
from flexgen_helm.cli.engine_flags import ENGINE_FLAGS
from flexgen_helm.cli.typer_commands import Command, flag_parameter, refuse_twice, with_parameters
from flexgen_helm.errors import UsageError
from flexgen_helm.suggestions import closest, listed


class HelmFlag(NamedTuple):
    """A flag of HELM's parser.

    spelling: its names, as help shows them
    metavar: placeholder of the value; None for a switch
    help: empty for one that is not shown
    nargs, type: as of argparse
    """

    spelling: str
    metavar: str | None
    help: str
    example: str = ""
    nargs: str | None = None
    type: type = str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.spelling.split(", "))


HELM_FLAGS: tuple[HelmFlag, ...] = (
    HelmFlag(
        "-r, --run-entries",
        "ENTRY…",
        "What to run, one or more entries.",
        "simple_mcqa:model=flexgen/opt-125m",
        "*",
    ),
    HelmFlag(
        "-c, --conf-paths",
        "FILE…",
        "Files with run entries; shipped ones are found from every folder.",
        "runs/quickstart.conf",
        "+",
    ),
    HelmFlag(
        "-m, --max-eval-instances",
        "N",
        "Maximum instances per scenario (required).",
        "100",
        type=int,
    ),
    HelmFlag(
        "--suite",
        "NAME",
        "Name of this suite, for report and compare. Default: default, where unnamed runs mix.",
        "first",
    ),
    HelmFlag(
        "-o, --output-path", "DIR", "Folder of all suites. Default: benchmark_output.", "results"
    ),
    HelmFlag(
        "--models-to-run", "MODEL…", "Run only entries of these models.", "flexgen/opt-125m", "+"
    ),
    HelmFlag(
        "--groups-to-run", "GROUP…", "Run only entries of these groups of a -c file.", "mmlu", "+"
    ),
    HelmFlag(
        "--priority", "N", "Run only entries up to this priority of a -c file.", "2", type=int
    ),
    HelmFlag(
        "-t, --num-train-trials",
        "N",
        "Trials, each with other examples in its prompts.",
        "3",
        type=int,
    ),
    HelmFlag("-n, --num-threads", "N", "Threads that make requests. Default: 4.", "8", type=int),
    HelmFlag("-d, --dry-run", None, "Make the prompts, compute nothing."),
    HelmFlag("--skip-completed-runs", None, "Leave out runs that have results already."),
    HelmFlag("--exit-on-error", None, "Stop at the first run that fails."),
    HelmFlag("--disable-cache", None, "Reuse no stored answers."),
    HelmFlag(
        "--local-path",
        "DIR",
        "Folder of HELM's deployments and caches. Default: prod_env.",
        "my_env",
    ),
    # Passed on and not shown: `helm-run --help` has them.
    *(
        HelmFlag(name, "VALUE", "", nargs=nargs)
        for nargs, names in (
            (None, "log-config runner-class-name server-url api-key-path mongo-uri"),
            ("+", "plugins enable-huggingface-models enable-local-huggingface-models"),
            ("*", "run-specs"),
        )
        for name in map("--{}".format, names.split())
    ),
    *(
        HelmFlag(f"--{name}", None, "")
        for name in ("cache-instances", "cache-instances-only", "skip-instances")
    ),
)


class _StoreOnce(Action):
    """Store a value, or join lists; `given.joined` has the flags whose lists were joined."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            if not isinstance(values, list):
                refuse_twice([self.option_strings[-1]] * 2)
            values = before + values
            namespace.joined = {**namespace.joined, self.option_strings[-1]: values}
        setattr(namespace, self.dest, values)


class _FlagParser(ArgumentParser):
    """Raises `UsageError` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"run: {message}")


def parse_helm_flags(args: Sequence[str]) -> Namespace:
    """Parse flags of helm-run as HELM does, without its defaults, but lists that are given twice
    are joined.

    Raises `UsageError` for what HELM would refuse, and for a single value given twice.
    """
    parser = _FlagParser(add_help=False)
    parser.set_defaults(joined={})
    parser.add_argument("-h", action="store_true")
    for flag in HELM_FLAGS:
        if flag.metavar is None:
            parser.add_argument(*flag.names, action="store_true")
        else:
            parser.add_argument(*flag.names, action=_StoreOnce, nargs=flag.nargs, type=flag.type)
    flags, unknown = parser.parse_known_args(args)
    known = [*(name for flag in HELM_FLAGS for name in flag.names), *ENGINE_FLAGS, *RAY_FLAGS]
    for word in unknown:  # a flag that only a newer HELM knows is left to HELM
        if word.startswith("--") and (close := closest(word.partition("=")[0], known)):
            raise UsageError(f"run has no flag {word}; did you mean {listed(close)}?")
    return flags


def check_helm_flags(context: typer.Context, args: Sequence[str], is_sample: bool = False) -> None:
    """Refuse flags of helm-run that HELM would refuse, before HELM is imported. -h prints the help
    of `run`.

    is_sample: instances are computed in blocks until a time.
    """
    flags = parse_helm_flags(args)
    if flags.h:
        typer.echo(context.get_help())
        raise typer.Exit
    if not (flags.run_entries or flags.conf_paths or flags.run_specs):
        raise UsageError(
            "run needs -r, one or more run entries, or -c, a file with them, for example "
            "-r simple_mcqa:model=flexgen/opt-125m"
        )
    if is_sample and (flags.disable_cache or flags.server_url):
        flag = "--disable-cache" if flags.disable_cache else "--server-url"
        raise UsageError(
            "--until, --hours and --until-decided need answers that are computed and stored here; "
            f"leave {flag} out"
        )
    if flags.max_eval_instances is None:
        raise UsageError(
            "run needs -m, the largest number of instances per scenario, for example -m 100"
        )
    if flags.max_eval_instances < 1:
        raise UsageError(f"-m {flags.max_eval_instances}: it must be 1 or more")
    if flags.suite is not None and (not flags.suite.strip() or ".." in Path(flags.suite).parts):
        raise UsageError(
            f"--suite {flags.suite!r} names no folder below the output's; write for example "
            "--suite first"
        )
    if flags.output_path is not None and Path(flags.output_path).is_file():
        raise UsageError(f"-o {flags.output_path} is a file; name a folder")


def _parameter(name: str, flag: HelmFlag) -> inspect.Parameter:
    example = f" Example: {flag.names[0]} {flag.example}" if flag.example else ""
    settings = typer.Option(
        *flag.names,
        metavar=flag.metavar,
        help=flag.help + example,
        rich_help_panel="HELM",
        autocompletion=complete_helm_models if flag.metavar == "MODEL…" else None,
    )
    return flag_parameter(name, settings, is_switch=flag.metavar is None)


_PARAMETERS = {
    name: _parameter(name, flag)
    for flag in HELM_FLAGS
    if flag.help
    for name in ["helm" + flag.names[-1].replace("-", "_")]
}


def with_helm_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of helm-run to the parameters of `run`, for its help and completion.

    Their values are dropped here, because HELM parses them.
    """

    def wrapper(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name not in _PARAMETERS})

    parameters = inspect.signature(command).parameters.values()
    return with_parameters(command, wrapper, [*_PARAMETERS.values(), *parameters])


class RunCommand(Command):
    """The command `run`: flags of helm-run are in its help and completion, and pass unparsed, in
    the order given.
    """

    def make_parser(self, ctx: Any) -> Any:
        for param in self.params:
            if param.name in _PARAMETERS:
                vars(param)["add_to_parser"] = lambda parser, ctx: None
        return super().make_parser(ctx)
