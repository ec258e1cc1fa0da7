"""What `quantization_config` in a `config.json` says: which method, and what the stored tensors do not. No torch.

The stored tensors decide which modules are quantized: what `modules_to_not_convert` or `ignore` exclude is plain there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.errors import CheckpointError

HALF_TYPES = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    method: a key of `METHODS`.
    dtype: safetensors' name of the 16-bit type for weights whose scales are not of a 16-bit type.
    block: rows and columns that share a scale, the last ones cut off; None if shapes say it.
    zero_offset: what is added to a stored zero point.
    group_sizes: numbers of inputs that share a scale, the last ones cut off.
    bits: of a code, where the method does not say it.
    """

    method: str
    dtype: str
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    group_sizes: tuple[int, ...] = ()
    bits: int | None = None

    @property
    def title(self) -> str:
        return self.method + (f" {self.bits}-bit" if self.bits else "")


def read_quantization(content: Mapping[str, Any], path: Path) -> Quantization | None:
    """Return the quantization that the content of `path` describes, or None.

    Raises `CheckpointError` with the reason if its weights cannot be read.
    """
    text = content.get("text_config")
    owners = [content, text] if isinstance(text, Mapping) else [content]
    settings = next((owner["quantization_config"] for owner in owners if owner.get("quantization_config")), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{path}: quantization_config must be an object, not {settings!r}")
    method = _method(settings)
    if method not in METHODS:
        reason = _UNSUPPORTED.get(method, f"supported are {', '.join(METHODS)}")
        raise CheckpointError(f"{path}: weights quantized by {method} cannot be read ({reason}); use the original")
    dtypes = (str(owner.get("dtype") or owner.get("torch_dtype")) for owner in owners)
    dtype = next((HALF_TYPES[name] for name in dtypes if name in HALF_TYPES), "BF16")
    try:
        options = METHODS[method](settings)
    except _UnsupportedError as error:
        raise CheckpointError(f"{path}: {error}, which cannot be read; use the original checkpoint") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: quantization_config of {method} is damaged ({error!r})") from error
    bits = settings.get("bits") or (4 if settings.get("load_in_4bit") else None)
    return Quantization(method, dtype, bits=bits, **options)


def _method(settings: Mapping[str, Any]) -> str:
    # Early files of bitsandbytes name no method.
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method", "an unnamed method"))


class _UnsupportedError(Exception):
    """Says which variant of a method is not supported."""


def _require(key: str, value: Any, supported: tuple[Any, ...], method: str) -> None:
    if value not in supported:
        raise _UnsupportedError(f"{method} weights have {key} {value!r}")


def _no_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _fp8_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    block = settings.get("weight_block_size")
    return {"block": None if block is None else _block(block)}


def _block(sizes: Any) -> tuple[int, int]:
    rows, columns = (int(size) for size in sizes)
    if min(rows, columns) < 1:
        raise ValueError(f"a block of {rows} x {columns}")
    return rows, columns


def _gptq_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    fmt = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _require("format", fmt, ("gptq", "gptq_v2"), "gptq")
    _require("is_marlin_format", bool(settings.get("is_marlin_format")), (False,), "gptq")
    # The first version of the format stores zero points less one.
    return {"zero_offset": 1 if fmt == "gptq" else 0, "group_sizes": _group_sizes([settings])}


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the sizes that are given; -1 and nothing mean one group of all inputs, which shapes say too."""
    sizes = (int(group.get("group_size") or -1) for group in groups)
    return tuple(size for size in sizes if size > 0)


def _awq_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    fmt = str(settings.get("version") or settings.get("format") or "gemm").lower()
    _require("version", fmt, ("gemm",), "awq")
    if settings.get("backend") == "llm-awq":
        raise _UnsupportedError("awq weights are in the layout of llm-awq")
    _require("bits", settings.get("bits", settings.get("w_bit", 4)), (4,), "awq")
    _require("zero_point", settings.get("zero_point", True), (True,), "awq")
    return {"group_sizes": _group_sizes([settings])}


_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)


def _compressed_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    groups = list((settings.get("config_groups") or {}).values())
    for fmt in (settings.get("format"), *(group.get("format") for group in groups)):
        _require("format", fmt or "dense", _COMPRESSED_FORMATS, "compressed-tensors")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    _require("sparsity", sparsity, ("dense",), "compressed-tensors")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _UnsupportedError("compressed-tensors weights are rotated (transform_config)")
    weights = [group.get("weights") or {} for group in groups]
    blocks = {_block(settings["block_structure"]) for settings in weights if settings.get("block_structure")}
    group_sizes = _group_sizes(weights)
    if len(blocks) > 1 or (blocks and group_sizes):
        raise _UnsupportedError("compressed-tensors weights are divided in several ways (block_structure, group_size)")
    return {"block": next(iter(blocks), None), "group_sizes": group_sizes}


# Method -> reader of what `Quantization` needs of its settings.
METHODS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "mxfp4": _no_options,
    "fp8": _fp8_options,
    "mxfp8": _fp8_options,
    "fbgemm_fp8": _no_options,
    "gptq": _gptq_options,
    "awq": _awq_options,
    "compressed-tensors": _compressed_options,
    "bitsandbytes": _no_options,
}
_CODEBOOKS = "its code books need the kernels of its own package"
_UNSUPPORTED = {
    "aqlm": _CODEBOOKS,
    "vptq": _CODEBOOKS,
    "higgs": _CODEBOOKS,
    "spqr": "its sparse outliers need the kernels of its own package",
    "eetq": "its int8 layout is permuted for one kind of GPU",
    "hqq": "its layout is described by its own package only",
    "quanto": "its layout is described by its own package only",
    "torchao": "its tensors are serialized objects of its own package",
    "bitnet": "its activations must be quantized too",
    "fp_quant": "its weights are rotated",
    "auto-round": "its packing differs from version to version; export it in the format auto_gptq or auto_awq",
    "modelopt": "its layout is not described in transformers; take the compressed-tensors version",
}
