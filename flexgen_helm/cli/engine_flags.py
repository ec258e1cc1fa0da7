"""The engine flags: made from `EngineConfig` and added to every command that runs an engine."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.completion import complete_from
from flexgen_helm.cli.console import say
from flexgen_helm.config import FLAGS, OPTIONS, EngineConfig, EngineOptions, options_of_flags, parse_option
from flexgen_helm.errors import UsageError
from flexgen_helm.files import require_writable
from flexgen_helm.hardware.control_groups import host_memory, lacking_address_space
from flexgen_helm.hardware.cuda import require_cuda, why_no_cuda
from flexgen_helm.request import MemoryLimits
from flexgen_helm.units import size, size_argument

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine


ENGINE_FLAGS = tuple(flag.name for _, flag in FLAGS.values())


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `engine: EngineOptions` of a command by the engine flags that it has.

    The command gets the options of the flags that were given. A value that cannot be parsed is refused before.
    """
    flags = [name for name, (_, flag) in FLAGS.items() if command.__name__ in (flag.commands or (command.__name__,))]
    own = [known for known in inspect.signature(command, eval_str=True).parameters.values() if known.name != "engine"]
    parameters = [known.replace(kind=inspect.Parameter.KEYWORD_ONLY) for known in (*own, *map(_typer_parameter, flags))]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        command(engine=options_of_flags({name: values.pop(name) for name in flags}), **values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _typer_parameter(name: str) -> inspect.Parameter:
    option, flag = FLAGS[name]
    settings = typer.Option(
        flag.name,
        metavar=flag.metavar,
        help=flag.help or OPTIONS[option].metadata["help"],
        show_default=False,
        rich_help_panel="Prompts" if flag.commands else "Engine",
        autocompletion=complete_from(flag.choices) if flag.choices else None,
    )
    kind: Any = bool if flag.metavar is None else str | None
    default = False if flag.metavar is None else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, settings]
    )


def complete_dummy_weights(argv: Sequence[str]) -> list[str]:
    """Write the default seed after a bare `--dummy-weights`: typer has no flags with an optional value."""
    flag = "--dummy-weights"
    following = [*argv[1:], ""]
    return [f"{flag}=0" if word == flag and not after.isdecimal() else word for word, after in zip(argv, following)]


def check_engine_flags(options: EngineOptions, is_local: bool = True) -> None:
    """Refuse what this machine or another flag makes impossible, before data is read and torch is imported.

    is_local: this machine computes; False leaves to others what only they know.
    """
    precisions = [name.strip() for name in str(options.get("precision", "")).split(",")]  # `run` takes several
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
    say_what_limits_lack(config.limits, has_gpu or config.device.startswith(("cuda", "sim")), host_memory().total)
    if config.offload_dir is not None:
        require_writable(Path(config.offload_dir), "--offload-dir")


def say_what_limits_lack(
    limits: MemoryLimits, has_gpu: bool, memory_bytes: float, machine: str = "this machine"
) -> None:
    """Say that a limit is of a GPU that is not there, or beyond the machine's memory."""
    if limits.gpu is not None and not has_gpu:
        say(f"--gpu-memory has no effect: no GPU of {machine} computes")
    if limits.cpu is not None and limits.cpu > memory_bytes:
        say(f"--cpu-memory {size(limits.cpu)} is beyond the {size(memory_bytes)} that {machine} has; lower it")


def to_arguments(options: EngineOptions) -> list[str]:
    """Return the flags that stand for these options."""
    words = []
    for option, flag in FLAGS.values():
        value = options.get(option)
        if isinstance(value, MemoryLimits):
            value = None if (limit := getattr(value, flag.key or "")) is None else size_argument(limit)
        if option == "seed" and options.get("weights") != "dummy":
            continue
        if flag.metavar is None:
            words += [flag.name] if value is (not OPTIONS[option].default) else []
        elif value is not None:
            words += [flag.name, _text_of(value)]
    return words


def _text_of(value: Any) -> str:
    """Write the value of an option as its flag reads it."""
    if isinstance(value, tuple):
        return ",".join(f"{rate:g}" for rate in value)
    return json.dumps(value) if isinstance(value, bool | Mapping) else str(value)


def load_engine(model: str, options: EngineOptions) -> Engine:
    """Load `model`. What can be refused without torch is refused before torch is imported."""
    check_engine_flags(options)
    from flexgen_helm.checkpoint.folder import read_config
    from flexgen_helm.checkpoint.names import resolve

    resolved = resolve(model)
    config = EngineConfig(**{**resolved.options, **options})
    if resolved.path is not None and resolved.path.is_dir():
        read_config(resolved.path)
    from flexgen_helm.engine.engine import Engine

    return Engine.from_config(model, config)
