"""Pickled checkpoints become safetensors, tensor by tensor: `flexgen-helm convert`.

Bytes go from the mapped pickle to the new file in tiles of 4 MiB; only a tensor that is stored in another order than
its own is copied whole. Headers and lengths come first, the loader judges names and shapes, then the data follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from flexgen_helm.checkpoint.fingerprint import file_sha256
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    read_config,
)
from flexgen_helm.checkpoint.hub import Progress, fetch_pickles, pickled_files
from flexgen_helm.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    changed_since,
    folder_conversion,
    hub_conversion,
    is_conversion,
    read_manifest,
)
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.checkpoint.pickles import DTYPES, Planned, load_pickled, plan, require_safe_torch, survey
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.models.architectures import Architecture, find_source
from flexgen_helm.models.config import ModelConfig

SHARD_BYTES = 4 << 30
TILE_BYTES = 4 << 20
# A file is mapped anew after so many bytes: its pages, which the system may take at any time, count as ours until then.
MAPPED_BYTES = 256 << 20


@dataclass(frozen=True)
class Conversion:
    """What `convert` made or found. size: bytes of all tensors. left_out: entries of the source without a tensor."""

    path: Path
    origin: str
    tensors: int
    size: int
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Shard:
    """A file to write: its header's bytes, padded, and its tensors in order of offset."""

    name: str
    header: bytes
    tensors: tuple[Planned, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor in self.tensors)


def convert(
    name: str | os.PathLike[str],
    out: Path | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Turn a model's pickled weights into a folder of safetensors; values, types and names stay as they are.

    out: default is a folder below `FLEXGEN_HELM_HOME` in which the model's name finds it from then on. The folder
    appears whole, in one step. A conversion of the same files that is there already is returned. Raises `UsageError`
    where there is nothing to convert, `UnsafePickleError` for a pickle that asks for more than tensors, and
    `CheckpointError` for files that are damaged or do not fit the disk; each leaves nothing behind.
    """
    tell = progress or (lambda line: None)
    require_safe_torch()
    resolved = resolve(name, revision)
    folder, files, origin, target = _obtain(resolved, out, tell)
    partial = target.parent / f".{target.name}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if found := _present(target, folder, origin):
                tell(f"{origin} has been converted already")
                return found
            try:
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                _write(partial, folder, files, origin, shard_bytes, tell)
                _put_in_place(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    if resolved.kind == "hub":
        size = sum(file.stat().st_size for file in files)
        tell(f"the pickled files ({size / 2**30:.1f} GiB) stay in the hub's cache; `hf cache rm` frees their space")
    return _describe(target)


# --- what to convert ----------------------------------------------------------------------------------------------


def _obtain(resolved: ResolvedModel, out: Path | None, tell: Progress) -> tuple[Path, list[Path], str, Path]:
    """Source folder, its pickled files, their origin for records, and where the conversion goes."""
    if resolved.kind in ("gguf", "wheel"):
        raise UsageError(f"{resolved.name} is a GGUF model, which is read as it is; nothing needs converting")
    if resolved.path is not None:
        folder = resolved.path
        if folder.is_file() or any(folder.glob("*.safetensors")):
            raise UsageError(f"{resolved.path} has safetensors weights; nothing needs converting")
        return folder, pickled_files(folder, str(folder)), folder.resolve().name, out or folder_conversion(folder)
    if resolved.hub_repo is None:
        raise CheckpointError(f"the weights of {resolved.name} are not published; name a folder that contains them")
    beside = (out.absolute() if out else state_dir()).parent
    beside = next(place for place in (beside, *beside.parents) if place.is_dir())
    folder, files = fetch_pickles(resolved.hub_repo, resolved.revision, beside, tell)
    target = out or hub_conversion(resolved.hub_repo, folder.name)
    return folder, files, f"{resolved.hub_repo}@{folder.name}", target


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Only one process at a time writes a folder; raises `UsageError` in the second."""
    locks = state_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(str(target.resolve()).encode()).hexdigest()[:16]
    try:
        with FileLock(locks / f"convert-{key}.lock", timeout=0):
            yield
    except Timeout:
        raise UsageError(f"another process is converting into {target}; wait until it is done") from None


def _present(target: Path, folder: Path, origin: str) -> Conversion | None:
    """The conversion that is there, if it is of the same files; a folder of anything else is not touched."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not is_conversion(target):
        raise UsageError(f"{target} exists and is no conversion; name another folder with --out")
    if read_manifest(target).get("origin") != origin:
        raise UsageError(f"{target} is a conversion of another model; name another folder with --out")
    return None if changed_since(target, folder) else _describe(target)


def _describe(target: Path) -> Conversion:
    manifest = read_manifest(target)
    sizes = [tensor["bytes"] for tensor in manifest["tensors"].values()]
    return Conversion(target, manifest["origin"], len(sizes), sum(sizes), tuple(manifest["left_out"]))


# --- writing ------------------------------------------------------------------------------------------------------


def _write(folder: Path, source: Path, files: Sequence[Path], origin: str, shard_bytes: int, tell: Progress) -> None:
    """Make the whole conversion in `folder`, the manifest last."""
    architecture, config, _ = read_config(source)
    planned, left_out = survey(files, source, _tied_head(architecture, config))
    if not planned:
        raise CheckpointError(f"{source} has no tensors in {', '.join(file.name for file in files)}")
    if left_out:
        tell(f"left out, being no tensors: {', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}")
    shards = _shards(planned, shard_bytes)
    total = sum(shard.size for shard in shards)
    _require_space(folder.parent, total)
    folder.mkdir()
    for shard in shards:
        _reserve(folder / shard.name, shard)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": sum(tensor.size for tensor in planned)}, "weight_map": weight_map}
        _write_file(folder / INDEX, json.dumps(index, indent=1).encode())
    # Names, shapes and types are judged by the loader itself while the files are still empty.
    shutil.copyfile(source / CONFIG, folder / CONFIG)
    SafetensorsCheckpoint(folder)
    # Without it, what a crash leaves is no model folder.
    (folder / CONFIG).unlink()

    tensors: dict[str, Any] = {}
    done = 0
    for shard in shards:
        tensors.update(_fill(folder / shard.name, shard))
        done += shard.size
        tell(f"{shard.name}: {done / 2**30:.2f} of {total / 2**30:.2f} GiB written")
    copied = [name for name in ("generation_config.json", *TOKENIZER_FILES, CONFIG) if (source / name).is_file()]
    for name in copied:
        _write_file(folder / name, (source / name).read_bytes())
    manifest = {
        "format": FORMAT,
        "origin": origin,
        "sources": {file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file.resolve())} for file in files},
        "copied": {name: {"sha256": file_sha256(folder / name)} for name in copied},
        "shards": {
            shard.name: {"bytes": shard.size, "sha256": hashlib.sha256(shard.header).hexdigest(), "of": "header"}
            for shard in shards
        },
        "tensors": tensors,
        "left_out": left_out,
    }
    _write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    SafetensorsCheckpoint(folder)


def _tied_head(architecture: Architecture, config: ModelConfig) -> str | None:
    """The head's name in a checkpoint where the family reads it from the embedding."""
    try:
        return find_source(architecture.tensors, "head.lm.weight").name if config.tied_head else None
    except KeyError:
        return None


def _shards(planned: Sequence[Planned], shard_bytes: int) -> list[_Shard]:
    """Tensors in their order, as many to a file as fit; one that is larger has a file of its own."""
    groups: list[list[Planned]] = [[]]
    filled = 0
    for tensor in planned:
        if groups[-1] and filled + tensor.size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [_shard(name, group) for name, group in zip(names, groups, strict=True)]


def _shard(name: str, group: Sequence[Planned]) -> _Shard:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed, offset = [], 0
    # Wide types first, so that every tensor is aligned to its own.
    for tensor in sorted(group, key=lambda tensor: -_width(tensor)):
        end = offset + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        placed.append(replace(tensor, offset=offset))
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _Shard(name, len(text).to_bytes(8, "little") + text, tuple(placed))


def _width(tensor: Planned) -> int:
    return next(dtype.itemsize for dtype, name in DTYPES.items() if name == tensor.dtype)


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"the conversion takes {needed:,} bytes and {free:,} are free in {folder}: {needed - free:,} bytes are "
            "missing; make room, or name a folder on another disk with --out"
        )


def _reserve(path: Path, shard: _Shard) -> None:
    """The file with its header and its whole length, so that a full disk shows before the work and not after."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shard.size)
        file.write(shard.header)


def _fill(path: Path, shard: _Shard) -> dict[str, Any]:
    """Write the data of a reserved shard; returns the manifest's entries of its tensors."""
    entries: dict[str, Any] = {}
    start = len(shard.header)
    with path.open("r+b", buffering=0) as file:
        for batch in _batches(shard.tensors):
            source = batch[0].source
            state = load_pickled(source)
            for tensor in batch:
                value, digest = state.get(tensor.name), hashlib.sha256()
                if not isinstance(value, torch.Tensor) or replace(tensor, offset=0) != plan(source, tensor.name, value):
                    raise CheckpointError(f"{source} has changed while it was being converted (tensor {tensor.name})")
                file.seek(start + tensor.offset)
                for tile in _tiles(value):
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
            del state, value  # with the last tensor goes the mapping, and its pages with it
        os.fsync(file.fileno())
    return entries


def _batches(tensors: Sequence[Planned]) -> Iterator[list[Planned]]:
    """The tensors of one source, as many as one mapping of it should bring into memory."""
    for source in dict.fromkeys(tensor.source for tensor in tensors):
        batch: list[Planned] = []
        for tensor in (tensor for tensor in tensors if tensor.source == source):
            if batch and sum(one.size for one in batch) + tensor.size > MAPPED_BYTES:
                yield batch
                batch = []
            batch.append(tensor)
        yield batch


def _tiles(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in its own order; copied only where the file has another."""
    if tensor.numel() == 0:
        return
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), TILE_BYTES):
        yield flat[start : start + TILE_BYTES].numpy().data


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename the finished folder; one of an older state of the source makes room for it."""
    _sync_folder(partial)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
