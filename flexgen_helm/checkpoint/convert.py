"""Pickled checkpoints become safetensors: `flexgen-helm convert`. The only module that opens
pickles.

Tensors stay in the mapped pickles until safetensors writes them, a file of at most 4 GiB at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from flexgen_helm.checkpoint.fingerprint import blob_of, check_blobs, file_sha256
from flexgen_helm.checkpoint.folder import (
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    SMALL_FILES,
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
from flexgen_helm.checkpoint.open import open_as
from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import CheckpointError, UnsafePickleError, UsageError
from flexgen_helm.files import (
    existing_folder,
    naming,
    refuse_lfs_pointer,
    sync_folder,
    write_synced,
)
from flexgen_helm.locks import sole_writer
from flexgen_helm.models.architectures.base import find_source
from flexgen_helm.models.config import HEAD_MATRIX
from flexgen_helm.paths import state_dir
from flexgen_helm.progress import Message, ProgressPhase, report
from flexgen_helm.system_errors import system_error
from flexgen_helm.units import size

# The first whose `weights_only` refuses every file known to get round it (CVE-2025-32434,
# CVE-2026-24747).
OLDEST_TORCH = (2, 10)
SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class _Source:
    """What to convert, and where to. origin: for records. files: the pickled ones. target: the
    folder to write.
    """

    folder: Path
    files: Sequence[Path]
    origin: str
    target: Path


def convert(
    name: str | os.PathLike[str],
    out: Path | None = None,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Turn a model's pickled weights into a folder of safetensors; values, types and names do not
    change.

    out: by default a folder below `FLEXGEN_HELM_HOME`, which the model's name means from then on.
        The folder appears as a whole, in one step. An existing conversion of the same files is
        returned.

    Raises `UsageError` if there is nothing to convert, `UnsafePickleError` for a pickle that asks
    for more than tensors, and `CheckpointError` for files that are damaged or do not fit the disk.
    Each leaves nothing behind.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if numbers < OLDEST_TORCH:
        raise UsageError(
            f"torch {torch.__version__} can be made to run code by a pickle even with "
            f"weights_only; convert needs torch {'.'.join(map(str, OLDEST_TORCH))} or later: pip "
            "install --upgrade torch"
        )
    resolved = resolve(name, revision)
    source = _find_source(resolved, out)
    target = source.target
    partial = target.parent / f".{target.name}.partial"
    with sole_writer(target, "FLEXGEN_HELM_HOME" if out is None else "--out"):
        if existing := _existing_conversion(source):
            report(Message(f"{source.origin} has been converted already"))
            return existing
        try:
            with naming(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                _write(partial, source, shard_bytes)
                _put_in_place(partial, target)
        except SafetensorError as error:  # the system's reason is a part of the library's sentence
            raise CheckpointError(f"{target} cannot be written: {error}") from error
        except OSError as error:
            raise CheckpointError(
                f"{target} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if resolved.kind == "hub":
        num_bytes = sum(file.stat().st_size for file in source.files)
        report(
            Message(
                f"the pickled files ({size(num_bytes)}) stay in the hub's cache; `hf cache rm` "
                "frees them"
            )
        )
    return Manifest.read(target)


# ---- what to convert ----


def _find_source(resolved: ResolvedModel, out: Path | None) -> _Source:
    if resolved.kind in ("gguf", "wheel"):
        raise UsageError(
            f"{resolved.name} is a GGUF model, which is read as it is; nothing needs converting"
        )
    if (folder := resolved.path) is not None:
        if folder.is_file() or any(folder.glob("[!.]*.safetensors")):
            raise UsageError(f"{folder} has safetensors weights; nothing needs converting")
        files = pickled_files(folder, str(folder))
        return _Source(folder, files, folder.resolve().name, out or folder_conversion(folder))
    if resolved.hub_repo is None:
        raise CheckpointError(
            f"the weights of {resolved.name} are not published; name a folder that contains them"
        )
    output_disk = existing_folder((out or state_dir()).parent)
    folder, files = fetch_pickles(resolved.hub_repo, resolved.revision, output_disk)
    target = out or hub_conversion(resolved.hub_repo, folder.name)
    return _Source(folder, files, f"{resolved.hub_repo}@{folder.name}", target)


def _existing_conversion(source: _Source) -> Manifest | None:
    """Return the conversion in the target folder if it is of the same files; refuse a folder of
    anything else.
    """
    target = source.target
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not is_conversion(target):
        raise UsageError(f"{target} exists and is no conversion; name another folder with --out")
    try:
        manifest = Manifest.read(target)
    except CheckpointError:  # of an earlier version
        return None
    if manifest.origin != source.origin:
        raise UsageError(
            f"{target} is a conversion of another model; name another folder with --out"
        )
    return None if manifest.changed_source(source.folder) else manifest


# ---- reading ----


def _load(file: Path) -> Mapping[Any, Any]:
    """Return the entries of a pickled file, with tensors over the mapped file.

    Raises `UnsafePickleError` if it asks for anything else, `CheckpointError` if it is damaged: by
    the hub's hash, or by the archive's checksums.
    """
    _require_undamaged_archive(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        if (system := system_error(error)) is not None:
            raise OSError(system.errno, system.strerror, str(file)) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            type(error).__name__
        ]
        if type(error).__name__ != "UnpicklingError":
            raise CheckpointError(
                f"{file} is damaged or no PyTorch checkpoint: {lines[0][:200]}"
            ) from error
        name = re.search(r"(?:GLOBAL|class|function) `?([\w.]+)", str(error))
        # The other lines are torch's advice to load the file all the same.
        reason = next(
            (line for line in lines if line.startswith(("WeightsUnpickler", "Unsupported"))),
            lines[0],
        )
        request = name[1] if name else f"what tensors do not need ({reason[:200]})"
        raise UnsafePickleError(
            f"{file} asks for {request}, which is no tensor and could run code; nothing of it was "
            "executed, and it is not converted: obtain the weights from a source that you trust"
        ) from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} contains a {type(state).__name__}, not tensors by name")
    return state


def _require_undamaged_archive(file: Path) -> None:
    """Accept only a whole file of the format that can be mapped: zip archives, which PyTorch writes
    since 1.6.
    """
    refuse_lfs_pointer(file)
    with file.open("rb") as opened:
        start, is_archive = opened.read(64), zipfile.is_zipfile(opened)
    if not is_archive:
        if start.startswith(b"PK\x03\x04"):
            raise CheckpointError(
                f"{file} is truncated ({file.stat().st_size:,} bytes); fetch it again"
            )
        if start.startswith(b"\x80"):
            raise CheckpointError(
                f"{file} is in the format before PyTorch 1.6, which can only be read whole; save "
                "it anew where memory suffices: torch.save(torch.load(file, weights_only=True), "
                "file)"
            )
        raise CheckpointError(f"{file} is no PyTorch checkpoint")
    check_blobs([file])
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(
                        f"{file} compresses {info.filename}, which PyTorch never does"
                    )
            damaged = archive.testzip() if blob_of(file) is None else None
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error) as error:
        if system_error(error) is not None:
            raise
        damaged = "the archive's directory"
    if damaged is not None:
        raise CheckpointError(f"{file} is damaged in {damaged}; fetch it again")


def _read_tensors(source: _Source) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors, and the names of the entries that are not tensors.

    Raises `CheckpointError` for files that are damaged or disagree with their index.
    """
    is_sharded = (
        source.files != [source.folder / PICKLE] and (source.folder / PICKLE_INDEX).is_file()
    )
    file_of = read_index(source.folder / PICKLE_INDEX) if is_sharded else {}
    tensors: dict[str, torch.Tensor] = {}
    left_out = []
    for path in source.files:
        for name, value in _load(path).items():
            if not isinstance(value, torch.Tensor):
                left_out.append(str(name))
            elif file_of.get(name, path.name) == path.name:
                tensors[str(name)] = _plain(f"tensor {name} of {path}", value)
    for name, file in file_of.items():
        if name not in tensors:
            raise CheckpointError(
                f"{source.folder / file} lacks the tensor {name}, which {PICKLE_INDEX} says it has"
            )
    if not tensors:
        raise CheckpointError(
            f"{source.folder} has no tensors in {', '.join(file.name for file in source.files)}"
        )
    return tensors, left_out


def _plain(title: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of plain values; raises `CheckpointError` for any other."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
        kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        raise CheckpointError(
            f"{title} is stored as {kind}, not as plain values; use the original checkpoint"
        )
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{title} repeats {tensor.untyped_storage().nbytes()} stored bytes to {tensor.nbytes}"
        )
    return tensor.detach()


# ---- writing ----


def _write(folder: Path, source: _Source, shard_bytes: int) -> None:
    """Make the whole conversion in `folder`, the manifest last."""
    architecture, config, _ = read_config(source.folder)
    tensors, left_out = _read_tensors(source)
    if left_out:
        report(
            Message(
                "left out, being no tensors: "
                f"{', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}"
            )
        )
    if architecture.tensors and config.tied_head:
        _drop_shared(tensors, find_source(architecture.tensors, HEAD_MATRIX).name)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    total = sum(tensor.nbytes for tensor in tensors.values())
    require_space(
        folder.parent, total, "the conversion takes", "name a folder on another disk with --out"
    )
    folder.mkdir()
    done = 0
    for file, names in split.filename_to_tensors.items():
        stop_point()
        report(ProgressPhase("convert", file, done, total))
        _write_shard(folder / file, {name: tensors[name] for name in names})
        done += sum(tensors[name].nbytes for name in names)
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
        write_synced(folder / INDEX, json.dumps(index, indent=1).encode())
    # The configuration last: without it, what a crash leaves is no model folder.
    copied = [name for name in reversed(SMALL_FILES) if (source.folder / name).is_file()]
    for name in copied:
        write_synced(folder / name, (source.folder / name).read_bytes())
    manifest = {
        "format": FORMAT,
        "origin": source.origin,
        "sources": {file.name: file_sha256(file.resolve()) for file in source.files},
        "copied": {name: file_sha256(folder / name) for name in copied},
        "shards": {name: file_sha256(folder / name) for name in split.filename_to_tensors},
        "tensors": len(tensors),
        "size": total,
        "left_out": left_out,
    }
    open_as(type(config), folder)
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _drop_shared(tensors: dict[str, torch.Tensor], ending: str) -> None:
    """Drop tensors whose names end so, if they are another one in the same memory."""

    def memory(tensor: torch.Tensor) -> Hashable:
        return tensor.data_ptr(), tensor.shape, tensor.stride()

    counts = Counter(map(memory, tensors.values()))
    for name in [name for name in tensors if name.endswith(ending)]:
        if counts[memory(tensors[name])] > 1:
            del tensors[name]


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # The library refuses tensors that share memory, or have unusual strides.
    shared = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    plain = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        if shared[tensor.untyped_storage().data_ptr()] > 1
        else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_file(plain, path, {"format": "pt"})
    sync_folder(path)


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename the finished folder; a conversion of an older state of the source makes room for
    it.
    """
    sync_folder(partial)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
