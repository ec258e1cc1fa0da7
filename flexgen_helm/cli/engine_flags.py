"""The engine flags: made from `EngineConfig` and added to every command that runs an engine."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flexgen_helm.cli.console import say
from flexgen_helm.config import (
    FLAGS,
    OPTIONS,
    EngineConfig,
    EngineOptions,
    options_of_flags,
    parse_option,
)
from flexgen_helm.errors import UsageError
from flexgen_helm.files import require_writable, size, size_argument
from flexgen_helm.hardware.host_memory import host_memory, lacking_address_space
from flexgen_helm.hardware.process_state import require_cuda, why_no_cuda
from flexgen_helm.request import MemoryLimits

if TYPE_CHECKING:
    from flexgen_helm.distributed.ray_cluster import RaySession


# Values that shell completion offers. Each function imports little, because a shell waits for it.


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete one of the names that a function returns, or the last of a list with commas
    between.
    """

    def complete(incomplete: str) -> list[str]:
        earlier, comma, last = incomplete.rpartition(",")
        return [f"{earlier}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _models() -> Iterable[str]:
    from flexgen_helm.checkpoint.catalog import CATALOG

    return CATALOG


def _machines() -> Iterable[str]:
    from flexgen_helm.hardware.profile import shipped_profiles

    return ("measured", *shipped_profiles())


# A name of the catalog; a shell completes folders and files by itself.
complete_model = _completing(_models)
complete_helm_models = _completing(lambda: map("flexgen/{}".format, _models()))
complete_hardware = _completing(_machines)


ENGINE_FLAGS = tuple(flag.name for _, flag in FLAGS.values())


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `engine: EngineOptions` of a command by the engine flags that it has.

    The command gets the options of the flags that were given. A value that cannot be parsed is
    refused before.
    """
    flags = [
        name
        for name, (_, flag) in FLAGS.items()
        if command.__name__ in (flag.commands or (command.__name__,))
    ]
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "engine"
    ]
    for name in flags:
        option, flag = FLAGS[name]
        settings = typer.Option(
            flag.name,
            metavar=flag.metavar,
            help=flag.help or OPTIONS[option].metadata["help"],
            rich_help_panel="Prompts" if flag.commands else "Engine",
            autocompletion=_completing(functools.partial(list, flag.choices))
            if flag.choices
            else None,
        )
        parameters.append(flag_parameter(name, settings, is_switch=flag.metavar is None))

    def wrapper(**values: Any) -> None:
        command(engine=options_of_flags({name: values.pop(name) for name in flags}), **values)

    return with_parameters(command, wrapper, parameters)


def flag_parameter(name: str, settings: Any, is_switch: bool) -> inspect.Parameter:
    """Return a parameter of a command: a switch, or a text that need not be given."""
    kind: Any = bool if is_switch else str | None
    default, annotation = False if is_switch else None, Annotated[kind, settings]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_parameters(
    command: Callable[..., None],
    wrapper: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Return the wrapper of a command as typer takes it: with its name, its help, and these
    parameters.
    """
    functools.update_wrapper(wrapper, command)
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def complete_dummy_weights(argv: Sequence[str]) -> list[str]:
    """Write the default seed after a bare `--dummy-weights`: typer has no flags with an optional
    value.
    """
    flag = "--dummy-weights"
    following = [*argv[1:], ""]
    return [
        f"{flag}=0" if word == flag and not after.isdecimal() else word
        for word, after in zip(argv, following)
    ]


def check_engine_flags(options: EngineOptions, is_local: bool = True) -> None:
    """Refuse what this machine or another flag makes impossible, before data is read and torch is
    imported.

    is_local: this machine computes; False leaves to others what only they know.
    """
    # `run` accepts several precisions.
    precisions = [name.strip() for name in str(options.get("precision", "")).split(",")]
    for precision in filter(None, precisions):
        parse_option("precision", precision)
    config = EngineConfig(**{name: value for name, value in options.items() if name != "precision"})
    if not is_local:
        return
    if (lacking := lacking_address_space()) is not None:
        raise UsageError(f"{lacking}; run: ulimit -v unlimited")
    if config.device.startswith("cuda"):
        require_cuda(config.device)
    has_gpu = config.device == "auto" and why_no_cuda() is None
    # The engine finds out how many bytes; here only whether there is a GPU.
    gpu_bytes = math.inf if has_gpu or config.device.startswith(("cuda", "sim")) else 0
    say_what_limits_lack(config.limits, gpu_bytes, host_memory().total)
    if config.offload_dir is not None:
        require_writable(Path(config.offload_dir), "--offload-dir")


def say_what_limits_lack(
    limits: MemoryLimits, gpu_bytes: float, memory_bytes: float, machine: str = "this machine"
) -> None:
    """Say that a limit is of a GPU that is not there (`gpu_bytes` is 0), or beyond the machine's
    memory.
    """
    for flag, limit, there in (
        ("--gpu-memory", limits.gpu, gpu_bytes),
        ("--cpu-memory", limits.cpu, memory_bytes),
    ):
        if limit is not None and not there:
            say(f"{flag} has no effect: no GPU of {machine} computes")
        elif limit is not None and limit > there:
            say(f"{flag} {size(limit)} is beyond the {size(there)} that {machine} has; lower it")


def to_arguments(options: EngineOptions) -> list[str]:
    """Return the flags that stand for these options."""
    words = []
    for option, flag in FLAGS.values():
        value = options.get(option)
        if isinstance(value, MemoryLimits):
            value = (
                None if (limit := getattr(value, flag.key or "")) is None else size_argument(limit)
            )
        if option == "seed" and options.get("weights") != "dummy":
            continue
        if flag.metavar is None:
            words += [flag.name] if value is (not OPTIONS[option].default) else []
        elif value is not None:
            if isinstance(value, tuple):
                value = ",".join(f"{rate:g}" for rate in value)
            words += [
                flag.name,
                json.dumps(value) if isinstance(value, bool | Mapping) else str(value),
            ]
    return words


# Arguments and flags that several commands have; the engine flags are in `engine_flags`.


def require_folder(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a file in a folder that does not exist, before anything is computed."""
    if value is not None and not value.parent.is_dir():
        raise UsageError(f"--{parameter.name} {value}: there is no folder {value.parent}")
    return value


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of the catalog, org--repo of the Hugging Face hub, folder, or .gguf file.",
        autocompletion=complete_model,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="Branch, tag, or commit of the hub's repository."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE.json",
        help="Also write the JSON there.",
        callback=require_folder,
    ),
]
SuiteName = Annotated[
    str, typer.Option("--suite", metavar="NAME", help="Name of the suite, as given to run.")
]
OutputPath = Annotated[
    Path,
    typer.Option(
        "--output-path", "-o", metavar="DIR", help="HELM's output folder, as given to run."
    ),
]
DEFAULT_OUTPUT = Path("benchmark_output")


# When a suite ends: of `run` and `plan`.

UntilTime = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="HH:MM",
        help=(
            "Score a random sample of the instances of every run entry, as large as is done by "
            "this time."
        ),
    ),
]
Hours = Annotated[
    float | None, typer.Option(metavar="HOURS", help="As --until, so many hours from now.")
]


def seconds_left(until: str | None, hours: float | None) -> float | None:
    """Return the seconds to the next such time of day, or of the hours; None where neither is
    given.
    """
    if until is not None and hours is not None:
        raise UsageError("--until and --hours both say when the suite ends; leave one of them out")
    if until is not None:
        now = datetime.now()
        try:
            at = datetime.combine(now, datetime.strptime(until, "%H:%M").time())
        except ValueError:
            raise UsageError(
                f"--until {until!r} is no time of day; write for example --until 07:00"
            ) from None
        return (at if at > now else at + timedelta(days=1)).timestamp() - now.timestamp()
    if hours is not None and not 0 < hours < math.inf:
        raise UsageError(f"--hours {hours:g} is no duration; write for example --hours 8")
    return None if hours is None else 3600 * hours


# The flags of `flexgen-helm run` for several machines.

_PANEL = "Several machines"
RAY_FLAGS = ("--ray", "--ray-workers", "--ray-cores")

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|local|HOST:PORT",
        help="Compute with all machines or GPUs of a Ray cluster: the one that this machine is "
        "part of (auto), one of this machine alone that is started for this run (local), or the "
        "one at an address.",
        rich_help_panel=_PANEL,
    ),
]
RayWorkers = Annotated[
    int | None,
    typer.Option(
        "--ray-workers",
        metavar="N",
        help="Maximum number of workers. Ray Data starts as many as the cluster has room for, and "
        "more when machines join. Default: one for each GPU, or for each machine of a cluster "
        "without GPUs.",
        rich_help_panel=_PANEL,
    ),
]
RayCores = Annotated[
    int | None,
    typer.Option(
        "--ray-cores",
        metavar="N",
        help="Cores of each worker, so that several share a machine and its memory. Default: all "
        "of the largest machine, or a GPU's share of them.",
        rich_help_panel=_PANEL,
    ),
]


def ray_session(address: str | None, workers: int | None, cores: int | None) -> RaySession | None:
    """Return what the flags say, None without `--ray`. Raises `UsageError` for what cannot be
    used.
    """
    if address is None:
        if workers is not None or cores is not None:
            raise UsageError(
                "--ray-workers and --ray-cores need --ray; write for example --ray auto"
            )
        return None
    from flexgen_helm.distributed.ray_cluster import RayOptions, RaySession

    return RaySession(RayOptions(address, workers, cores))


# Commands as typer makes them: switches without a value's placeholder, no option twice, help that
# fills the lines.


def help_text(docstring: str) -> str:
    """Return a docstring with each paragraph on one line; one with indented lines keeps its
    lines.
    """
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in text else " ".join(text.split()) for text in paragraphs)


def refuse_twice(options: Iterable[str]) -> None:
    """Raise `UsageError` for an option that is given more than once and takes one value: parsers
    take the last.
    """
    seen: set[str] = set()
    for option in options:
        if option in seen:
            raise UsageError(
                f"{option} is given twice, and only the last would count; give it once"
            )
        seen.add(option)


class Command(TyperCommand):
    """A command whose switches show no `<bool>`, and whose help may have brackets, as
    `flexgen-helm[serve]` has.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.markup import escape

        text, self.help = self.help, escape(self.help or "")
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = text

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            parsed = parse(args)
            if not ctx.resilient_parsing:  # completion
                single = [
                    param
                    for param in parsed[2]
                    if not (param.multiple or getattr(param, "is_flag", False))
                ]
                refuse_twice(
                    max(param.opts, key=len)
                    for param in single
                    if param.param_type_name == "option"
                )
            return parsed

        vars(parser)["parse_args"] = parse_once
        return parser

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """The same for the root's own switches."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
