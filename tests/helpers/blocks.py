"""Rows of blocks: drawn bytes, and what the `gguf` package says that they are."""

import numpy as np
import torch

from flexgen_helm.quant.block_formats import BLOCK_FORMATS, scaled_format


def drawn_blocks(fmt, rows, width, seed=0):
    """Any bytes [rows, row bytes] whose scales are finite."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(
        256, (rows, fmt.stripe_bytes(width)), dtype=torch.uint8, generator=generator
    )
    blocks = packed.view(-1, fmt.block_bytes)
    for at in half_scales(fmt):
        blocks[:, at + 1] &= 0xBF  # one bit of the exponent
    if fmt.name in TYPES:
        code, scale, *_ = TYPES[fmt.name]
        size = SCALARS[scale].itemsize
        blocks[:, size - 1] &= 0xBF
        codes = blocks[:, size:]
        if scale == "F8_E4M3":  # behind what divides them
            blocks[:, 3] = 0x42
            blocks[:, 4:12] &= 0xFB
        if code.startswith("F8"):  # no number, or infinite
            codes[~codes.view(SCALARS[code]).float().isfinite()] = 0x55
    if fmt.name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 32 + 112
    return packed


def half_scales(fmt):
    """Where a block has its float16 numbers, as ggml-common.h declares them."""
    return {
        "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
        "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
        "MXFP4": [], "NVFP4": [], "TQ2_0": [64],
    }.get(fmt.name, [])  # fmt: skip


def published_values(packed, fmt):
    """Values [rows, width] as the `gguf` package decodes them, or PyTorch's own types."""
    if fmt.name in TYPES:
        return _scaled_values(packed.reshape(-1, fmt.block_bytes), *TYPES[fmt.name]).view(
            len(packed), -1
        )
    import gguf  # the machine of `make gpu-check` has none

    with np.errstate(all="ignore"):
        return torch.from_numpy(
            gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[fmt.name])
        )


def _scaled_values(blocks, code, scale, _, more=""):
    def read(begin, end, kind):
        return (
            blocks[:, begin:end].flatten().clone().view(SCALARS[kind]).view(len(blocks), -1).float()
        )

    size = SCALARS[scale].itemsize
    if scale == "F8_E4M3":
        size, factors = 12, (read(4, 12, scale) / read(0, 4, "F32")).repeat_interleave(16, 1)
    else:
        factors = read(0, size, scale)
    zeros = read(size, size + 1, code) if more == "zero" else 0
    codes = blocks[:, size + (more == "zero") :]
    if code == "FP4":
        values = E2M1[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
    elif code == "NF4":
        values = NF4[torch.stack((codes >> 4, codes & 15), 2).flatten(1).long()]
    elif code == "U3":
        bits = torch.from_numpy(
            np.unpackbits(codes.contiguous().numpy(), axis=1, bitorder="little")
        )
        values = (bits.unflatten(1, (-1, 3)) * torch.tensor([1, 2, 4])).sum(2).float()
    else:
        values = read(size + (more == "zero"), None, code)
    # bitsandbytes: `int8_vectorwise_dequant`
    return (values - zeros) * factors * (7.874015718698502e-3 if more == "1 / 127" else 1)


SCALARS = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U3": torch.uint8,
}  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# bitsandbytes.functional.create_normal_map, as its files store it
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
# Of folders: a scale, or several, and codes behind.
SCALED = {
    (code, scale, values): scaled_format(code, scale, values, values)
    for code in ("F8_E4M3", "F8_E5M2", "I8", "FP4")
    for scale, values in (("F32", 128), ("BF16", 64), ("F16", 128), ("F8_E8M0", 32))
}
SCALED |= {
    ("FP4", "F8_E4M3", 16): scaled_format("FP4", "F8_E4M3", 128, 16, is_divided=True),
    ("NF4", "F32", 64): scaled_format("NF4", "F32", 64, 64),
    ("I8", "F32", 128, "1 / 127"): scaled_format("I8", "F32", 128, 128, factor=1 / 127),
    ("I8", "F32", 64, "zero"): scaled_format("I8", "F32", 64, 64, has_zero=True),
    ("U3", "F16", 32, "zero"): scaled_format("U3", "F16", 32, 32, has_zero=True),
}
TYPES = {fmt.name: key for key, fmt in SCALED.items()}
FORMATS = list(BLOCK_FORMATS.values())
NAMES = list(BLOCK_FORMATS)
EVERY_FORMAT = [*FORMATS, *SCALED.values()]
