"""The engine flags: defined once, added to every command that runs an engine, mapped to its arguments in one place."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from flexgen_helm.errors import UsageError
from flexgen_helm.request import MemoryLimits

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def _flag(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, rich_help_panel="Engine")


def _switch(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel="Engine")


@dataclass(frozen=True)
class EngineOptions:
    """The engine flags as typed; every field's default means that the flag was not given."""

    precision: Annotated[
        str | None,
        _flag("--precision", "fp16|fp16-s|4bit|4bit-s|paper-4bit", "Weights; default: the model name's suffix."),
    ] = None
    policy: Annotated[
        str | None, _flag("--policy", "auto|GBSxNB,wg,wc,cg,cc,hg,hc", "Block size and placement, in percentages.")
    ] = None
    schedule: Annotated[
        str | None, _flag("--schedule", "auto|row|zigzag|diagonal|prefill-only", "Order of the work.")
    ] = None
    gpu_memory: Annotated[str | None, _flag("--gpu-memory", "SIZE", "Limit of the GPU tier, for example 8GiB.")] = None
    cpu_memory: Annotated[str | None, _flag("--cpu-memory", "SIZE", "Limit of the CPU tier.")] = None
    disk: Annotated[str | None, _flag("--disk", "SIZE", "Limit of the disk tier.")] = None
    offload_dir: Annotated[str | None, _flag("--offload-dir", "DIR", "Folder of the disk tier.")] = None
    device: Annotated[str | None, _flag("--device", "auto|cpu|cuda[:i]|sim", "Where products are computed.")] = None
    link: Annotated[str | None, _flag("--link", "IN,OUT", "GB/s to and from the simulated GPU.")] = None
    no_overlap: Annotated[bool, _switch("--no-overlap", "Do not overlap transfers with computation.")] = False
    no_cpu_attention: Annotated[bool, _switch("--no-cpu-attention", "Never attend on the CPU.")] = False
    dummy_weights: Annotated[
        int | None, _flag("--dummy-weights", "[SEED]", "Random weights; the seed is 0 unless given.")
    ] = None
    max_latency: Annotated[float | None, _flag("--max-latency", "SEC", "Longest time a block may take.")] = None

    def limits(self) -> MemoryLimits:
        return MemoryLimits(
            gpu=_size("--gpu-memory", self.gpu_memory),
            cpu=_size("--cpu-memory", self.cpu_memory),
            disk=_size("--disk", self.disk),
        )

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.from_pretrained`, and of a deployment: only flags that were given.

        Raises `UsageError` for a flag that cannot be read; what the engine cannot do it refuses itself.
        """
        limits = self.limits()
        given = {
            "precision": self.precision,
            "limits": None if limits == MemoryLimits() else limits,
            "policy": self.policy,
            "schedule": self.schedule,
            "offload_dir": self.offload_dir,
            "device": self.device,
            "overlap": False if self.no_overlap else None,
            "cpu_attention": False if self.no_cpu_attention else None,
            "weights": None if self.dummy_weights is None else "dummy",
            "seed": self.dummy_weights,
            "link_gb_s": _link(self.link),
            "max_latency": self.max_latency,
        }
        return {name: value for name, value in given.items() if value is not None}

    def load(self, model: str) -> Engine:
        """The engine of `model` under these flags."""
        arguments = self.engine_arguments()
        # A name that means nothing, or an architecture that is not supported, is refused before torch is imported.
        from flexgen_helm.checkpoint.folder import read_config
        from flexgen_helm.checkpoint.names import resolve

        resolved = resolve(model)
        if resolved.path is not None and resolved.path.is_dir():
            read_config(resolved.path)
        from flexgen_helm.engine.engine import Engine

        return Engine.from_pretrained(model, **arguments)


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `engine: EngineOptions` one option for each of its fields instead."""
    hints = get_type_hints(EngineOptions, include_extras=True)
    flags = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(EngineOptions)
    ]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "engine"
    ]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        engine = EngineOptions(**{flag.name: given.pop(flag.name) for flag in flags})
        command(engine=engine, **given)

    wrapper.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
    return wrapper


def complete_dummy_weights(argv: Sequence[str]) -> list[str]:
    """Write the default seed where `--dummy-weights` stands alone: its value is optional, which typer cannot say."""
    flag = "--dummy-weights"
    following = [*argv[1:], ""]
    return [f"{flag}=0" if word == flag and not after.isdecimal() else word for word, after in zip(argv, following)]


def parse_size(text: str) -> int:
    """Bytes of '8GiB', '8 GB', '1.5GiB' or '1000'. Raises ValueError where `text` is no size."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is no size; write for example 8GiB (2**30 bytes each), 8GB or a number of bytes")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def _size(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from error


def _link(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if len(rates) != 2 or not all(0 < rate < float("inf") for rate in rates):
        raise UsageError(f"--link {text!r} must be two rates in GB/s, in and out, for example 12,12")
    return rates[0], rates[1]
