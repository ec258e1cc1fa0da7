"""HardwareProfile: the capacities and rates of one machine, in bytes, bytes/s, FLOP/s and seconds.
No torch.

A profile is measured (`engine.machine_profile`) or shipped for a known machine (`specs/*.json`,
with the source of each figure). Planning for a machine that is not at hand needs nothing else.
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

import numpy as np

from flexgen_helm.errors import UsageError

SPECS = "flexgen_helm.hardware.specs"
# Dtype of weights -> name of its products in float32, where they are faster than those with weights
# in float16.
PRODUCT_BY_WEIGHT = {"bfloat16": "float32 x bfloat16"}
# Name of this machine's measured profile.
MEASURED = "measured"
# Source of all rates of a machine that was measured.
PROFILED = "measured by flexgen-helm profile"


@dataclass(frozen=True)
class Curve:
    """A rate that depends on a size: linear between the points in logarithms, constant beyond the
    first and last.

    points: (size, rate) in ascending order of size.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        positive = all(x > 0 and math.isfinite(x) for point in self.points for x in point)
        if not self.points or sizes != sorted(set(sizes)) or not positive:
            raise ValueError(
                f"points must be positive, finite and in order of size, not {list(self.points)}"
            )

    def at(self, size: float) -> float:
        """The rate at `size`."""
        sizes, rates = np.log(self.points).T
        return float(np.exp(np.interp(math.log(size), sizes, rates)))

    @property
    def best(self) -> float:
        return max(rate for _, rate in self.points)


@dataclass(frozen=True)
class Processor:
    """A GPU or the CPU.

    memory_bytes: capacity of its tier.
    memory_bytes_s: rate of reading long arrays.
    matmul_flops: dtype -> rate by rows of x, of products whose weight comes from memory (a
        multiply-add counts two).
        Products with weights in another dtype have keys of their own (`PRODUCT_BY_WEIGHT`).
    attention_flops: rate of a prompt's attention, counted as 4 s^2 h FLOPs for s tokens (the full
        square).
    attention_bytes_s: rate of keys and values that decoding attends to.
    upcast_elements_s: 16 bits to the compute dtype; infinite where products read the 16 bits
        themselves.
    dequantize_elements_s: 4 bits to the compute dtype.
    quantize_elements_s: the compute dtype to 4 bits.
    step_s: fixed time of one batch in one layer (launches, interpreter).
    layer_bytes_s: rate of what a layer reads and writes between its products: norms, rotations,
        gates, sums, new keys and values. Infinite where the other rates were found with whole
        layers.
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
    layer_bytes_s: float = math.inf

    @property
    def multiplies_as_stored(self) -> bool:
        """Whether products in float32 read weights in 16 bits as they rest."""
        return math.isinf(self.upcast_elements_s)

    def compute_dtype(self, storage_dtype: str, float16_suffices: bool = True) -> str:
        """The dtype of products, chosen as the engine does: the faster of the weights' 16 bits and
        float32.

        float16_suffices: it may take the place of a bfloat16 that the processor lacks, or has only
            by emulation.
        """
        if storage_dtype == "bfloat16" and float16_suffices and "float16" in self.matmul_flops:
            bfloat16, float32 = (self.matmul_flops.get(dtype) for dtype in ("bfloat16", "float32"))
            if bfloat16 is None or (float32 is not None and bfloat16.best < float32.best):
                storage_dtype = "float16"
        suitable = [dtype for dtype in (storage_dtype, "float32") if dtype in self.matmul_flops]
        return max(suitable or self.matmul_flops, key=lambda dtype: self.matmul_flops[dtype].best)


@dataclass(frozen=True)
class Link:
    """Transfers between host and GPU memory.

    to_gpu_bytes_s, to_cpu_bytes_s: from and to page-locked host memory.
    pageable_to_gpu_bytes_s, pageable_to_cpu_bytes_s: from and to other host memory, which the
        driver copies through a buffer of its own.
    duplex: share of its rate that each direction keeps while both are busy.
    transfer_s: fixed time of one transfer.
    """

    to_gpu_bytes_s: float
    to_cpu_bytes_s: float
    pageable_to_gpu_bytes_s: float
    pageable_to_cpu_bytes_s: float
    duplex: float = 1.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Disk:
    """The disk tier.

    bytes: free capacity.
    read_bytes_s, write_bytes_s: long transfers of several streams, past the page cache.
    duplex: as of `Link`.
    access_s: fixed time of one tensor's transfer.
    streams: rate of several streams as a multiple of one stream's.
    page_cache: factor on both rates for files that are read through the operating system's page
        cache while it has memory to itself (read-ahead, write-behind, hits); direct I/O bypasses
        it.
    """

    bytes: int
    read_bytes_s: float
    write_bytes_s: float
    duplex: float = 1.0
    access_s: float = 0.0
    streams: float = 1.0
    page_cache: float = 1.0


@dataclass(frozen=True)
class HardwareProfile:
    """One machine.

    gpu, link: both None where the CPU computes.
    overlap: share of the shorter resources' time that hides behind the longest; 1 is perfect
        overlap.
    prefill_share, decode_share: share of the processor's rates that whole passes reach over prompts
        and over single tokens, learnt from runs; 1 before the first run.
    sources: figure -> where it comes from.
    """

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
        return self.gpu or self.cpu

    def to_json(self) -> dict[str, Any]:
        return _to_json(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "profile") -> HardwareProfile:
        """Raises `UsageError` naming the figure that is missing, unknown or not a positive
        number.
        """
        return _read_record(cls, data, where)


def load_profile(name_or_path: str) -> HardwareProfile:
    """Load a shipped profile by name, or one from a JSON file. Raises `UsageError` with the known
    names.
    """
    path = Path(name_or_path)
    if name_or_path in shipped_profiles():
        text = (files(SPECS) / f"{name_or_path}.json").read_text(encoding="utf-8")
        where = name_or_path
    elif path.suffix == ".json" or path.is_file():
        try:
            text, where = path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"the hardware profile {path} cannot be read: {reason}") from error
    else:
        raise UsageError(
            f"hardware {name_or_path!r} is not known; take {', '.join(shipped_profiles())}, "
            "measured, or a file that `flexgen-helm profile -o FILE.json` wrote"
        )
    try:
        return HardwareProfile.from_json(json.loads(text), where)
    except json.JSONDecodeError as error:
        raise UsageError(f"the hardware profile {where} is no JSON: {error}") from error


def shipped_profiles() -> list[str]:
    """Names of the machines whose profiles ship."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in files(SPECS).iterdir()
        if entry.name.endswith(".json")
    )


_MAY_BE_ZERO = {"step_s", "transfer_s", "access_s", "overlap", "bytes"}
_AT_MOST_ONE = {"overlap", "duplex"}
_Record = TypeVar("_Record")


def _read_record(kind: type[_Record], data: Any, where: str) -> _Record:
    """Read a dataclass of this module from JSON. where: names it in errors."""
    if not isinstance(data, dict):
        raise UsageError(f"{where}: an object is expected, not {type(data).__name__}")
    fields = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {
        name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - data.keys()):
        raise UsageError(f"{where}: {', '.join(missing)} missing")
    if unknown := sorted(data.keys() - fields.keys()):
        raise UsageError(f"{where}: {', '.join(unknown)} not known")
    hints = get_type_hints(kind)
    values = {
        name: math.inf  # JSON has no infinity
        if value is None and fields[name].default == math.inf
        else _read_value(hints[name], name, value, f"{where}.{name}")
        for name, value in data.items()
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def _read_value(hint: Any, name: str, value: Any, where: str) -> Any:
    """Read one field from JSON. hint: its annotation; name: the field's."""
    if hint in (int, float):
        largest = 1 if name in _AT_MOST_ONE else 1e300
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value <= largest
        ):
            bounds = f"from 0 to {largest}" if largest == 1 else "of at least 0"
            raise UsageError(f"{where}: a number {bounds} is expected, not {value!r}")
        if hint(value) == 0 and name not in _MAY_BE_ZERO:
            raise UsageError(f"{where}: must be more than 0")
        return hint(value)
    if hint is str and isinstance(value, str):
        return value
    if hint == Mapping[str, str] and isinstance(value, dict):
        return {str(figure): str(text) for figure, text in value.items()}
    if hint == Mapping[str, Curve]:
        try:
            return {
                dtype: Curve(tuple((float(s), float(r)) for s, r in points))
                for dtype, points in value.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{where}: [[rows, rate], …] by type are expected ({error})"
            ) from error
    optional = {Processor | None: Processor, Link | None: Link}
    if hint in optional and value is None:
        return None
    return _read_record(optional.get(hint, hint), value, where)


def _to_json(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _to_json(getattr(value, item.name)) for item in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value
