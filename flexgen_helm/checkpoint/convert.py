"""Pickled checkpoints become safetensors, tensor by tensor: `flexgen-helm convert`.

Bytes go from the mapped pickle to the new file in tiles of 4 MiB; only a tensor with unusual strides is copied whole.
Headers and lengths are written first, the loader checks names and shapes, then the data follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_helm.checkpoint.fingerprint import blob_of, check_blobs, file_sha256
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    INDEX,
    PICKLE_INDEX,
    SINGLE,
    SMALL_FILES,
    pickle_names,
    read_config,
    read_index,
    require_space,
)
from flexgen_helm.checkpoint.hub import fetch_pickles, pickled_files
from flexgen_helm.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    folder_conversion,
    hub_conversion,
    is_conversion,
)
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.paths import state_dir, state_lock
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import CheckpointError, UnsafePickleError, UsageError
from flexgen_helm.files import existing_folder, naming, size, sync_folder, write_synced
from flexgen_helm.locks import InUseError, path_key
from flexgen_helm.models.architectures.base import find_source
from flexgen_helm.models.config import HEAD_MATRIX
from flexgen_helm.progress import Message, ProgressPhase, report

# Pickled PyTorch files: their tensors, read without executing anything. The only module that opens pickles.

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


SHARD_BYTES = 4 << 30
TILE_BYTES = 4 << 20
# A source is mapped again after so many bytes: until then its pages count as ours, though they can be reclaimed.
MAPPED_BYTES = 256 << 20


@dataclass(frozen=True)
class _Source:
    """What to convert, and where to. origin: for records. files: the pickled ones. target: the folder to write."""

    folder: Path
    files: Sequence[Path]
    origin: str
    target: Path


@dataclass(frozen=True)
class _Shard:
    """A file to write: the bytes of its header, padded, and its tensors in order of offset."""

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor in self.tensors)


def convert(
    name: str | os.PathLike[str],
    out: Path | None = None,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Turn a model's pickled weights into a folder of safetensors; values, types and names do not change.

    out: by default a folder below `FLEXGEN_HELM_HOME`, which the model's name means from then on. The folder appears
        as a whole, in one step. An existing conversion of the same files is returned.

    Raises `UsageError` if there is nothing to convert, `UnsafePickleError` for a pickle that asks for more than
    tensors, and `CheckpointError` for files that are damaged or do not fit the disk. Each leaves nothing behind.
    """
    require_safe_torch()
    resolved = resolve(name, revision)
    source = _find_source(resolved, out)
    target = source.target
    partial = target.parent / f".{target.name}.partial"
    with _locked(target):
        if existing := _existing_conversion(source):
            report(Message(f"{source.origin} has been converted already"))
            return existing
        try:
            with naming(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                _write(partial, source, shard_bytes)
                _put_in_place(partial, target)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if resolved.kind == "hub":
        num_bytes = sum(file.stat().st_size for file in source.files)
        report(Message(f"the pickled files ({size(num_bytes)}) stay in the hub's cache; `hf cache rm` frees them"))
    return Manifest.read(target)


# ---- what to convert ----


def _find_source(resolved: ResolvedModel, out: Path | None) -> _Source:
    if resolved.kind in ("gguf", "wheel"):
        raise UsageError(f"{resolved.name} is a GGUF model, which is read as it is; nothing needs converting")
    if (folder := resolved.path) is not None:
        if folder.is_file() or any(folder.glob("*.safetensors")):
            raise UsageError(f"{folder} has safetensors weights; nothing needs converting")
        files = pickled_files(folder, str(folder))
        return _Source(folder, files, folder.resolve().name, out or folder_conversion(folder))
    if resolved.hub_repo is None:
        raise CheckpointError(f"the weights of {resolved.name} are not published; name a folder that contains them")
    output_disk = existing_folder((out or state_dir()).parent)
    folder, files = fetch_pickles(resolved.hub_repo, resolved.revision, output_disk)
    target = out or hub_conversion(resolved.hub_repo, folder.name)
    return _Source(folder, files, f"{resolved.hub_repo}@{folder.name}", target)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time write a folder; raises `UsageError` in the second."""
    try:
        with state_lock(f"locks/convert-{path_key(target)}.lock", timeout=0):
            yield
    except InUseError:
        raise UsageError(f"another process is converting into {target}; wait until it is done") from None


def _existing_conversion(source: _Source) -> Manifest | None:
    """Return the conversion in the target folder if it is of the same files; refuse a folder of anything else."""
    target = source.target
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not is_conversion(target):
        raise UsageError(f"{target} exists and is no conversion; name another folder with --out")
    manifest = Manifest.read(target)
    if manifest.origin != source.origin:
        raise UsageError(f"{target} is a conversion of another model; name another folder with --out")
    return None if manifest.changed_source(source.folder) else manifest


# ---- writing ----


def _write(folder: Path, source: _Source, shard_bytes: int) -> None:
    """Make the whole conversion in `folder`, the manifest last."""
    architecture, config, _ = read_config(source.folder)
    tied_head = find_source(architecture.tensors, HEAD_MATRIX).name if config.tied_head else None
    planned, left_out = plan_tensors(source.files, source.folder, tied_head)
    if not planned:
        raise CheckpointError(f"{source.folder} has no tensors in {', '.join(file.name for file in source.files)}")
    if left_out:
        report(Message(f"left out, being no tensors: {', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}"))
    shards = _shards(planned, shard_bytes)
    total = sum(shard.size for shard in shards)
    require_space(folder.parent, total, "the conversion takes", "name a folder on another disk with --out")
    folder.mkdir()
    for shard in shards:
        _reserve(folder / shard.name, shard)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": sum(tensor.size for tensor in planned)}, "weight_map": weight_map}
        write_synced(folder / INDEX, json.dumps(index, indent=1).encode())
    # The loader itself checks names, shapes and types while the files are still empty.
    shutil.copyfile(source.folder / CONFIG, folder / CONFIG)
    SafetensorsCheckpoint(folder)
    (folder / CONFIG).unlink()  # without it, what a crash leaves is no model folder

    tensors: dict[str, Any] = {}
    written = 0
    for shard in shards:
        stop_point()
        report(ProgressPhase("convert", shard.name, written, total))
        tensors.update(_fill(folder / shard.name, shard))
        written += shard.size
    copied = [name for name in reversed(SMALL_FILES) if (source.folder / name).is_file()]
    for name in copied:
        write_synced(folder / name, (source.folder / name).read_bytes())
    manifest = {
        "format": FORMAT,
        "origin": source.origin,
        "sources": {
            file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file.resolve())} for file in source.files
        },
        "copied": {name: {"sha256": file_sha256(folder / name)} for name in copied},
        "shards": {
            shard.name: {"bytes": shard.size, "sha256": hashlib.sha256(shard.header).hexdigest(), "of": "header"}
            for shard in shards
        },
        "tensors": tensors,
        "left_out": left_out,
    }
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    SafetensorsCheckpoint(folder)


def _groups(tensors: Iterable[PlannedTensor], max_bytes: int) -> Iterator[list[PlannedTensor]]:
    """Yield runs of tensors of at most `max_bytes` together; a larger tensor is a run of its own."""
    group: list[PlannedTensor] = []
    for tensor in tensors:
        if group and sum(member.size for member in group) + tensor.size > max_bytes:
            yield group
            group = []
        group.append(tensor)
    yield group


def _shards(planned: Sequence[PlannedTensor], shard_bytes: int) -> list[_Shard]:
    groups = list(_groups(planned, shard_bytes))
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [_shard(name, group) for name, group in zip(names, groups, strict=True)]


def _shard(name: str, group: Sequence[PlannedTensor]) -> _Shard:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed, offset = [], 0
    itemsize = {dtype_name: dtype.itemsize for dtype, dtype_name in DTYPES.items()}
    # Wide types first, so that every tensor is aligned to its own.
    for tensor in sorted(group, key=lambda tensor: -itemsize[tensor.dtype]):
        end = offset + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        placed.append(replace(tensor, offset=offset))
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _Shard(name, len(text).to_bytes(8, "little") + text, tuple(placed))


def _reserve(path: Path, shard: _Shard) -> None:
    """Write the header and reserve the whole length, so that a full disk shows before the work and not after."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shard.size)
        file.write(shard.header)


def _fill(path: Path, shard: _Shard) -> dict[str, Any]:
    """Write the data of a reserved shard; returns the manifest's entries of its tensors."""
    entries: dict[str, Any] = {}
    start = len(shard.header)
    with path.open("r+b", buffering=0) as file:
        for source in dict.fromkeys(tensor.source for tensor in shard.tensors):
            for group in _groups((tensor for tensor in shard.tensors if tensor.source == source), MAPPED_BYTES):
                state = load_pickled(source)
                for tensor in group:
                    value: Any = state.get(tensor.name)
                    is_tensor = isinstance(value, torch.Tensor)
                    if not is_tensor or plan_tensor(source, tensor.name, value) != replace(tensor, offset=0):
                        raise CheckpointError(f"{source} has changed during the conversion (tensor {tensor.name})")
                    digest = hashlib.sha256()
                    file.seek(start + tensor.offset)
                    for tile in _byte_tiles(value):
                        digest.update(tile)
                        while tile.nbytes:
                            tile = tile[file.write(tile) :]
                    entries[tensor.name] = {
                        "file": path.name,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "offset": start + tensor.offset,
                        "bytes": tensor.size,
                        "sha256": digest.hexdigest(),
                    }
                del state, value  # the last tensor closes the mapping and frees its pages
        os.fsync(file.fileno())
    return entries


def _byte_tiles(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes row by row; copies it only if its strides are unusual."""
    if tensor.numel() == 0:
        return
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), TILE_BYTES):
        yield flat[start : start + TILE_BYTES].numpy().data


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename the finished folder; a conversion of an older state of the source makes room for it."""
    sync_folder(partial)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
