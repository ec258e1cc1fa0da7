"""`EngineConfig`: every option of the engine, written once. No torch.

A field states the option's name, type, default, help text, flags and check. Three surfaces are made
from it:

- keywords of `Engine.from_pretrained` (`with_options_of`)
- flags of `flexgen-helm` (`cli.engine_flags`)
- arguments of a HELM deployment (`plugin.model_names`), and of the file that `FLEXGEN_HELM_MODELS`
  names
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast, get_args

from flexgen_helm.errors import UsageError
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.schedules import SCHEDULES, Schedule
from flexgen_helm.quant.precisions import FP16, PRECISIONS, Precision, precision_named
from flexgen_helm.suggestions import listed
from flexgen_helm.tiers import MemoryLimits
from flexgen_helm.tokenizer.chat import ChatOptions, TemplateChoice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Keyword arguments of `EngineConfig`, only those that were given.
EngineOptions = Mapping[str, Any]
WeightSource = Literal["pretrained", "dummy"]
# Options that change requests, and neither weights nor how they are computed.
PROMPT_OPTIONS = ("apply_chat_template", "chat_template_kwargs", "system_prompt", "thinking_budget")

_UNITS = {"b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
# Commands that send chats.
_CHAT_COMMANDS = ("run", "batch", "serve")
_DEVICE = re.compile(r"auto|sim|(cpu|cuda)(:\d+)?")


@dataclass(frozen=True)
class Flag:
    """A flag of the command line.

    metavar: placeholder of the value; None for a switch, which turns its option's default around
    choices: values that completion offers
    help: None for the option's
    key: the part of the option that the flag sets; None for all of it
    implies: (option, value) pairs that the flag sets as well
    commands: those that have the flag; empty for all that run an engine
    """

    name: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    help: str | None = None
    key: str | None = None
    implies: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()


def parse_size(value: str | int) -> int:
    """Return the bytes of '8GiB', '8 GB' or '1.5GiB'; an int is bytes. Raises ValueError if `value`
    is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None and not match[2] and float(match[1]):
        units = ("GiB", "MiB") if float(match[1]) < 1 << 20 else ("B",)
        raise ValueError(f"has no unit; write {' or '.join(match[1] + unit for unit in units)}")
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        raise ValueError("is no size; write for example 8GiB (2**30 bytes each) or 8GB (10**9)")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _parse_limits(value: MemoryLimits | Mapping[str, str | int | None]) -> MemoryLimits:
    tiers = [tier.name for tier in fields(MemoryLimits)]
    sizes = vars(value) if isinstance(value, MemoryLimits) else value
    if not isinstance(sizes, Mapping) or not set(sizes) <= set(tiers):
        raise ValueError(f"must be sizes of {', '.join(tiers)}")
    parsed = {}
    for tier, size in sizes.items():
        try:
            parsed[tier] = None if size is None else parse_size(size)
        except ValueError as error:
            raise UsageError(f"the limit of the {tier} tier, {size!r}, {error}") from error
    return MemoryLimits(**parsed)


def _parser(
    convert: Callable[[Any], Any], needs: str, accepts: Callable[[Any], object] = lambda value: True
) -> Any:
    """Return a function that converts a value.

    needs: message of the ValueError that it raises where it cannot convert, or `accepts` refuses
        the result: the predicate of a sentence.
    """

    def parse(value: Any) -> Any:
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            if accepts(converted := convert(value)):
                return converted
        raise ValueError(needs)

    return parse


def _as_given(value: Any) -> Any:
    return value


def _choice_parser(*choices: str) -> Any:
    return _parser(_as_given, f"is not known; take {listed(choices)}", choices.__contains__)


def _comma_parts(value: str | Iterable[Any]) -> Iterable[Any]:
    return value.split(",") if isinstance(value, str) else value


def _rates_parser(directions: str) -> Any:
    """Return a parser of two rates in GB/s; directions: what the two are of, with an example."""
    return _parser(
        lambda value: tuple(map(float, _comma_parts(value))),
        f"must be two rates in GB/s, {directions}",
        lambda rates: len(rates) == 2 and all(0 < rate < float("inf") for rate in rates),
    )


_parse_layers = _parser(
    lambda value: tuple(int(str(part)) for part in _comma_parts(value)),
    "must be numbers of layers, for example 10,14",
    lambda layers: layers and min(layers) >= 0,
)
_parse_integer = _parser(lambda value: int(str(value)), "must be an integer")
_parse_flag = _parser(_as_given, "must be true or false", lambda value: isinstance(value, bool))
_parse_text = _parser(_as_given, "must be a text that is not empty", str.strip)
_parse_path = _parser(os.fspath, "must be the path of a folder", lambda path: path)
_parse_budget = _parser(
    lambda value: int(str(value)), "must be an integer, 0 or more", lambda tokens: tokens >= 0
)
_parse_seconds = _parser(
    lambda value: float(str(value)),
    "must be a number of seconds, more than 0",
    lambda seconds: 0 < seconds < float("inf"),
)
_parse_device = _parser(
    _as_given, "is not known; take auto, cpu, cuda[:i] or sim", _DEVICE.fullmatch
)
_parse_template_choice = _parser(
    lambda value: {"auto": "auto", "true": True, "false": False}[str(value).lower()],
    "is not known; take auto, true or false",
)
# What is given besides variables of a template.
_OF_THE_CALLER = {"messages", "add_generation_prompt", "tokenize"}
_parse_template_kwargs = _parser(  # what a template can be given
    lambda value: json.loads(
        json.dumps(json.loads(value) if isinstance(value, str) else value, allow_nan=False)
    ),
    "must be a JSON object without messages, add_generation_prompt and tokenize, for example "
    '{"enable_thinking": false}',
    lambda variables: isinstance(variables, dict) and not _OF_THE_CALLER & variables.keys(),
)


def option(
    default: Any, help: str, *flags: Flag, parse: Callable[[Any], Any], is_hashed: bool = True
) -> Any:
    """Declare a field of `EngineConfig`.

    parse: turns text, a value of YAML or a Python value into the field's value. It raises
        ValueError with the predicate of a sentence whose subject is the option and its value.
    is_hashed: False for a value without a hash.
    """
    return field(
        default=default, hash=is_hashed, metadata={"help": help, "flags": flags, "parse": parse}
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to load a model and how to run it.

    Each value is parsed and checked when the record is made, so a record is always valid; None
    means the default.
    Raises `UsageError`.
    """

    revision: str | None = option(
        None, "Branch, tag, or commit of the hub's repository.", parse=_parse_text
    )
    precision: Precision | str | None = option(
        None,
        f"Format of weights and KV cache: {listed(PRECISIONS)} (-s: sparse attention; paper: "
        "FlexGen's own format). Default: what the model's name ends with, else fp16.",
        Flag("--precision", "NAME", tuple(PRECISIONS)),
        parse=lambda value: value if isinstance(value, Precision) else precision_named(value).name,
    )
    policy: Policy | str = option(
        "auto",
        "What is placed where: auto (default) searches, or GBSxNB,wg,wc,cg,cc,hg,hc. GBSxNB: "
        "sequences of a batch x batches of a block. wg,wc: percent of the weights on GPU and CPU; "
        "cg,cc: of the KV cache; hg,hc: of the hidden states; the rest is on the disk. Example: "
        "48x3,20,80,0,100,0,100. `flexgen-helm plan` prints one.",
        Flag("--policy", "POLICY", ("auto",)),
        parse=lambda value: (
            value if isinstance(value, Policy) or value == "auto" else Policy.parse(str(value))
        ),
    )
    schedule: str = option(
        "auto",
        f"Order of the work: auto (default), {listed(SCHEDULES)}. auto takes zigzag or "
        "prefill-only for weights that are streamed, else row.",
        Flag("--schedule", "NAME", ("auto", *SCHEDULES)),
        parse=_choice_parser("auto", *SCHEDULES),
    )
    limits: MemoryLimits = option(
        MemoryLimits(),
        "Bytes that each memory tier may hold; default: what the machine has, less a margin.",
        Flag(
            "--gpu-memory",
            "SIZE",
            help="Maximum GPU memory to use, for example 8GiB. Default of the three: what is free, "
            "less a margin.",
            key="gpu",
        ),
        Flag(
            "--cpu-memory", "SIZE", help="Maximum host memory to use, for example 16GiB.", key="cpu"
        ),
        Flag(
            "--disk",
            "SIZE",
            help="Maximum space to use in --offload-dir, for example 100GiB.",
            key="disk",
        ),
        parse=_parse_limits,
    )
    offload_dir: str | os.PathLike[str] | None = option(
        None,
        (
            "Folder for what does not fit into memory, best on a fast local disk. Default: offload "
            "in FLEXGEN_HELM_HOME."
        ),
        Flag("--offload-dir", "DIR"),
        parse=_parse_path,
    )
    device: str = option(
        "auto",
        (
            "Device that computes: auto (default), cpu, cuda, cuda:1, or sim, a GPU simulated in "
            "host memory."
        ),
        Flag("--device", "NAME", ("auto", "cpu", "cuda", "sim")),
        parse=_parse_device,
    )
    link_gb_s: tuple[float, float] | None = option(
        None,
        "GB/s to and from the simulated GPU, for example 12,12. Only with --device sim.",
        Flag("--link", "IN,OUT"),
        parse=_rates_parser("in and out, for example 12,12"),
    )
    disk_gb_s: tuple[float, float] | None = option(
        None,
        "GB/s that a simulated disk reads and writes, for example 2,1. Only with --device sim.",
        Flag("--disk-rates", "READ,WRITE"),
        parse=_rates_parser("of reads and writes, for example 2,1"),
    )
    pipeline_layers: tuple[int, ...] | None = option(
        None,
        "Layers of each rank of a pipeline, for example 10,14; by default equal shares, as for "
        "equal devices. Only under torchrun.",
        Flag("--pipeline-layers", "N,N,…"),
        parse=_parse_layers,
    )
    overlap: bool = option(
        True,
        "Overlap transfers with computation.",
        Flag(
            "--no-overlap",
            help="Do not overlap transfers with computation, to see what overlapping brings.",
        ),
        parse=_parse_flag,
    )
    cpu_attention: bool = option(
        True,
        "Attend on the CPU to a KV cache in host memory, so it need not be copied to the GPU.",
        Flag(
            "--no-cpu-attention",
            help="Copy a KV cache in host memory to the GPU instead of attending on the CPU.",
        ),
        parse=_parse_flag,
    )
    weights: WeightSource = option(
        "pretrained",
        "Where weights come from; dummy draws random ones.",
        parse=_choice_parser(*get_args(WeightSource)),
    )
    seed: int = option(
        0,
        "Seed of dummy weights.",
        Flag(
            "--dummy-weights",
            "[SEED]",
            help="Random weights instead of the model's, for measurements; the seed is 0 unless "
            "given.",
            implies=(("weights", "dummy"),),
        ),
        parse=_parse_integer,
    )
    unverified: bool = option(
        False,
        (
            "Compute a model whose kind has not been proved to equal transformers here; records "
            "say so."
        ),
        Flag(
            "--unverified",
            help="Compute also a model that differs from transformers here; records and pages say "
            "so.",
        ),
        parse=_parse_flag,
    )
    batch_invariant: bool = option(
        False,
        "Answers have the same bits whatever else is in the run, or the model is refused. Decoding "
        "takes longer on AMX, and with weights in 4 or 8 bits.",
        Flag("--batch-invariant"),
        parse=_parse_flag,
    )
    generation_config: str = option(
        "auto",
        "Settings of the model's generation_config.json that change answers, such as "
        "repetition_penalty: auto (default) applies them as transformers does, ignore leaves them "
        "out; records say so.",
        Flag("--generation-config", "CHOICE", ("auto", "ignore")),
        parse=_choice_parser("auto", "ignore"),
    )
    max_latency: float | None = option(
        None,
        "Maximum seconds that a block of sequences may take; bounds the search for a policy.",
        Flag("--max-latency", "SECONDS"),
        parse=_parse_seconds,
    )
    apply_chat_template: TemplateChoice | None = option(
        None,
        "Send plain prompts as a user's turn of the chat template: auto, true or false. auto: if "
        "the tokenizer has a template and the model is no base model. Default: auto under HELM, "
        "else false. Scored prompts never get one.",
        Flag("--chat-template", "CHOICE", ("auto", "true", "false"), commands=("run",)),
        parse=_parse_template_choice,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'Variables of the chat template, as a JSON object, for example {"enable_thinking": false}.',
        Flag("--chat-template-kwargs", "JSON", commands=_CHAT_COMMANDS),
        parse=_parse_template_kwargs,
        is_hashed=False,
    )
    system_prompt: str | None = option(
        None,
        "System message in front of every chat that has none.",
        Flag("--system-prompt", "TEXT", commands=_CHAT_COMMANDS),
        parse=_parse_text,
    )
    thinking_budget: int | None = option(
        None,
        (
            "Maximum tokens that a thinking model thinks before it answers; they count in "
            "max_tokens. Default: no limit."
        ),
        Flag("--thinking-budget", "TOKENS", commands=_CHAT_COMMANDS),
        parse=_parse_budget,
    )

    def __post_init__(self) -> None:
        for name, spec in OPTIONS.items():
            value = getattr(self, name)
            object.__setattr__(
                self, name, spec.default if value is None else parse_option(name, value)
            )
        if self.max_latency is not None and self.fixed_policy is not None:
            raise UsageError("max_latency is for the search; leave it or the policy out")
        if self.device == "sim" and self.limits.gpu is None:
            raise UsageError(
                "the simulated gpu has no size of its own; give one, such as --gpu-memory 1GiB"
            )
        if self.device != "sim" and self.link_gb_s is not None:
            raise UsageError(
                "only the simulated gpu takes a link's bandwidth; add --device sim or leave --link "
                "out"
            )
        if self.device != "sim" and self.disk_gb_s is not None:
            raise UsageError(
                "only beside a simulated gpu is a disk simulated; add --device sim or leave "
                "--disk-rates out"
            )

    @property
    def chat(self) -> ChatOptions:
        """What was said about chat templates."""
        return ChatOptions(
            self.apply_chat_template,
            self.chat_template_kwargs or {},
            self.system_prompt,
            self.thinking_budget,
        )

    @property
    def chosen_precision(self) -> Precision:
        """The precision as a record; FP16 without a choice."""
        chosen = self.precision or FP16
        return precision_named(chosen) if isinstance(chosen, str) else chosen

    @property
    def fixed_policy(self) -> Policy | None:
        """The policy, None if the search is to find it."""
        return self.policy if isinstance(self.policy, Policy) else None

    @property
    def fixed_schedule(self) -> Schedule | None:
        """The schedule, None if the engine is to choose it."""
        return None if self.schedule == "auto" else SCHEDULES[self.schedule]


OPTIONS: Mapping[str, Field[Any]] = {spec.name: spec for spec in fields(EngineConfig)}


def parse_option(name: str, value: object) -> Any:
    """Return the value of one option from text, a value of YAML or a Python value. Raises
    `UsageError`.
    """
    try:
        return OPTIONS[name].metadata["parse"](value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} {value!r} {error}") from error


# Name of a flag as a Python identifier -> (option, flag): `cpu_memory` of `--cpu-memory`.
FLAGS: Mapping[str, tuple[str, Flag]] = {
    flag.name.removeprefix("--").replace("-", "_"): (option, flag)
    for option, spec in OPTIONS.items()
    for flag in spec.metadata["flags"]
}


def options_of_flags(values: Mapping[str, Any]) -> EngineOptions:
    """Return the options of flags by name, a key of `FLAGS`; None and False are flags that were not
    given.

    Raises `UsageError` for a value that cannot be parsed. The precision is not parsed: `run` takes
    several.
    """
    options: dict[str, Any] = {}
    for name, value in values.items():
        option, flag = FLAGS[name]
        if flag.metavar is None:
            options |= {option: not OPTIONS[option].default} if value else {}
        elif value is not None:
            options |= {
                option: value if flag.key is None else {**options.get(option, {}), flag.key: value}
            }
            options |= flag.implies
    return {
        name: value if name == "precision" else parse_option(name, value)
        for name, value in options.items()
    }


def document_options(docstring: str) -> str:
    """Add a line for each option to a docstring that ends with lines of arguments."""
    lines = [f"{name}: {spec.metadata['help']}" for name, spec in OPTIONS.items()]
    return "\n".join([inspect.cleandoc(docstring), *lines])


def with_options_of(
    config: Callable[P, EngineConfig],
) -> Callable[[Callable[..., R]], Callable[Concatenate[type[T], str | os.PathLike[str], P], R]]:
    """Give a class method `(cls, name_or_path, **options)` the fields of `config` as keywords.

    Type checkers, `help()` and `inspect.signature` show them with types and defaults.
    """
    keywords = list(inspect.signature(config).parameters.values())

    def decorate(
        method: Callable[..., R],
    ) -> Callable[Concatenate[type[T], str | os.PathLike[str], P], R]:
        signature = inspect.signature(method)
        named = [
            known
            for known in signature.parameters.values()
            if known.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        method.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
        method.__doc__ = document_options(method.__doc__ or "")
        return cast(Callable[Concatenate[type[T], str | os.PathLike[str], P], R], method)

    return decorate
