"""The engine flags: made from `EngineConfig` and added to every command that runs an engine."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from flexgen_helm.cli.completion import completing
from flexgen_helm.cli.console import say
from flexgen_helm.cli.typer_commands import flag_parameter, with_parameters
from flexgen_helm.config import (
    FLAGS,
    OPTIONS,
    EngineConfig,
    EngineOptions,
    options_of_flags,
    parse_option,
)
from flexgen_helm.errors import UsageError
from flexgen_helm.files import require_writable
from flexgen_helm.hardware.cuda_presence import require_cuda, why_no_cuda
from flexgen_helm.hardware.host_memory import host_memory, lacking_address_space
from flexgen_helm.tiers import MemoryLimits
from flexgen_helm.units import size, size_argument

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
            # flags that some commands alone have are about prompts
            rich_help_panel="Prompts" if flag.commands else "Engine",
            autocompletion=completing(functools.partial(list, flag.choices))
            if flag.choices
            else None,
        )
        parameters.append(flag_parameter(name, settings, is_switch=flag.metavar is None))

    def wrapper(**values: Any) -> None:
        command(engine=options_of_flags({name: values.pop(name) for name in flags}), **values)

    return with_parameters(command, wrapper, parameters)


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
    """Refuse what this machine or a second flag makes impossible, before data is read and torch is
    imported.

    is_local: this machine computes; False where workers do, and know their memory and devices.
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
    # How many bytes it has, only torch knows: here only whether there is a GPU.
    gpu_bytes = math.inf if has_gpu or config.device.startswith(("cuda", "sim")) else 0
    warn_of_limits_beyond(config.limits, gpu_bytes, host_memory().total)
    if config.offload_dir is not None:
        require_writable(Path(config.offload_dir), "--offload-dir")


def warn_of_limits_beyond(
    limits: MemoryLimits, gpu_bytes: float, memory_bytes: float, machine: str = "this machine"
) -> None:
    """Say that a limit is of a GPU that is not there (`gpu_bytes` is 0), or beyond the machine's
    memory.
    """
    for flag, limit, capacity in (
        ("--gpu-memory", limits.gpu, gpu_bytes),
        ("--cpu-memory", limits.cpu, memory_bytes),
    ):
        if limit is not None and not capacity:
            say(f"{flag} has no effect: no GPU of {machine} computes")
        elif limit is not None and limit > capacity:
            say(f"{flag} {size(limit)} is beyond the {size(capacity)} that {machine} has; lower it")


def to_arguments(options: EngineOptions) -> list[str]:
    """Return the words of the command line that set these options: the inverse of
    `options_of_flags`.
    """
    words = []
    for option, flag in FLAGS.values():
        value = options.get(option)
        if isinstance(value, MemoryLimits):
            value = (
                None if (limit := getattr(value, flag.key or "")) is None else size_argument(limit)
            )
        if option == "seed" and options.get("weights") != "dummy":  # --dummy-weights SEED
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
