"""Rows of blocks: drawn bytes, and what the `gguf` package says that they are."""

from __future__ import annotations

import numpy as np
import torch

from flexgen_helm.quant.formats import BLOCK_FORMATS, BlockFormat, scaled_format


def drawn_blocks(fmt: BlockFormat, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Any bytes [rows, row bytes] whose scales are finite."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (rows, fmt.stripe_bytes(width)), dtype=torch.uint8, generator=generator)
    blocks = packed.view(-1, fmt.block_bytes)
    for at in half_scales(fmt):
        blocks[:, at + 1] &= 0xBF  # one bit of the exponent
    if fmt.name in TYPES:
        code, scale = TYPES[fmt.name]
        size = 1 if scale == "F8_E8M0" else SCALARS[scale].itemsize
        blocks[:, size - 1] &= 0xBF
        codes = blocks[:, size:]
        if code.startswith("F8"):  # no number, or infinite
            codes[~codes.view(SCALARS[code]).float().isfinite()] = 0x55
    if fmt.name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 32 + 112
    return packed


def half_scales(fmt: BlockFormat) -> list[int]:
    """Where a block has its float16 numbers, as ggml-common.h declares them."""
    return {
        "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
        "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": [],
        "TQ2_0": [64],
    }.get(fmt.name, [])  # fmt: skip


def published_values(packed: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Values [rows, width] as the `gguf` package decodes them, or PyTorch's own types."""
    if fmt.name in TYPES:
        code, scale = TYPES[fmt.name]
        blocks = packed.reshape(-1, fmt.block_bytes)
        size = 1 if scale == "F8_E8M0" else SCALARS[scale].itemsize
        factors = blocks[:, :size].clone().view(SCALARS[scale]).float()
        codes = blocks[:, size:].clone()
        if code == "FP4":
            codes = E2M1[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
        else:
            codes = codes.view(SCALARS[code]).float()
        return (codes * factors).view(len(packed), -1)
    import gguf  # the machine of `make gpu-check` has none

    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[fmt.name]))


SCALARS = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8,
}  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Of folders: a scale, and codes behind it.
SCALED = {
    (code, scale, values): scaled_format(code, scale, values)
    for code in ("F8_E4M3", "F8_E5M2", "I8", "FP4")
    for scale, values in (("F32", 128), ("BF16", 64), ("F16", 128), ("F8_E8M0", 32))
}
TYPES = {fmt.name: key[:2] for key, fmt in SCALED.items()}
FORMATS = list(BLOCK_FORMATS.values())
NAMES = list(BLOCK_FORMATS)
EVERY_FORMAT = [*FORMATS, *SCALED.values()]
