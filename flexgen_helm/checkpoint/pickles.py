"""Pickled PyTorch files: what is in them, read without executing anything. The only module that opens pickles.

`torch.load(weights_only=True, mmap=True)` builds tensors over the mapped file and refuses everything else; only the
archive format that can be mapped is accepted, and its checksums are compared first.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexgen_helm.checkpoint.folder import PICKLE_INDEX, indexed, pickle_names
from flexgen_helm.checkpoint.manifest import blob_of, check_blobs
from flexgen_helm.errors import CheckpointError, UnsafePickleError, UsageError

# The first whose `weights_only` refuses every file known to get round it (CVE-2025-32434, CVE-2026-24747).
OLDEST_TORCH = (2, 10)

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TILE_BYTES = 4 << 20
_RECORD = re.compile(r"[^/]*/data/\d+")


@dataclass(frozen=True)
class Planned:
    """A tensor to write. dtype: safetensors' name of it. size, offset: bytes, the latter from the data's start."""

    source: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    offset: int = 0


def require_safe_torch() -> None:
    """Raise `UsageError` where torch cannot be trusted with a pickle."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if numbers < OLDEST_TORCH:
        raise UsageError(
            f"torch {torch.__version__} can be made to run code by a pickle even with weights_only; convert needs "
            f"torch {'.'.join(map(str, OLDEST_TORCH))} or later: pip install --upgrade torch"
        )


def load_pickled(file: Path) -> dict[str, Any]:
    """The entries of a pickled file; tensors lie in the mapped file. Raises where it asks for anything else."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if type(error).__name__ == "UnpicklingError":
            asked = re.search(r"(?:GLOBAL|class|function) `?([\w.]+)", str(error))
            # The other lines are torch's advice to load the file all the same.
            said = next((line for line in lines if line.startswith(("WeightsUnpickler", "Unsupported"))), lines[0])
            what = f"asks for {asked[1]}" if asked else f"asks for what tensors do not need ({said[:200]})"
            raise UnsafePickleError(
                f"{file} {what}, which is no tensor and could run code; nothing of it was executed, and it is not "
                "converted: obtain the weights from a source that you trust"
            ) from None
        raise CheckpointError(f"{file} is damaged or no PyTorch checkpoint: {lines[0][:200]}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} contains a {type(state).__name__}, not tensors by name")
    return {str(name): value for name, value in state.items()}


def _require_zip(file: Path) -> None:
    """Only the format that can be mapped, whole: PyTorch writes zip archives of stored records since 1.6."""
    with file.open("rb") as start:
        first = start.read(64)
    if first.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a pointer of git LFS, not the file itself; run git lfs pull")
    if zipfile.is_zipfile(file):
        return
    if first.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{file} is truncated ({file.stat().st_size:,} bytes); fetch it again")
    if first.startswith(b"\x80"):
        raise CheckpointError(
            f"{file} is in the format before PyTorch 1.6, which can only be read whole; save it anew where memory "
            "suffices: torch.save(torch.load(file, weights_only=True), file)"
        )
    raise CheckpointError(f"{file} is no PyTorch checkpoint")


def _damaged_record(file: Path) -> str | None:
    """The first record of the archive whose checksum (CRC-32) does not fit its bytes."""
    name = "the archive's directory"
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = info.filename
                if info.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{file} compresses {name}, which PyTorch never does")
                with archive.open(info) as record:
                    while record.read(_TILE_BYTES):
                        pass
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error, zlib.error):
        return name
    return None


def _tensors_of_record(file: Path, record: str, state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors whose bytes a record contains; [] where that cannot be told."""
    with zipfile.ZipFile(file) as archive:
        records = [info for info in archive.infolist() if _RECORD.fullmatch(info.filename) and info.file_size]
    ordered = [info.filename for info in sorted(records, key=lambda info: info.header_offset)]
    owners: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.untyped_storage().nbytes():
            owners.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    # Mapped storages lie in memory as their records do in the file.
    if len(owners) != len(ordered) or record not in ordered:
        return []
    return owners[sorted(owners)[ordered.index(record)]]


def survey(files: Sequence[Path], folder: Path, head: str | None) -> tuple[list[Planned], list[str]]:
    """Every tensor to write, and the names of entries without one. head: a tied head's name, dropped where shared."""
    sharded = pickle_names([file.name for file in folder.iterdir()]) == [PICKLE_INDEX]
    named = indexed(folder / PICKLE_INDEX) if sharded else {}
    planned: dict[str, Planned] = {}
    left_out = []
    for file in files:
        _require_zip(file)
        record = None
        if blob_of(file) is not None:
            check_blobs([file])  # the hub's hash of a file says more than the archive's own checksums
        else:
            record = _damaged_record(file)
        if record is not None and not _RECORD.fullmatch(record):
            raise CheckpointError(f"{file} is damaged in {record}; fetch it again")
        state = load_pickled(file)
        if record is not None:
            owners = " and ".join(_tensors_of_record(file, record, state)) or "unknown"
            raise CheckpointError(
                f"{file} is damaged: the checksum of {record} does not fit its bytes (tensor {owners}); fetch it again"
            )
        for name in _without_tied_head(state, head):
            value = state[name]
            if not isinstance(value, torch.Tensor):
                left_out.append(name)
            elif named.get(name, file.name) == file.name:
                if name in planned:
                    raise CheckpointError(f"{file} and {planned[name].source.name} both contain the tensor {name}")
                planned[name] = plan(file, name, value)
        missing = [name for name, place in named.items() if place == file.name and name not in state]
        if missing:
            raise CheckpointError(f"{file} lacks the tensor {missing[0]}, which {PICKLE_INDEX} says it has")
    return list(planned.values()), left_out


def _without_tied_head(state: Mapping[str, Any], head: str | None) -> list[str]:
    """Names to keep: of a head that is the embedding itself, only the embedding."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            places.setdefault(place, []).append(name)
    shared = {name for names in places.values() if len(names) > 1 for name in names}
    return [name for name in state if not (head and name in shared and name.endswith(head))]


def plan(file: Path, name: str, tensor: torch.Tensor) -> Planned:
    """What a tensor will be in the new file; raises `CheckpointError` naming one that is not plain values."""
    where = f"{file}: tensor {name}"
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{where} is stored as {tensor.layout}, not as plain values; use the original checkpoint")
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(f"{where} has the type {str(tensor.dtype).removeprefix('torch.')}; known are {known}")
    size = tensor.numel() * tensor.element_size()
    if size > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{where} repeats {tensor.untyped_storage().nbytes()} stored bytes to {size}")
    return Planned(file, name, DTYPES[tensor.dtype], tuple(tensor.shape), size)
