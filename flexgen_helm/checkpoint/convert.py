"""Pickled checkpoints become safetensors, tensor by tensor: `flexgen-helm convert`.

Bytes go from the mapped pickle to the new file in tiles of 4 MiB; only a tensor with unusual strides is copied whole.
Headers and lengths are written first, the loader checks names and shapes, then the data follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_helm.checkpoint.fingerprint import file_sha256
from flexgen_helm.checkpoint.folder import CONFIG, INDEX, SINGLE, SMALL_FILES, read_config, require_space
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
from flexgen_helm.checkpoint.pickles import (
    DTYPES,
    PlannedTensor,
    load_pickled,
    plan_tensor,
    plan_tensors,
    require_safe_torch,
)
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.files import existing_folder, naming, sync_folder, write_synced
from flexgen_helm.locks import InUseError, path_key
from flexgen_helm.models.architectures.base import find_source
from flexgen_helm.models.config import HEAD_MATRIX
from flexgen_helm.progress import Message, ProgressPhase, report
from flexgen_helm.units import size

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
