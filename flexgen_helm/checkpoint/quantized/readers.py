"""The tensors of a model as if they had never been quantized: the stored tensors of each quantized
matrix become one logical tensor, by the reader of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flexgen_helm.checkpoint.logical_tensor import LogicalTensor, plain_tensor
from flexgen_helm.checkpoint.quantized.bitsandbytes import bitsandbytes
from flexgen_helm.checkpoint.quantized.config import Quantization
from flexgen_helm.checkpoint.quantized.integers import awq, gptq, packed_integers
from flexgen_helm.checkpoint.quantized.matrix import FP8, QuantizedMatrix
from flexgen_helm.checkpoint.quantized.scaled import Scaling, fp4, fp8, mxfp4, scaled
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


def logical_tensors(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, path: Path
) -> dict[str, LogicalTensor]:
    """Return name -> tensor of the model, in the stored order; without `quantization` all are
    plain.

    Raises `CheckpointError` for a matrix of which a tensor is missing, or has a shape or type that
    does not fit.
    """
    if quantization is None:
        return {name: plain_tensor(tensor) for name, tensor in stored.items()}
    # Each stored tensor may begin a matrix; of those that do not, a reader returns None.
    reader = _READERS[quantization.method]
    matrices = (QuantizedMatrix(first, stored, quantization) for first in stored.values())
    quantized = [tensor for tensor in map(reader, matrices) if tensor is not None]
    parts = {part.name for tensor in quantized for part in tensor.parts}
    plain = [
        plain_tensor(tensor)
        for name, tensor in stored.items()
        if name not in parts and not name.endswith(_UNUSED)
    ]
    tensors: dict[str, LogicalTensor] = {}
    for tensor in (*plain, *quantized):
        if tensor.name in tensors:
            raise CheckpointError(
                f"{path} has {tensor.name} twice: plain, and quantized in {tensor.title}"
            )
        tensors[tensor.name] = tensor
    return tensors


def _compressed(matrix: QuantizedMatrix) -> LogicalTensor | None:
    """compressed-tensors: weight_packed in words is integers, in bytes FP4; weight in one byte is
    FP8 or INT8.
    """
    first, quantization = matrix.first, matrix.quantization
    stem = matrix.stem(".weight_packed")
    if stem is not None:
        scale = matrix.part(f"{stem}.weight_scale")
        if first.dtype != "U8":
            return packed_integers(matrix, stem, scale)
        global_scale = (
            matrix.part(f"{stem}.weight_global_scale") if scale.dtype == "F8_E4M3" else None
        )
        return fp4(matrix, f"{stem}.weight", Scaling(scale, global_scale=global_scale))
    if first.dtype not in (*FP8, "I8") or not first.name.endswith("weight"):
        return None
    scale, zero_point = matrix.part(f"{first.name}_scale"), matrix.zero_point(first.name)
    block = quantization.block or next(((1, size) for size in quantization.group_sizes), None)
    return scaled(matrix, first.name, Scaling(scale, block, zero_point=zero_point))


_READERS: Mapping[str, Callable[[QuantizedMatrix], LogicalTensor | None]] = {
    "mxfp4": mxfp4,
    "fp8": fp8,
    "mxfp8": fp8,
    "fbgemm_fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": bitsandbytes,
}
