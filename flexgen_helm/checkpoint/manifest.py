"""Hashes that weights are compared with: a conversion's manifest, and the names of the hub's stored files. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.checkpoint.fingerprint import file_sha256, forget, recall, remember, stamp
from flexgen_helm.checkpoint.folder import CONFIG, INDEX, TOKENIZER_FILES, read_json
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.errors import CheckpointError

if TYPE_CHECKING:
    from flexgen_helm.checkpoint.checkpoint import ByteSource

MANIFEST = "flexgen_conversion.json"
FORMAT = "flexgen_helm conversion 1"

_TILE_BYTES = 4 << 20
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


# --- where conversions lie ----------------------------------------------------------------------------------------


def hub_conversion(repo: str, commit: str) -> Path:
    """Where the conversion of a hub repository at a commit lies, once there is one."""
    return state_dir() / "converted" / repo.replace("/", "--") / commit


def folder_conversion(folder: Path) -> Path:
    """Where the conversion of a local folder lies, once there is one."""
    real = folder.resolve()
    return state_dir() / "converted" / "local" / f"{real.name}-{hashlib.sha256(str(real).encode()).hexdigest()[:12]}"


def is_conversion(folder: Path) -> bool:
    """Whether a complete conversion lies here: its manifest appears with the whole folder, in one step."""
    return (folder / MANIFEST).is_file()


def conversion_of(folder: Path) -> Path | None:
    """The conversion of a local folder whose own weights are pickled, or gone since; None where there is none.

    Raises `CheckpointError` where the folder's files are no longer those that were converted.
    """
    found = folder_conversion(folder)
    if not folder.is_dir() or not is_conversion(found) or any(folder.glob("*.safetensors")):
        return None
    if changed := changed_since(found, folder):
        raise CheckpointError(
            f"{folder / changed} has changed since it was converted; run `flexgen-helm convert {folder}` again"
        )
    return found


def changed_since(conversion: Path, folder: Path) -> str | None:
    """A file of the source folder that is there and differs from what was converted. Deleted files do not matter."""
    manifest = read_manifest(conversion)
    for name, known in {**_hashes(manifest, "sources", conversion), **_hashes(manifest, "copied", conversion)}.items():
        if (folder / name).is_file() and file_sha256(folder / name) != known:
            return name
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a conversion; raises `CheckpointError` where it cannot be used."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} has the format {manifest.get('format')!r}, not {FORMAT!r}")
    return manifest


def _hashes(manifest: Mapping[str, Any], key: str, folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of one of the manifest's lists of files."""
    found = manifest.get(key)
    try:
        return {name: str(entry["sha256"]) for name, entry in found.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, KeyError):
        raise CheckpointError(f"{folder / MANIFEST} has no usable list of {key}; run flexgen-helm convert again") from (
            None
        )


# --- tensors of a conversion --------------------------------------------------------------------------------------


class TensorChecks:
    """Compares the tensors of a conversion with its manifest, each before it is first used.

    Opening compares the small files and the shards' headers. A tensor is hashed when it is asked for, by plain
    reads that leave it in the page cache for whoever reads it next. Once all tensors that the model uses of a file
    are as they must be, this is remembered for as long as the file is unchanged.
    """

    def __init__(self, folder: Path, used: Mapping[str, ByteSource]) -> None:
        self._manifest = manifest = read_manifest(folder)
        self._folder, self._lock = folder, threading.Lock()
        for name, known in _hashes(manifest, "copied", folder).items():
            _require(folder / name, file_sha256(folder / name), known)
        headers = _hashes(manifest, "shards", folder)
        self._tensors: dict[str, tuple[int, int, str]] = {}
        try:
            for name, entry in manifest["tensors"].items():
                self._tensors[name] = (int(entry["offset"]), int(entry["bytes"]), str(entry["sha256"]))
        except (AttributeError, TypeError, KeyError, ValueError):
            raise CheckpointError(
                f"{folder / MANIFEST} has no usable list of tensors; run flexgen-helm convert again"
            ) from None
        by_file: dict[ByteSource, set[str]] = {}
        for name, file in used.items():
            if name not in self._tensors or file.path.name not in headers:
                raise CheckpointError(f"{folder / MANIFEST} lacks the tensor {name} of {file.path.name}")
            by_file.setdefault(file, set()).add(name)
        # What must match, said in one word: other hashes or other tensors ask for another look.
        identity = hashlib.sha256(f"{self.fingerprint} {sorted(used)}".encode()).hexdigest()
        self._identity = identity
        self._all = by_file
        self._open: dict[ByteSource, set[str]] = {}
        for file, names in by_file.items():
            length = int.from_bytes(file.read(0, 8, "header length"), "little")
            digest = hashlib.sha256(file.read(0, 8 + length, "header")).hexdigest()
            _require(file.path, digest, headers[file.path.name], "the header of ")
            if recall(file.path, MANIFEST, _stamp(file)) != identity:
                self._open[file] = set(names)

    @classmethod
    def of(cls, folder: Path, used: Mapping[str, ByteSource]) -> TensorChecks | None:
        """The checks of a folder, None where it is no conversion. used: tensor's name in the file -> its file."""
        return cls(folder, used) if is_conversion(folder) else None

    @property
    def fingerprint(self) -> str:
        """Identity of the content: every tensor's name, type, shape and hash, the configuration and the tokenizer."""
        tensors = sorted(
            (name, entry.get("dtype"), entry.get("shape"), entry["sha256"])
            for name, entry in self._manifest["tensors"].items()
        )
        copied = _hashes(self._manifest, "copied", self._folder)
        others = sorted((name, copied[name]) for name in (CONFIG, *TOKENIZER_FILES) if name in copied)
        return hashlib.sha256(json.dumps([FORMAT, tensors, others]).encode()).hexdigest()

    def check(self, file: ByteSource, name: str) -> None:
        """Raise `CheckpointError` naming file and tensor where the tensor is not what was converted."""
        with self._lock:
            if name not in self._open.get(file, ()):
                return
        offset, size, known = self._tensors[name]
        digest = hashlib.sha256()
        for start in range(0, size, _TILE_BYTES):
            digest.update(file.read(offset + start, min(_TILE_BYTES, size - start), f"tensor {name}"))
        _require(file.path, digest.hexdigest(), known, f"tensor {name} of ")
        with self._lock:
            left = self._open.get(file, set())
            left.discard(name)
            if not left and self._open.pop(file, None) is not None:
                remember(file.path, MANIFEST, self._identity, _stamp(file))

    def start_over(self) -> None:
        """Compare every tensor anew, whatever is remembered."""
        with self._lock:
            self._open = {file: set(names) for file, names in self._all.items()}


def _stamp(file: ByteSource) -> list[int]:
    return [file.size, file.mtime_ns, file.inode]


def _require(path: Path, digest: str, known: str, what: str = "") -> None:
    if digest != known:
        raise CheckpointError(
            f"{what}{path} is damaged: its SHA-256 is {digest[:16]}…, but {MANIFEST} says {known[:16]}…; delete the "
            "folder and run flexgen-helm convert again"
        )


# --- files of the hub ---------------------------------------------------------------------------------------------


def check_blobs(files: Iterable[Path], tell: Callable[[str], None] = lambda line: None, *, anew: bool = False) -> None:
    """Compare files of a hub snapshot with the names of their blobs, which are hashes of their content.

    Large files (weights) go by their SHA-256, which is remembered unless `anew`; small ones by git's SHA-1. A file
    that is no link into the hub's store has no hash and is passed over. Raises `CheckpointError` naming file and blob.
    """
    for file in files:
        blob = blob_of(file)
        if blob is None:
            continue
        if _SHA256.fullmatch(blob.name):
            if anew:
                forget(blob)
            size = blob.stat().st_size
            if size > 1 << 30 and recall(blob, "sha256", stamp(blob)) is None:
                tell(f"comparing {file.name} ({size / 2**30:.1f} GiB) with its SHA-256, once")
            digest = file_sha256(blob)
        else:
            digest = _git_sha1(blob)
        if digest != blob.name:
            raise CheckpointError(
                f"{file} is damaged: its hash is {digest[:16]}…, but the hub gave {blob.name[:16]}…; delete {blob} and "
                "run the same command again"
            )


def snapshot_files(folder: Path, weights: Iterable[Path]) -> list[Path]:
    """Every file of a snapshot that decides results."""
    others = [folder / name for name in (CONFIG, INDEX, *TOKENIZER_FILES)]
    return [*(file for file in others if file.is_file()), *weights]


def blob_of(file: Path) -> Path | None:
    """The hub's stored file behind a snapshot's link, whose name is a hash; None for any other file."""
    if not file.is_symlink():
        return None
    target = file.parent / os.readlink(file)
    name = target.name
    return target if _SHA256.fullmatch(name) or _GIT_SHA1.fullmatch(name) else None


def _git_sha1(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
