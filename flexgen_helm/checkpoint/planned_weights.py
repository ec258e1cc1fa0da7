"""What a plan knows of a model before its weights are read: its config, its 16-bit type, and the
formats of its matrices. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flexgen_helm.checkpoint.catalog import HalfType
from flexgen_helm.checkpoint.folder import CONFIG, folder_of, read_config, read_json
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.quantized.config import Quantization, read_quantization
from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import EMBED, HEAD, ModelConfig, expert_of
from flexgen_helm.quant.block_formats import scaled_format
from flexgen_helm.quant.formats import BlockFormat
from flexgen_helm.quant.precisions import Precision, PublishedFormats, precision_named

# Layout or method -> codes, scales, and values of a scale (0: a row) in most of its files; see
# `scaled_format`.
_USUAL_FORMATS = {
    "mxfp4": ("FP4", "F8_E8M0", 32),
    "fp8": ("F8_E4M3", "F32", 128),
    "mxfp8": ("F8_E4M3", "F8_E8M0", 32),
    "fbgemm_fp8": ("F8_E4M3", "F32", 0),
    "float-quantized": ("F8_E4M3", "BF16", 0),
    "int-quantized": ("I8", "BF16", 0),
    "nvfp4-pack-quantized": ("FP4", "F8_E4M3", 16),
    "mxfp4-pack-quantized": ("FP4", "F8_E8M0", 32),
    "bitsandbytes in 4 bits": ("NF4", "F32", 64),
    "bitsandbytes": ("I8", "F32", 0),
}


def read_model_config(
    model: str | os.PathLike[str] | ResolvedModel,
) -> tuple[ModelConfig, HalfType]:
    """Return the model config, and the type in which the weights are stored, without weights: what
    a plan needs.

    Of a .gguf file it is what the header says. Never asks the network.
    Raises `UsageError` for a model that is neither in the catalog nor on this machine.
    """
    resolved = resolve(model)
    if resolved.entry is not None:
        return resolved.entry.config, resolved.entry.default_dtype
    path = resolved.path
    if resolved.hub_repo is not None:
        from flexgen_helm.checkpoint.hub import cached_snapshot

        path = cached_snapshot(resolved.hub_repo, resolved.revision)
    if path is None:
        remedy = (
            f"run: flexgen-helm fetch {resolved.hub_repo}"
            if resolved.hub_repo
            else "name a model that is here"
        )
        raise UsageError(
            f"neither the catalog nor this machine has the sizes of {resolved.name}; {remedy}"
        )
    if resolved.kind == "gguf":
        # Imported late: torch and the gguf package take a second.
        from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint

        checkpoint = GgufCheckpoint(path)
        return checkpoint.config, _half_type(str(checkpoint.storage_dtype))
    _, config, content = read_config(folder_of(path))
    return config, _half_type(content.get("dtype") or content.get("torch_dtype"))


def _half_type(dtype: object) -> HalfType:
    return "bfloat16" if dtype in ("bfloat16", "torch.bfloat16") else "float16"


def planned_precision(model: str | os.PathLike[str] | ResolvedModel, precision: str) -> Precision:
    """Return a precision by its name, with the formats of the matrices that rest as they are
    published.

    Those of a .gguf file are its own, those of other models what `quantization_config` says of all.
    Raises `UsageError` for an unknown precision.
    """
    resolved = resolve(model)
    named = precision_named(precision)
    if resolved.kind == "gguf" and resolved.path is not None:
        from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint

        return replace(named, published=GgufCheckpoint(resolved.path).published_formats)
    quantization = _quantization(resolved)
    if quantization is None:
        return named
    return replace(named, published=_planned_formats(read_model_config(resolved)[0], quantization))


def quantized_by(model: str | os.PathLike[str]) -> str | None:
    """Return the method by which a catalog model's or a local folder's weights are quantized; None
    for all others.
    """
    quantization = _quantization(resolve(model))
    return None if quantization is None else quantization.method


def _quantization(resolved: ResolvedModel) -> Quantization | None:
    path = Path(CONFIG)
    if resolved.entry is not None:
        content = resolved.entry.published
    elif resolved.path is not None and resolved.kind == "folder":
        path = folder_of(resolved.path) / CONFIG
        content = read_json(path)
    else:
        return None
    return read_quantization(content, path)


@lru_cache(maxsize=2)  # the precisions of a model share them
def _planned_formats(config: ModelConfig, quantization: Quantization) -> PublishedFormats:
    """Return the formats of a model's matrices, of which `quantization` names those that are plain.

    Layers of one kind have the same formats but for that, so one layer of each kind is looked at.
    """
    of_stages = {
        first: _formats_of_stage(config, quantization, first)
        for first in {*config.first_stages.values()} - {EMBED, HEAD}
    }
    formats = {
        stage + name: fmt
        for stage, first in config.first_stages.items()
        for name, fmt in of_stages.get(first, {}).items()
        if not quantization.ignored or not _is_ignored(stage + name, quantization.ignored)
    }
    return PublishedFormats(formats, bool(formats), are_alike=not quantization.ignored)


def _formats_of_stage(
    config: ModelConfig, quantization: Quantization, stage: str
) -> dict[str, BlockFormat]:
    """Return name within the stage -> format of its matrices, as if none were ignored."""
    return {
        name.removeprefix(stage): fmt
        for name, shape in config.stage_tensors(stage)
        if len(shape) == 2
        and not name.endswith(".router.weight")
        and (quantization.method != "mxfp4" or expert_of(name))
        and (fmt := _planned_format(quantization, shape[1])) is not None
    }


def _planned_format(quantization: Quantization, width: int) -> BlockFormat | None:
    """Return the format of rows of a width in most files of this kind; None if they do not rest as
    published.
    """
    usual = _USUAL_FORMATS.get(quantization.layout or quantization.method)
    if usual is None and quantization.bits and not quantization.act_order:
        usual = f"U{quantization.bits}", "F16", 0
    if usual is None:
        return None
    codes, scale, group_size = usual
    symmetric = quantization.symmetric
    fmt = scaled_format(
        codes,
        scale,
        width,
        (*quantization.group_sizes, group_size)[0] or width,
        # GPTQ and AWQ store zero points unless `sym` says that there are none, others if they must.
        has_zero=not symmetric if quantization.method in ("gptq", "awq") else symmetric is False,
        is_divided=scale == "F8_E4M3",
    )
    return fmt if fmt is not None and fmt.has_loop else None


def _is_ignored(name: str, ignored: Iterable[str]) -> bool:
    """Whether entries of `Quantization.ignored` name a matrix; 're:' begins a pattern."""
    module = f"model.{name.replace('.attn.', '.self_attn.').removesuffix('.weight')}"
    return any(
        re.match(entry[3:], module) if entry.startswith("re:") else entry == module
        for entry in ignored
    )
