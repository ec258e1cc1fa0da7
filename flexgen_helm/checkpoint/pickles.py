"""Pickled PyTorch files: their tensors, read without executing anything. The only module that opens pickles.

`torch.load(weights_only=True, mmap=True)` builds tensors over the mapped file and refuses everything else. Only the
archive format that can be mapped is accepted, and its checksums are compared first.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexgen_helm.checkpoint.fingerprint import blob_of, check_blobs
from flexgen_helm.checkpoint.folder import PICKLE_INDEX, pickle_names, read_index
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
# The bytes of one storage in PyTorch's archive.
_RECORD = re.compile(r"[^/]*/data/\d+")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    source: the pickled file.
    dtype: safetensors' name of it.
    size, offset: bytes; the offset from the start of the new file's data.
    """

    source: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    offset: int = 0


def require_safe_torch() -> None:
    """Raise `UsageError` if this torch cannot be trusted with a pickle."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if numbers < OLDEST_TORCH:
        raise UsageError(
            f"torch {torch.__version__} can be made to run code by a pickle even with weights_only; convert needs "
            f"torch {'.'.join(map(str, OLDEST_TORCH))} or later: pip install --upgrade torch"
        )


def load_pickled(file: Path) -> dict[str, Any]:
    """Return the entries of a pickled file, with tensors over the mapped file.

    Raises `UnsafePickleError` if it asks for anything else, `CheckpointError` if it is damaged.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if type(error).__name__ != "UnpicklingError":
            raise CheckpointError(f"{file} is damaged or no PyTorch checkpoint: {lines[0][:200]}") from error
        name = re.search(r"(?:GLOBAL|class|function) `?([\w.]+)", str(error))
        # The other lines are torch's advice to load the file all the same.
        reason = next((line for line in lines if line.startswith(("WeightsUnpickler", "Unsupported"))), lines[0])
        request = name[1] if name else f"what tensors do not need ({reason[:200]})"
        raise UnsafePickleError(
            f"{file} asks for {request}, which is no tensor and could run code; nothing of it was executed, and it is "
            "not converted: obtain the weights from a source that you trust"
        ) from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} contains a {type(state).__name__}, not tensors by name")
    return {str(name): value for name, value in state.items()}


def plan_tensors(files: Sequence[Path], folder: Path, tied_head: str | None) -> tuple[list[PlannedTensor], list[str]]:
    """Return every tensor to write, and the names of the entries that are not tensors.

    tied_head: end of the head's name if the model ties it; it is left out if it shares the embedding's bytes.

    Raises `CheckpointError` for files that are damaged or disagree with their index.
    """
    is_sharded = pickle_names([file.name for file in folder.iterdir()]) == [PICKLE_INDEX]
    file_of = read_index(folder / PICKLE_INDEX) if is_sharded else {}
    planned: dict[str, PlannedTensor] = {}
    left_out = []
    for file in files:
        state = _load_undamaged(file)
        for name in _without_tied_head(state, tied_head):
            if not isinstance(state[name], torch.Tensor):
                left_out.append(name)
            elif file_of.get(name, file.name) == file.name:
                if name in planned:
                    raise CheckpointError(f"{file} and {planned[name].source.name} both contain the tensor {name}")
                planned[name] = plan_tensor(file, name, state[name])
        missing = [name for name, place in file_of.items() if place == file.name and name not in state]
        if missing:
            raise CheckpointError(f"{file} lacks the tensor {missing[0]}, which {PICKLE_INDEX} says it has")
    return list(planned.values()), left_out


def plan_tensor(file: Path, name: str, tensor: torch.Tensor) -> PlannedTensor:
    """Plan one tensor; raises `CheckpointError` naming one that is not plain values."""
    title, dtype = f"{file}: tensor {name}", str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{title} is stored as {tensor.layout}, not as plain values; use the original checkpoint")
    if tensor.dtype not in DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(f"{title} has the type {dtype}; supported are {supported}")
    size = tensor.numel() * tensor.element_size()
    if size > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{title} repeats {tensor.untyped_storage().nbytes()} stored bytes to {size}")
    return PlannedTensor(file, name, DTYPES[tensor.dtype], tuple(tensor.shape), size)


def _load_undamaged(file: Path) -> dict[str, Any]:
    """Load a pickled file whose bytes are as they were written, by the hub's hash or the archive's checksums."""
    _require_archive(file)
    record = None
    if blob_of(file) is not None:
        check_blobs([file])
    else:
        record = _damaged_record(file)
    if record is not None and not _RECORD.fullmatch(record):
        raise CheckpointError(f"{file} is damaged in {record}; fetch it again")
    state = load_pickled(file)
    if record is not None:
        names = " and ".join(_tensors_of_record(file, record, state)) or "unknown"
        raise CheckpointError(
            f"{file} is damaged: the checksum of {record} does not fit its bytes (tensor {names}); fetch it again"
        )
    return state


def _require_archive(file: Path) -> None:
    """Accept only a whole file of the format that can be mapped: zip archives, which PyTorch writes since 1.6."""
    with file.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a pointer of git LFS, not the file itself; run git lfs pull")
    if zipfile.is_zipfile(file):
        return
    if start.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{file} is truncated ({file.stat().st_size:,} bytes); fetch it again")
    if start.startswith(b"\x80"):
        raise CheckpointError(
            f"{file} is in the format before PyTorch 1.6, which can only be read whole; save it anew where memory "
            "suffices: torch.save(torch.load(file, weights_only=True), file)"
        )
    raise CheckpointError(f"{file} is no PyTorch checkpoint")


def _damaged_record(file: Path) -> str | None:
    """Return the first record of the archive whose checksum (CRC-32) does not fit its bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{file} compresses {info.filename}, which PyTorch never does")
            return archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error):
        return "the archive's directory"


def _tensors_of_record(file: Path, record: str, state: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors whose bytes a record contains; [] if that cannot be told."""
    with zipfile.ZipFile(file) as archive:
        records = [info for info in archive.infolist() if _RECORD.fullmatch(info.filename) and info.file_size]
    ordered = [info.filename for info in sorted(records, key=lambda info: info.header_offset)]
    names: dict[int, list[str]] = defaultdict(list)  # by the address of the storage
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.untyped_storage().nbytes():
            names[value.untyped_storage().data_ptr()].append(name)
    # Mapped storages have the same order in memory as their records in the file.
    if len(names) != len(ordered) or record not in ordered:
        return []
    return names[sorted(names)[ordered.index(record)]]


def _without_tied_head(state: Mapping[str, Any], tied_head: str | None) -> list[str]:
    """Return the names to keep: of a head that is the embedding itself, only the embedding."""
    names: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
            names[value.data_ptr(), value.dtype, value.shape, value.stride()].append(name)
    shared = {name for group in names.values() if len(group) > 1 for name in group}
    return [name for name in state if not (tied_head and name in shared and name.endswith(tied_head))]
