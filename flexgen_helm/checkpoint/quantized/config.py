"""What `quantization_config` in a `config.json` says: which method, and what the stored tensors do
not. No torch.

The stored tensors decide which modules are quantized: what `modules_to_not_convert` or `ignore`
exclude is plain there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.block_formats import scaled_format
from flexgen_helm.quant.formats import BlockFormat

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
    symmetric: zero points are all 2 ** (bits - 1); False if they must be stored; None if unknown.
    act_order: groups are of inputs in an order of their own, so that a g_idx must be stored; None
        if unknown.
    ignored: modules that are plain: names, or after 're:' what they begin with; for plans.
    layout: how a method with several stores weights; for plans.
    """

    method: str
    dtype: str
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    group_sizes: tuple[int, ...] = ()
    bits: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    ignored: tuple[str, ...] = ()
    layout: str = ""

    def planned_format(self, width: int) -> BlockFormat | None:
        """Return the format of rows of a width in most files of this kind, if they rest as
        published.
        """
        planned = _PLANNED.get(self.layout or self.method)
        if planned is None and self.bits and not self.act_order:
            planned = f"U{self.bits}", "F16", 0
        if planned is None:
            return None
        codes, scale, shared = planned
        is_stored = self.symmetric is False or (
            self.method in ("gptq", "awq") and not self.symmetric
        )
        shared = (*self.group_sizes, shared)[0] or width
        fmt = scaled_format(
            codes, scale, width, shared, has_zero=is_stored, is_divided=scale == "F8_E4M3"
        )
        return fmt if fmt is not None and fmt.has_loop else None

    @property
    def title(self) -> str:
        return self.method + (f" {self.bits}-bit" if self.bits else "")


# Codes, scales, and values of a scale (0: a row) in most files; see `scaled_format`.
_PLANNED = {
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


def read_quantization(content: Mapping[str, Any], path: Path) -> Quantization | None:
    """Return the quantization that the content of `path` describes, or None.

    Raises `CheckpointError` with the reason if its weights cannot be read, or if nobody here knows
    an entry.
    """
    text = content.get("text_config")
    owners = [content, text] if isinstance(text, Mapping) else [content]
    keys = ("quantization_config", "quantization")  # MLX writes the second, or both
    entry = next((owner[key] for owner in owners for key in keys if owner.get(key)), None)
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{path}: quantization_config must be an object, not {entry!r}")
    settings = _Settings(entry)
    method = _method(settings)
    if method not in METHODS:
        reason = _UNSUPPORTED.get(method, f"supported are {', '.join(METHODS)}")
        raise CheckpointError(
            f"{path}: weights quantized by {method} cannot be read ({reason}); use the original"
        )
    dtypes = (str(owner.get("dtype") or owner.get("torch_dtype")) for owner in owners)
    dtype = next((HALF_TYPES[name] for name in dtypes if name in HALF_TYPES), "BF16")
    try:
        options = METHODS[method](settings)
        _require_known(settings, method)
    except _UnsupportedError as error:
        raise CheckpointError(
            f"{path}: {error}, which cannot be read; use the original checkpoint"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: quantization_config of {method} is damaged ({error!r})"
        ) from error
    bits = settings.get("bits") or (4 if settings.get("load_in_4bit") else None)
    return Quantization(method, dtype, **{"bits": bits, **options})


def _method(settings: _Settings) -> str:
    method = str(settings.get("quant_method", "an unnamed method (as in folders of MLX)"))
    # Early files of bitsandbytes name no method.
    return (
        "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else method
    )


class _UnsupportedError(Exception):
    """Says which variant of a method is not supported."""


_USUAL = {"data_type": "int", "pack_dtype": "int32"}


class _Settings(dict[str, Any]):
    """Settings that note which of them nothing has read yet; null, false, empty and usual ones ask
    for nothing.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.unread = {
            key
            for key, value in content.items()
            if value not in (None, False, "", [], {}, _USUAL.get(key))
        }

    def get(self, key: str, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().get(key, default)


# Keys that change no weight, by the reason.
_NO_CHANGE = {
    "how codes and scales were found": """act_group_aware amp autoround_version batch_size
        block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
        enable_minmax_tuning enable_quanted_input global_compression_ratio gradient_accumulate_steps
        iters low_gpu_mem_usage lr max_input_length meta minmax_lr model_file_base_name
        model_name_or_path model_seqlen module_name_preceding_first_block mse nsamples observer
        observer_kwargs pad_token_id provider scale_fmt seqlen static_groups tokenizer
        true_sequential version""",
    "how other programs compute": """backend bnb_4bit_compute_dtype dequantize disable_exllama
        exllama_config llm_int8_enable_fp32_cpu_offload llm_int8_threshold pack_impl run_compressed
        use_cuda_fp16 use_exllama use_optimized_inference""",
    "activations and caches, which are not quantized here": """act_bits act_data_type act_dynamic
        act_group_size act_sym activation_scale_ub activation_scheme input_activations
        kv_cache_dtype kv_cache_scheme output_activations""",
    "the stored tensors' names, types and shapes say it": """_load_in_4bit _load_in_8bit bits
        bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant expert_dtype fmt ignore
        ignored_layers lm_head llm_int8_has_fp16_weight llm_int8_skip_modules method
        modules_in_block_to_quantize modules_to_convert modules_to_not_convert num_bits
        quant_block_list quantization_status scale_dtype strategy sym targets to_quant_block_names
        type zp_dtype""",
}


def _require_known(settings: _Settings, method: str) -> None:
    """Refuse settings of which nothing is known here, once all others have been read."""
    if unknown := sorted(
        settings.unread - {key for keys in _NO_CHANGE.values() for key in keys.split()}
    ):
        named = ", ".join(f"{key} {settings[key]!r:.60}" for key in unknown[:4])
        raise _UnsupportedError(f"{method} weights have settings that are not known here ({named})")


def _agreed(cases: Iterable[_Settings], key: str) -> Any:
    """Return a setting that all cases agree in that have it, else None."""
    values = {case.get(key) for case in cases if key in case}
    return values.pop() if len(values) == 1 else None


def _require(key: str, value: Any, supported: tuple[Any, ...], method: str) -> None:
    if value not in supported:
        raise _UnsupportedError(f"{method} weights have {key} {value!r}")


def _no_options(settings: _Settings) -> dict[str, Any]:
    return {}


def _fp8_options(settings: _Settings) -> dict[str, Any]:
    block = settings.get("weight_block_size")
    return {"block": None if block is None else _block(block)}


def _block(sizes: Any) -> tuple[int, int]:
    rows, columns = (int(size) for size in (sizes.split("x") if isinstance(sizes, str) else sizes))
    if min(rows, columns) < 1:
        raise ValueError(f"a block of {rows} x {columns}")
    return rows, columns


def _gptq_options(settings: _Settings) -> dict[str, Any]:
    formats = {settings.get("checkpoint_format"), settings.get("format")} - {None} or {"gptq"}
    fmt = " and ".join(sorted(formats))
    _require("format", fmt, ("gptq", "gptq_v2"), "gptq")
    # for some of the modules
    rules = [_Settings(rule or {}) for rule in (settings.get("dynamic") or {}).values()]
    cases = [settings, *rules]
    options = {
        # The first version of the format stores zero points less one.
        "zero_offset": 1 if fmt == "gptq" else 0,
        "group_sizes": _group_sizes(cases),
        "symmetric": _agreed(cases, "sym"),
        "act_order": _agreed(cases, "desc_act"),
        "ignored": tuple(
            f"re:{key[2:]}" for key in settings.get("dynamic") or () if key.startswith("-:")
        ),
    }
    for rule in rules:
        _require_known(rule, "gptq")
    return options


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the sizes that are given; -1 and nothing mean one group of all inputs, which shapes
    say too.
    """
    sizes = (int(group.get("group_size") or -1) for group in groups)
    return tuple(size for size in sizes if size > 0)


def _awq_options(settings: _Settings) -> dict[str, Any]:
    for key in ("version", "format", "checkpoint_format"):
        _require(key, str(settings.get(key) or "gemm").lower(), ("gemm",), "awq")
    if settings.get("backend") == "llm-awq":
        raise _UnsupportedError("awq weights are in the layout of llm-awq")
    for key, value in (("bits", 4), ("w_bit", 4), ("zero_point", True)):
        _require(key, settings.get(key, value), (value,), "awq")
    early = {"group_size": settings.get("q_group_size")}
    plain = (
        f"re:.*{re.escape(str(name))}" for name in settings.get("modules_to_not_convert") or ()
    )
    return {"group_sizes": _group_sizes([settings, early]), "ignored": tuple(plain)}


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


def _compressed_options(settings: _Settings) -> dict[str, Any]:
    groups = [_Settings(group) for group in (settings.get("config_groups") or {}).values()]
    formats = {settings.get("format"), *(group.get("format") for group in groups)}
    for fmt in formats:
        _require("format", fmt or "dense", _COMPRESSED_FORMATS, "compressed-tensors")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    _require("sparsity", sparsity, ("dense",), "compressed-tensors")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _UnsupportedError("compressed-tensors weights are rotated (transform_config)")
    weights = [_Settings(group.get("weights") or {}) for group in groups]
    blocks = {
        _block(weight["block_structure"]) for weight in weights if weight.get("block_structure")
    }
    group_sizes = _group_sizes(weights)
    if len(blocks) > 1 or (blocks and group_sizes):
        raise _UnsupportedError(
            "compressed-tensors weights are divided in several ways (block_structure, group_size)"
        )
    options = {
        "block": next(iter(blocks), None),
        "group_sizes": group_sizes,
        "symmetric": _agreed(weights, "symmetric"),
        # Where only weights are sorted ('weight', 'static'), groups are of inputs in order.
        "act_order": _agreed(weights, "actorder") in (True, "group", "dynamic") or None,
        "ignored": tuple(map(str, settings.get("ignore") or ())),
        "layout": next(iter(formats - {None}), "") if len(formats - {None}) == 1 else "",
        "bits": _agreed(weights, "num_bits") if formats <= {"pack-quantized", None} else None,
    }
    for part in (*groups, *weights):
        _require_known(part, "compressed-tensors")
    return options


def _bitsandbytes_options(settings: _Settings) -> dict[str, Any]:
    return {"layout": "bitsandbytes in 4 bits" if settings.get("load_in_4bit") else ""}


# Method -> reader of what `Quantization` needs of its settings.
METHODS: Mapping[str, Callable[[_Settings], dict[str, Any]]] = {
    "mxfp4": _no_options,
    "fp8": _fp8_options,
    "mxfp8": _fp8_options,
    "fbgemm_fp8": _no_options,
    "gptq": _gptq_options,
    "awq": _awq_options,
    "compressed-tensors": _compressed_options,
    "bitsandbytes": _bitsandbytes_options,
}
_CODEBOOKS = "its code books need the kernels of its own package"
_UNSUPPORTED = {
    "metal": "its layout is of Apple's framework alone",
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
    "auto-round": (
        "its packing differs from version to version; export it in the format auto_gptq or auto_awq"
    ),
    "modelopt": "its layout is not described in transformers; take the compressed-tensors version",
}
