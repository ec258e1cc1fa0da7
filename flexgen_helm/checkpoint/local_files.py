"""A model's files on this machine: which they are, where from, and what they hold. No torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.fetch import GGUF_NAME, GGUF_SIZE, WHEEL
from flexgen_helm.checkpoint.fingerprint import (
    content_fingerprint,
    is_quick_to_hash,
    snapshot_fingerprint,
)
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    folder_of,
    gguf_parts,
    identity_files,
    read_config,
    read_json,
    weight_files,
)
from flexgen_helm.checkpoint.hub import cached_snapshot
from flexgen_helm.checkpoint.manifest import Manifest, conversion_of, is_conversion
from flexgen_helm.checkpoint.names import ResolvedModel
from flexgen_helm.checkpoint.quantized.config import read_quantization
from flexgen_helm.checkpoint.stored_tensors import join_headers, read_header
from flexgen_helm.paths import state_dir


def local_weights(model: ResolvedModel) -> Path | None:
    """Return the folder or file with a model's weights; None if they must be fetched first.

    Never asks the network. Raises `CheckpointError` for a local folder without usable weights.
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
    """Return the fingerprint of a hub snapshot; None where the content is hashed.

    path: what `fetch` returned.
    """
    if model.hub_repo is None or is_conversion(path):
        return None
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    return snapshot_fingerprint(model.hub_repo, path.name, sizes)


def quick_fingerprint(model: ResolvedModel, path: Path) -> str | None:
    """Return the fingerprint of weights that our own decoder computes with, without opening them.

    None where they must be opened: large files were not hashed before, modules of `transformers`
    compute the model, or the files are a conversion, which is compared with its manifest.
    path: what `fetch` returned.
    """
    folder = folder_of(path)
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if not is_gguf and (is_conversion(folder) or read_config(folder).config.values_digest):
        return None
    if (snapshot := snapshot_fingerprint_of(model, path)) is not None:
        return snapshot
    files = gguf_parts(path) if is_gguf else identity_files(path)
    return content_fingerprint(files) if all(map(is_quick_to_hash, files)) else None


def origin_of(model: ResolvedModel, path: Path) -> str:
    """Return where weights are from, for records.

    That is 'org/repo@commit', the wheel, or the source folder or file.
    path: what `fetch` returned.
    """
    if model.kind == "wheel":
        return WHEEL
    if model.hub_repo is not None:
        return f"{model.hub_repo}@{path.name}"
    return Manifest.read(path).origin if is_conversion(path) else str(path.resolve())


def bytes_by_type(path: Path) -> dict[str, int]:
    """Return stored type -> bytes of the tensors of a model's files; headers alone are read.

    Codes of another tool have its name for their type. path: what `fetch` returned.
    """
    sizes: Counter[str] = Counter()
    quantized_by = ""
    if path.suffix == ".gguf":
        # Imported late: the gguf package takes half a second.
        from flexgen_helm.checkpoint.gguf_header import read_gguf_header

        headers = [read_gguf_header(part).tensors for part in gguf_parts(path)]
    else:
        headers = list(map(read_header, [path] if path.is_file() else weight_files(path)))
        config = folder_of(path) / CONFIG
        if quantization := read_quantization(read_json(config), config):
            quantized_by = quantization.title
    for tensor in join_headers(headers).values():
        is_code = quantized_by and tensor.dtype[0] in "IU"  # integers are another tool's codes
        sizes[quantized_by if is_code else tensor.dtype] += tensor.size
    return dict(sizes)
