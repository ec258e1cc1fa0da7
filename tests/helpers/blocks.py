"""Rows of blocks: drawn bytes, and what the `gguf` package says that they are."""

from __future__ import annotations

import gguf
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
    if fmt.name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 32 + 112
    return packed


def half_scales(fmt: BlockFormat) -> list[int]:
    """Where a block has its float16 numbers, as ggml-common.h declares them."""
    return {
        "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
        "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": [],
        "TQ2_0": [64],
    }[fmt.name]  # fmt: skip


def published_values(packed: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Values [rows, width] as the `gguf` package decodes them."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[fmt.name]))


FORMATS = list(BLOCK_FORMATS.values())
NAMES = list(BLOCK_FORMATS)
# Those of folders too: of each type of codes and scales.
EVERY_FORMAT = FORMATS + [
    scaled_format(codes, scale, 256)
    for codes in ("F8_E4M3", "F8_E5M2", "I8", "FP4")
    for scale in ("F32", "F16", "BF16", "F8_E8M0")
]
