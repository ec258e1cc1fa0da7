"""Conversions of pickled weights: their folders, their manifest, and the check of their tensors. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.checkpoint.fingerprint import SourceFile, file_sha256, recall, remember
from flexgen_helm.checkpoint.folder import CONFIG, SMALL_FILES, TOKENIZER_FILES, read_json
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import CheckpointError
from flexgen_helm.progress import ProgressPhase, report

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
    if not folder.is_dir() or not is_conversion(conversion) or any(folder.glob("[!.]*.safetensors")):
        return None
    if changed := Manifest.read(conversion).changed_source(folder):
        raise CheckpointError(
            f"{folder / changed} has changed since it was converted; run `flexgen-helm convert {folder}` again"
        )
    return conversion


# ---- the manifest ----


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a conversion. dtype: safetensors' name. offset, size: bytes in the file."""

    dtype: str
    shape: list[int]
    sha256: str
    file: str
    offset: int
    size: int


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
                name: TensorRecord(
                    *(entry[key] for key in ("dtype", "shape", "sha256", "file")),
                    *(int(entry[key]) for key in ("offset", "bytes")),
                )
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


def verify_conversion(folder: Path, files: Iterable[Path], *, hash_again: bool = False) -> Manifest:
    """Compare a conversion with its manifest: small files and headers, and tensors at the first time.

    files: the safetensors files that are used.
    hash_again: compare tensors though their file is as it was when they were compared.

    Raises `CheckpointError` naming the file, and the tensor, that is not what was converted.
    """
    manifest = Manifest.read(folder)
    for name, digest in manifest.copied.items():
        _require_equal(folder / name, file_sha256(folder / name), digest)
    for file in map(SourceFile.open, files):
        name = file.path.name
        if name not in manifest.headers:
            raise CheckpointError(f"{folder / MANIFEST} lacks the file {name}")
        _require_equal(file.path, header_sha256(file), manifest.headers[name], "the header of ")
        if not hash_again and recall(file.path, MANIFEST, file.stamp) == manifest.fingerprint:
            continue
        done = 0
        for tensor_name, tensor in manifest.tensors.items():
            if tensor.file != name:
                continue
            report(ProgressPhase("verify", name, done, file.size))
            hashed = hashlib.sha256()
            for start in range(0, tensor.size, _TILE_BYTES):
                stop_point()
                size = min(_TILE_BYTES, tensor.size - start)
                hashed.update(file.read(tensor.offset + start, size, f"tensor {tensor_name}"))
            _require_equal(file.path, hashed.hexdigest(), tensor.sha256, f"tensor {tensor_name} of ")
            done += tensor.size
        remember(file.path, MANIFEST, manifest.fingerprint, file.stamp)
    return manifest


def _require_equal(path: Path, digest: str, expected: str, what: str = "") -> None:
    if digest != expected:
        raise CheckpointError(
            f"{what}{path} is damaged: its SHA-256 is {digest[:16]}…, but {MANIFEST} says {expected[:16]}…; delete the "
            "folder and run flexgen-helm convert again"
        )
