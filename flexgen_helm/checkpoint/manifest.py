"""Conversions of pickled weights: their folders, their manifest, and the check of their files. No
torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.checkpoint.fingerprint import file_sha256, forget_hash
from flexgen_helm.checkpoint.folder import CONFIG, SMALL_FILES, TOKENIZER_FILES, read_json
from flexgen_helm.errors import CheckpointError
from flexgen_helm.paths import state_dir

MANIFEST = "flexgen_conversion.json"
FORMAT = "flexgen_helm conversion 2"


# ---- where conversions are ----


def hub_conversion(repo: str, commit: str) -> Path:
    """Return the folder of the conversion of a hub repository at a commit, whether or not there is
    one.
    """
    return state_dir() / "converted" / repo.replace("/", "--") / commit


def folder_conversion(folder: Path) -> Path:
    """Return the folder of the conversion of a local folder, whether or not there is one."""
    real = folder.resolve()
    return (
        state_dir()
        / "converted"
        / "local"
        / f"{real.name}-{hashlib.sha256(str(real).encode()).hexdigest()[:12]}"
    )


def is_conversion(folder: Path) -> bool:
    """Whether this is a complete conversion: its manifest appears with the whole folder, in one
    step.
    """
    return (folder / MANIFEST).is_file()


def conversion_of(folder: Path) -> Path | None:
    """Return the conversion of a local folder that has no safetensors of its own; None if there is
    none.

    Raises `CheckpointError` if the folder's files differ from those that were converted.
    """
    conversion = folder_conversion(folder)
    if (
        not folder.is_dir()
        or not is_conversion(conversion)
        or any(folder.glob("[!.]*.safetensors"))
    ):
        return None
    if changed := Manifest.read(conversion).changed_source(folder):
        raise CheckpointError(
            f"{folder / changed} has changed since it was converted; run `flexgen-helm convert "
            f"{folder}` again"
        )
    return conversion


# ---- the manifest ----


@dataclass(frozen=True)
class Manifest:
    """What `convert` wrote. Filled by `read`.

    path: the folder.
    origin: for records: the repository and commit, or the source folder's name.
    sources, copied, shards: file name -> SHA-256 of the pickled files, of the small files, and of
        the safetensors files.
    tensors, size: their number, and bytes of all.
    left_out: entries of the source that are not tensors.
    """

    path: Path
    origin: str
    sources: Mapping[str, str]
    copied: Mapping[str, str]
    shards: Mapping[str, str]
    tensors: int
    size: int
    left_out: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a conversion's manifest; raises `CheckpointError` if it cannot be used."""
        path = folder / MANIFEST
        content = read_json(path)
        if content.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} is of another version; run flexgen-helm convert again")
        try:
            sources, copied, shards = (
                {str(name): str(digest) for name, digest in content.pop(key).items()}
                for key in ("sources", "copied", "shards")
            )
            left_out = tuple(content.pop("left_out"))
            return cls(
                path=folder,
                sources=sources,
                copied=copied,
                shards=shards,
                left_out=left_out,
                **content,
            )
        except (AttributeError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path} is incomplete ({error!r}); run flexgen-helm convert again"
            ) from None

    @property
    def fingerprint(self) -> str:
        """Identity of the content: the weights, the configuration and the tokenizer."""
        names = (*self.shards, CONFIG, *TOKENIZER_FILES)
        digests = sorted(
            (name, digest)
            for name, digest in {**self.shards, **self.copied}.items()
            if name in names
        )
        return hashlib.sha256(json.dumps([FORMAT, digests]).encode()).hexdigest()

    def changed_source(self, folder: Path) -> str | None:
        """Return a file of the source folder that differs from the converted one, or is new and
        decides results.

        Deleted files do not matter.
        """
        for name, digest in {**self.sources, **self.copied}.items():
            if (folder / name).is_file() and file_sha256(folder / name) != digest:
                return name
        return next(
            (name for name in SMALL_FILES if name not in self.copied and (folder / name).is_file()),
            None,
        )


# ---- the check of files ----


def verify_conversion(folder: Path, files: Iterable[Path], *, hash_again: bool = False) -> Manifest:
    """Compare a conversion's files with its manifest: those of weights are hashed at the first
    time.

    files: the safetensors files that are used.
    hash_again: hash them though they are as they were when they were compared.

    Raises `CheckpointError` naming the file that is not what was converted.
    """
    manifest = Manifest.read(folder)
    expected = {**manifest.copied, **manifest.shards}
    for path in (*(folder / name for name in manifest.copied), *files):
        if path.name not in expected:
            raise CheckpointError(f"{folder / MANIFEST} lacks the file {path.name}")
        if hash_again:
            forget_hash(path)
        if (digest := file_sha256(path)) != expected[path.name]:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is {digest[:16]}…, but {MANIFEST} says "
                f"{expected[path.name][:16]}…; delete the folder and run flexgen-helm convert again"
            )
    return manifest
