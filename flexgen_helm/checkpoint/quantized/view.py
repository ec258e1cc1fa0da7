"""The tensors of a model as if they had never been quantized: stored sets -> one logical tensor each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.checkpoint.quantized.config import Quantization
from flexgen_helm.checkpoint.quantized.logical_tensor import LogicalTensor, PlainTensor
from flexgen_helm.checkpoint.quantized.scaled import (
    AwqTensor,
    GptqTensor,
    PackedTensor,
    ScaledTensor,
    TableTensor,
    TransposedTensor,
)
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError

# Of activations and caches, which are not quantized here.
_UNUSED = (
    ".activation_scale",
    ".input_activation_scale",
    ".input_global_scale",
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".k_scale",
    ".output_scale",
    ".qscale_act",
    ".q_scale",
    ".v_scale",
    ".weight_format",
)
_FP8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class QuantizedGroup:
    """Stored tensors that are one matrix of the model. first: the tensor whose name or type announces it."""

    first: StoredTensor
    stored: Mapping[str, StoredTensor]
    quantization: Quantization

    def stem(self, ending: str) -> str | None:
        """Return the first tensor's name without its ending, or None if it has another."""
        return self.first.name.removesuffix(ending) if self.first.name.endswith(ending) else None

    def part(self, *names: str) -> StoredTensor:
        """Return the first tensor that exists of these; raises `CheckpointError` if none does."""
        part = self.optional(*names)
        if part is None:
            raise CheckpointError(f"{self.first.title} is quantized, but its {names[0]} is missing; fetch it again")
        return part

    def optional(self, *names: str) -> StoredTensor | None:
        return next((self.stored[name] for name in names if name in self.stored), None)


def logical_tensors(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, path: Path
) -> dict[str, LogicalTensor]:
    """Return name -> tensor of the model, in the stored order; without `quantization` all are plain.

    Raises `CheckpointError` for a set that is incomplete or has shapes or types that do not fit.
    """
    if quantization is None:
        return {name: PlainTensor(tensor) for name, tensor in stored.items()}
    read_set = _READERS[quantization.method]
    quantized = [
        tensor
        for first in stored.values()
        if (tensor := read_set(QuantizedGroup(first, stored, quantization))) is not None
    ]
    parts = {part.name for tensor in quantized for part in tensor.parts}
    plain = [PlainTensor(t) for name, t in stored.items() if name not in parts and not name.endswith(_UNUSED)]
    tensors: dict[str, LogicalTensor] = {}
    for tensor in (*plain, *quantized):
        if tensor.name in tensors:
            raise CheckpointError(f"{path} has {tensor.name} twice: plain, and quantized in {tensor.title}")
        tensors[tensor.name] = tensor
    return tensors


def _mxfp4(group: QuantizedGroup) -> LogicalTensor | None:
    """gpt-oss: x_blocks [expert, out, groups, 16 bytes] and x_scales [expert, out, groups] are x [expert, in, out]."""
    stem = group.stem("_blocks")
    if stem is None:
        return None
    blocks, scales = group.first, group.part(f"{stem}_scales")
    if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[:-1] != scales.shape:
        raise CheckpointError(
            f"{blocks.title} has {blocks.dtype} {list(blocks.shape)}, which does not fit scales of {list(scales.shape)}"
        )
    *leading, groups, num_bytes = blocks.shape
    flat = StoredTensor(
        blocks.file, blocks.name, blocks.dtype, (*leading, groups * num_bytes), blocks.offset, blocks.size
    )
    return TransposedTensor(ScaledTensor(stem, flat, scales, group.quantization.dtype, fp4=True))


def _fp8(group: QuantizedGroup) -> LogicalTensor | None:
    """x in FP8 with x_scale_inv or x_scale, which both multiply; FP4 experts are I8 with scales of bytes."""
    codes, quantization = group.first, group.quantization
    if codes.dtype not in (*_FP8, "I8") or codes.name.endswith(("_scale_inv", ".scale", "_scale")):
        return None
    stem = codes.name.removesuffix(".weight")
    scale = group.part(f"{codes.name}_scale_inv", f"{codes.name}_scale", f"{stem}.scale", f"{stem}.qscale_weight")
    fp4 = codes.dtype == "I8"
    return ScaledTensor(codes.name, codes, scale, quantization.dtype, fp4=fp4, block=quantization.block)


def _packed_stem(group: QuantizedGroup) -> str | None:
    """Return x of x.qweight, or None. Raises `CheckpointError` for scales without weights: AWQ's of activations."""
    owner = group.stem(".scales")
    if owner is not None and group.optional(f"{owner}.qweight") is None:
        raise CheckpointError(f"{group.first.title} has no {owner}.qweight; scales of activations cannot be used")
    return group.stem(".qweight")


def _gptq(group: QuantizedGroup) -> LogicalTensor | None:
    stem = _packed_stem(group)
    if stem is None:
        return None
    qzeros, scales, g_idx = group.part(f"{stem}.qzeros"), group.part(f"{stem}.scales"), group.optional(f"{stem}.g_idx")
    quantization = group.quantization
    return GptqTensor(
        f"{stem}.weight",
        group.first,
        qzeros,
        scales,
        g_idx,
        quantization.dtype,
        quantization.zero_offset,
        quantization.group_sizes,
    )


def _awq(group: QuantizedGroup) -> LogicalTensor | None:
    stem = _packed_stem(group)
    if stem is None:
        return None
    qzeros, scales = group.part(f"{stem}.qzeros"), group.part(f"{stem}.scales")
    return AwqTensor(
        f"{stem}.weight", group.first, qzeros, scales, group.quantization.dtype, group.quantization.group_sizes
    )


def _compressed(group: QuantizedGroup) -> LogicalTensor | None:
    """compressed-tensors: weight_packed in words is integers, in bytes FP4; weight in one byte is FP8 or INT8."""
    first, dtype = group.first, group.quantization.dtype
    stem = group.stem(".weight_packed")
    if stem is None:
        return _compressed_bytes(group)
    name, scale = f"{stem}.weight", group.part(f"{stem}.weight_scale")
    if first.dtype == "U8":
        global_scale = group.part(f"{stem}.weight_global_scale") if scale.dtype == "F8_E4M3" else None
        return ScaledTensor(name, first, scale, dtype, fp4=True, global_scale=global_scale)
    shape = group.part(f"{stem}.weight_shape")
    zero_point, g_idx = group.optional(f"{stem}.weight_zero_point"), group.optional(f"{stem}.weight_g_idx")
    return PackedTensor(name, first, scale, shape, zero_point, g_idx, dtype, group.quantization.group_sizes)


def _compressed_bytes(group: QuantizedGroup) -> LogicalTensor | None:
    codes, quantization = group.first, group.quantization
    if codes.dtype not in (*_FP8, "I8") or not codes.name.endswith("weight"):
        return None
    scale, zero_point = group.part(f"{codes.name}_scale"), group.optional(f"{codes.name}_zero_point")
    block = quantization.block or next(((1, size) for size in quantization.group_sizes), None)
    return ScaledTensor(codes.name, codes, scale, quantization.dtype, block=block, zero_point=zero_point)


def _bitsandbytes(group: QuantizedGroup) -> LogicalTensor | None:
    """Linear layers as x.weight: int8 with x.SCB, or 4 bits with x.weight.absmax and more."""
    name, dtype = group.first.name, group.quantization.dtype
    stem = group.stem(".weight")
    if stem is None:
        return None
    if group.first.dtype == "I8":
        return ScaledTensor(name, group.first, group.part(f"{stem}.SCB"), dtype, factor=1 / 127)
    states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    if group.first.dtype != "U8" and group.optional(*states) is None:
        return None
    state, absmax = group.part(*states), group.part(f"{name}.absmax")
    nested = None
    if absmax.dtype == "U8":
        nested = group.part(f"{name}.nested_quant_map"), group.part(f"{name}.nested_absmax")
    return TableTensor(name, group.first, absmax, group.part(f"{name}.quant_map"), state, nested, dtype)


_READERS: Mapping[str, Callable[[QuantizedGroup], LogicalTensor | None]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
