"""Refuse a model configuration whose entries no model can have: of another type, not finite, out of
range. No torch.

A `config.json` or a GGUF file comes from a stranger. What passes here is not worth computing with,
perhaps, but it costs no more memory or time than the checkpoint's own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from flexgen_helm.models.architectures.fields import MAX_LAYERS
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.decoder_config import DecoderConfig

# Many times what is published, and few enough to list their tensors in no time.
MAX_EXPERTS = 4096
_MAX_NUMBER = 2**63  # what a tensor can be told


def check_config(config: ModelConfig) -> None:
    """Raise `ValueError` naming the first entry that cannot be used."""
    _check_types(config)
    for field in fields(config):
        value = getattr(config, field.name)
        # its annotation, a string with `from __future__ import annotations`
        if field.type == "int" and field.default is MISSING and value < 1:
            raise ValueError(f"{_title(field.name)} is {value!r}; it must be a positive integer")
    if config.num_layers > MAX_LAYERS:
        raise ValueError(f"num layers is {config.num_layers}; at most {MAX_LAYERS:,} can be read")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads share {config.num_kv_heads} key heads unevenly")
    if any(window is not None and window < 1 for window in config.windows):
        raise ValueError("a layer's attention window is below one token")
    for rope in (config.rope, config.local_rope) if isinstance(config, DecoderConfig) else ():
        if rope is None:
            continue
        dim = config.head_dim if rope.dim is None else rope.dim
        if not 0 < dim <= config.head_dim or dim % 2:
            raise ValueError(
                f"the rotary embedding turns {dim} of {config.head_dim} elements of a head; they "
                "must be pairs of it"
            )
        if not all(number > 0 for number in (rope.theta, rope.factor, *rope.factors)):
            raise ValueError("the rotary embedding has a base or factor that is not positive")
    experts = config.experts
    if experts is not None and not (
        1 <= experts.per_token <= experts.count <= MAX_EXPERTS and experts.ffn_size >= 1
    ):
        raise ValueError(
            f"{experts.per_token} of {experts.count} experts of size {experts.ffn_size} cannot be "
            f"used; at most {MAX_EXPERTS:,} can be read"
        )


def _check_types(record: Any) -> None:
    """Compare each field with its annotation, those of records inside too; numbers must be finite
    and fit 64 bits.
    """
    for name, hint in _hints(record.__class__).items():
        value = getattr(record, name)
        if is_dataclass(value):
            _check_types(value)
            continue
        if not _fits(value, hint):
            kind = getattr(hint, "__name__", hint)
            raise ValueError(f"{_title(name)} is {repr(value)[:80]}, where {kind} is expected")
        if not all(
            math.isfinite(number) and abs(number) < _MAX_NUMBER for number in _numbers(value)
        ):
            raise ValueError(f"{_title(name)} is {repr(value)[:80]}, which no model has")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _fits(value: object, hint: Any) -> bool:
    """Compare a value with an annotation; an integer is a float too, and a bool is no number."""
    kind, members = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in members
    if kind in (Union, UnionType):
        return any(_fits(value, member) for member in members)
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        members = members[:1] * len(value) if members[-1] is ... else members
        return len(value) == len(members) and all(map(_fits, value, members))
    return isinstance(value, (int, float) if hint is float else hint) and isinstance(
        value, bool
    ) == (hint is bool)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, tuple):
        for member in value:
            yield from _numbers(member)


def _title(name: str) -> str:
    return name.replace("_", " ")
