"""Conversions of pickled weights: their folders, their manifest, and the check of their tensors. No torch."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.checkpoint.fingerprint import SourceFile, file_sha256, recall, remember
from flexgen_helm.checkpoint.folder import CONFIG, SMALL_FILES, TOKENIZER_FILES, read_json
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError

MANIFEST = "flexgen_conversion.json"
FORMAT = "flexgen_helm conversion 1"

_TILE_BYTES = 4 << 20


# ---- where conversions are ----


def hub_conversion(repo: str, commit: str) -> Path:
    """Return the folder of the conversion of a hub repository at a commit, whether or not there is one."""
    return state_dir() / "converted" / repo.replace("/", "--") / commit


def folder_conversion(folder: Path) -> Path:
    """Return the folder of the conversion of a local folder, whether or not there is one."""
    real = folder.resolve()
    return state_dir() / "converted" / "local" / f"{real.name}-{hashlib.sha256(str(real).encode()).hexdigest()[:12]}"


def is_conversion(folder: Path) -> bool:
    """Whether this is a complete conversion: its manifest appears with the whole folder, in one step."""
    return (folder / MANIFEST).is_file()


def conversion_of(folder: Path) -> Path | None:
    """Return the conversion of a local folder that has no safetensors of its own; None if there is none.

    Raises `CheckpointError` if the folder's files differ from those that were converted.
    """
    conversion = folder_conversion(folder)
    if not folder.is_dir() or not is_conversion(conversion) or any(folder.glob("*.safetensors")):
        return None
    if changed := Manifest.read(conversion).changed_source(folder):
        raise CheckpointError(
            f"{folder / changed} has changed since it was converted; run `flexgen-helm convert {folder}` again"
        )
    return conversion


# ---- the manifest ----


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a conversion. dtype: safetensors' name. size: bytes."""

    dtype: str
    shape: list[int]
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `convert` wrote. Filled by `read`.

    path: the folder.
    origin: for records: the repository and commit, or the source folder's name.
    sources, copied, headers: file name -> SHA-256 of the pickled files, of the small files, and of the header of each
        safetensors file.
    left_out: entries of the source that are not tensors.
    """

    path: Path
    origin: str
    sources: Mapping[str, str]
    copied: Mapping[str, str]
    headers: Mapping[str, str]
    tensors: Mapping[str, TensorRecord]
    left_out: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a conversion's manifest; raises `CheckpointError` if it cannot be used."""
        path = folder / MANIFEST
        content = read_json(path)
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} has the format {content.get('format')!r}, not {FORMAT!r}")
        try:
            tensors = {
                name: TensorRecord(str(entry["dtype"]), entry["shape"], int(entry["bytes"]), str(entry["sha256"]))
                for name, entry in content["tensors"].items()
            }
            sources, copied, headers = (
                {name: str(entry["sha256"]) for name, entry in content[key].items()}
                for key in ("sources", "copied", "shards")
            )
            return cls(folder, content["origin"], sources, copied, headers, tensors, tuple(content["left_out"]))
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is incomplete ({error!r}); run flexgen-helm convert again") from None

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def fingerprint(self) -> str:
        """Identity of the content: every tensor's name, type, shape and hash, the configuration and the tokenizer."""
        tensors = sorted((name, tensor.dtype, tensor.shape, tensor.sha256) for name, tensor in self.tensors.items())
        small = sorted((name, self.copied[name]) for name in (CONFIG, *TOKENIZER_FILES) if name in self.copied)
        return hashlib.sha256(json.dumps([FORMAT, tensors, small]).encode()).hexdigest()

    def changed_source(self, folder: Path) -> str | None:
        """Return a file of the source folder that differs from the converted one, or is new and decides results.

        Deleted files do not matter.
        """
        for name, digest in {**self.sources, **self.copied}.items():
            if (folder / name).is_file() and file_sha256(folder / name) != digest:
                return name
        return next((name for name in SMALL_FILES if name not in self.copied and (folder / name).is_file()), None)


# ---- the check of tensors ----


def header_sha256(file: SourceFile) -> str:
    """Return the SHA-256 of the header of a safetensors file."""
    length = int.from_bytes(file.read(0, 8, "header length"), "little")
    return hashlib.sha256(file.read(0, 8 + length, "header")).hexdigest()


class TensorVerifier:
    """Compares the tensors of a conversion with its manifest, each before it is first used.

    The constructor compares the small files and the shards' headers. `check` hashes a tensor by plain reads, which
    leave it in the page cache for its next reader. Once all tensors that the model uses of a file are verified, this
    is remembered while the file is unchanged.
    """

    def __init__(self, folder: Path, used: Iterable[StoredTensor], believe_memory: bool = True) -> None:
        """used: the tensors that the model uses, possibly repeated."""
        self.manifest = manifest = Manifest.read(folder)
        self._lock = threading.Lock()
        for name, digest in manifest.copied.items():
            _require_equal(folder / name, file_sha256(folder / name), digest)
        self._unverified: dict[SourceFile, set[str]] = {}
        for tensor in used:
            file_name = tensor.file.path.name
            if tensor.name not in manifest.tensors or file_name not in manifest.headers:
                raise CheckpointError(f"{folder / MANIFEST} lacks the tensor {tensor.name} of {file_name}")
            self._unverified.setdefault(tensor.file, set()).add(tensor.name)
        # Remembered with the verified files: other hashes or other tensors are verified again.
        names = sorted(set().union(*self._unverified.values()))
        self._identity = hashlib.sha256(f"{manifest.fingerprint} {names}".encode()).hexdigest()
        for file in list(self._unverified):
            _require_equal(file.path, header_sha256(file), manifest.headers[file.path.name], "the header of ")
            if believe_memory and recall(file.path, MANIFEST, file.stamp) == self._identity:
                del self._unverified[file]

    def check(self, stored: StoredTensor) -> None:
        """Raise `CheckpointError` naming file and tensor if the tensor is not what was converted."""
        file, name = stored.file, stored.name
        with self._lock:
            if name not in self._unverified.get(file, ()):
                return
        digest = hashlib.sha256()
        for start in range(0, stored.size, _TILE_BYTES):
            digest.update(stored.read(start, min(_TILE_BYTES, stored.size - start)))
        _require_equal(file.path, digest.hexdigest(), self.manifest.tensors[name].sha256, f"tensor {name} of ")
        with self._lock:
            unverified = self._unverified.get(file, set())
            unverified.discard(name)
            if not unverified and self._unverified.pop(file, None) is not None:
                remember(file.path, MANIFEST, self._identity, file.stamp)


def _require_equal(path: Path, digest: str, expected: str, what: str = "") -> None:
    if digest != expected:
        raise CheckpointError(
            f"{what}{path} is damaged: its SHA-256 is {digest[:16]}…, but {MANIFEST} says {expected[:16]}…; delete the "
            "folder and run flexgen-helm convert again"
        )
