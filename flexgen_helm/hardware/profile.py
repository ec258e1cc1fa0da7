"""HardwareProfile: what one machine holds and how fast it is, in bytes, bytes a second and operations a second.

A profile is measured (`hardware.measure`), or shipped for a known machine (`specs/*.json`, each figure with its
source). No torch: a plan for a machine that is not at hand is made from its profile alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from flexgen_helm.errors import UsageError

SPECS = "flexgen_helm.hardware.specs"


@dataclass(frozen=True)
class Curve:
    """A rate that depends on a size: straight lines between measured points in logarithms, flat beyond the ends."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not self.points or sizes != sorted(set(sizes)) or not all(_positive(x) for p in self.points for x in p):
            raise ValueError(f"points must be positive, finite and in order of size, not {list(self.points)}")

    def at(self, size: float) -> float:
        """The rate at `size`."""
        (last_size, last_rate), *others = self.points
        if size <= last_size:
            return last_rate
        for next_size, next_rate in others:
            if size <= next_size:
                part = math.log(size / last_size) / math.log(next_size / last_size)
                return float(last_rate * (next_rate / last_rate) ** part)
            last_size, last_rate = next_size, next_rate
        return last_rate

    @property
    def best(self) -> float:
        return max(rate for _, rate in self.points)


@dataclass(frozen=True)
class Processor:
    """What computes: a GPU, or the CPU.

    memory_bytes: of its tier. memory_bytes_s: of reading long arrays. matmul_flops: by type, of products whose weight
    comes from memory, by rows of the other operand (a multiply-add counts two). attention_flops: of a prompt's
    attention, 4 s^2 h operations for s tokens (the full square). attention_bytes_s: keys and values that decoding
    attends to. upcast_elements_s: 16 bits to the compute type (infinite where they are the same).
    dequantize_elements_s, quantize_elements_s: 4 bits to the compute type, and back. step_s: what one batch spends in
    one layer besides (launches, norms, interpreter).
    """

    memory_bytes: int
    memory_bytes_s: float
    matmul_flops: Mapping[str, Curve]
    attention_flops: float
    attention_bytes_s: float
    upcast_elements_s: float = math.inf
    dequantize_elements_s: float = math.inf
    quantize_elements_s: float = math.inf
    step_s: float = 0.0

    def compute_dtype(self, rest: str) -> str:
        """The type that products run in, chosen as the engine chooses: the faster of 16 bits and float32 on a GPU."""
        known = [dtype for dtype in (rest, "float32") if dtype in self.matmul_flops] or list(self.matmul_flops)
        return max(known, key=lambda dtype: self.matmul_flops[dtype].best)


@dataclass(frozen=True)
class Link:
    """Between host and GPU memory, in bytes a second: from and to page-locked host memory, and to and from memory that
    is not (`pageable_…`), which a driver copies through a buffer of its own. duplex: share of its rate that each
    direction keeps while both are busy. transfer_s: fixed time of one transfer."""

    to_gpu_bytes_s: float
    to_cpu_bytes_s: float
    pageable_to_gpu_bytes_s: float
    pageable_to_cpu_bytes_s: float
    duplex: float = 1.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Disk:
    """bytes: free for the disk tier. read_bytes_s, write_bytes_s: long transfers of several streams past the page
    cache. duplex: as a link's. access_s: fixed time of one tensor's transfer. streams: what several streams reach,
    as a multiple of one's rate. page_cache: factor on both rates for files that are read through the operating
    system's page cache while it has memory to itself (read-ahead, write-behind, hits); direct I/O goes past it."""

    bytes: int
    read_bytes_s: float
    write_bytes_s: float
    duplex: float = 1.0
    access_s: float = 0.0
    streams: float = 1.0
    page_cache: float = 1.0


@dataclass(frozen=True)
class HardwareProfile:
    """A machine. gpu and link are None together, where the host computes.

    overlap: share of the hidden work that does hide behind the longest (1: perfect overlap). prefill_share,
    decode_share: of the processor's rates, what whole passes reach over prompts and over single tokens; 1 where no run
    has shown it. sources: figure -> where it comes from."""

    name: str
    cpu: Processor
    disk: Disk
    gpu: Processor | None = None
    link: Link | None = None
    overlap: float = 1.0
    prefill_share: float = 1.0
    decode_share: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.gpu is None) != (self.link is None):
            raise ValueError("a profile has both a gpu and a link, or neither")

    @property
    def compute_processor(self) -> Processor:
        """Where products are computed."""
        return self.gpu or self.cpu

    def to_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "profile") -> HardwareProfile:
        """Raises `UsageError` that names the figure which is missing, unknown or no positive number."""
        return _read(cls, data, where)


def load_profile(name_or_path: str) -> HardwareProfile:
    """A shipped spec by name, or a profile from a JSON file. Raises `UsageError` with the known names."""
    path = Path(name_or_path)
    if name_or_path in shipped_profiles():
        text, where = (files(SPECS) / f"{name_or_path}.json").read_text(encoding="utf-8"), name_or_path
    elif path.suffix == ".json" or path.is_file():
        try:
            text, where = path.read_text(encoding="utf-8"), str(path)
        except OSError as error:
            raise UsageError(f"the hardware profile {path} cannot be read: {error.strerror}") from error
    else:
        raise UsageError(
            f"hardware {name_or_path!r} is not known; take {', '.join(shipped_profiles())}, measured, or a file that "
            "`flexgen-helm profile -o FILE.json` wrote"
        )
    try:
        return HardwareProfile.from_json(json.loads(text), where)
    except json.JSONDecodeError as error:
        raise UsageError(f"the hardware profile {where} is no JSON: {error}") from error


def shipped_profiles() -> list[str]:
    """Names of the machines whose specs ship."""
    return sorted(entry.name.removesuffix(".json") for entry in files(SPECS).iterdir() if entry.name.endswith(".json"))


_Record = TypeVar("_Record")


def _read(kind: type[_Record], data: Any, where: str) -> _Record:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: an object is expected, not {type(data).__name__}")
    hints = get_type_hints(kind)
    fields_ = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields_))
    required = {
        name
        for name, item in fields_.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(data))
    if unknown or missing:
        what = f"{', '.join(missing)} missing" if missing else f"{', '.join(unknown)} not known"
        raise UsageError(f"{where}: {what}")
    values = {name: _value(hints[name], data[name], f"{where}.{name}") for name in data}
    try:
        return kind(**values)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint in (int, float):
        if value is None and hint is float:
            return math.inf  # JSON has no infinity
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{where}: a number of at least 0 is expected, not {value!r}")
        if value == 0 and not where.endswith(("step_s", "transfer_s", "access_s", "overlap", "disk.bytes")):
            raise UsageError(f"{where}: must be more than 0")
        return hint(value)
    if hint is str:
        return str(value)
    if hint == Mapping[str, str]:
        return {str(name): str(text) for name, text in value.items()}
    if hint == Mapping[str, Curve]:
        try:
            return {name: Curve(tuple((float(s), float(r)) for s, r in points)) for name, points in value.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"{where}: [[rows, rate], …] by type are expected ({error})") from error
    optional = {Processor | None: Processor, Link | None: Link}
    if hint in optional and value is None:
        return None
    return _read(optional.get(hint, hint), value, where)


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)
