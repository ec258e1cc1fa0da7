"""Values of published blocks equal those of the `gguf` package, bit for bit: by plain torch and by
compiled loops.
"""

import gguf
import pytest
import torch

from flexgen_helm.kernels import trial
from flexgen_helm.quant.block_products import decode_into
from flexgen_helm.quant.blocks import decode, has_non_finite
from tests.helpers.blocks import (
    EVERY_FORMAT,
    FORMATS,
    NAMES,
    SCALED,
    drawn_blocks,
    half_scales,
    published_values,
)

# Zero and negative zero, denormals, the smallest normal numbers, the largest ones, and a third.
HALVES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x3555]

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)


def assert_same_bits(values, expected):
    assert values.dtype == expected.dtype == torch.float32
    assert torch.equal(
        values.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)
    )


def assert_as_published(packed, fmt):
    expected = published_values(packed, fmt)
    assert_same_bits(decode(packed, fmt), expected)
    assert_same_bits(decode_into(packed, fmt, torch.empty(expected.shape)), expected)


@every_format
def test_sizes_are_those_of_the_package(fmt):
    assert (fmt.block_values, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[
        gguf.GGMLQuantizationType[fmt.name]
    ]
    assert fmt.has_whole_blocks(3 * fmt.block_values) and not fmt.has_whole_blocks(
        fmt.block_values + 8
    )
    assert fmt.packed_bytes(5, 3 * fmt.block_values) == 15 * fmt.block_bytes


@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda fmt: fmt.name)
def test_drawn_blocks(fmt):
    packed = drawn_blocks(fmt, 100, 5 * fmt.block_values)
    assert_as_published(packed, fmt)
    assert not has_non_finite(packed, fmt)
    assert trial.loops_in_use[f"products with {fmt.name}"] == "compiled"


@pytest.mark.parametrize(
    "code, bits", [("F8_E4M3", 0x7F), ("F8_E4M3", 0xFF), ("F8_E5M2", 0x7C), ("F8_E5M2", 0xFE)]
)
def test_codes_that_are_no_numbers_are_found(code, bits):
    fmt = SCALED[code, "F32", 128]
    packed = drawn_blocks(fmt, 9, 5 * fmt.block_values)
    packed[4, 2 * fmt.block_bytes + 77] = bits
    assert has_non_finite(packed, fmt)


@pytest.mark.parametrize(
    "scale, bits", [("F32", [0, 0, 0x80, 0x7F]), ("BF16", [0x81, 0xFF]), ("F8_E8M0", [0xFF])]
)
def test_scales_of_folders_that_are_no_numbers_are_found(scale, bits):
    fmt = next(fmt for key, fmt in SCALED.items() if key[1] == scale)
    packed = drawn_blocks(fmt, 9, 5 * fmt.block_values)
    packed.view(-1, fmt.block_bytes)[33, : len(bits)] = torch.tensor(bits, dtype=torch.uint8)
    assert has_non_finite(packed, fmt)


@every_format
def test_all_codes(fmt):
    """A row for each value that a byte can have: its low and its high bits are codes at all
    places.
    """
    packed = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, fmt.block_bytes).contiguous()
    for at in half_scales(fmt):
        packed[:, at], packed[:, at + 1] = 0x55, 0x35
    assert_as_published(packed, fmt)


@every_format
def test_extreme_scales(fmt):
    packed = drawn_blocks(fmt, len(HALVES) ** 2, fmt.block_values)
    for number, at in enumerate(half_scales(fmt)):
        for row in range(len(packed)):
            bits = HALVES[row // len(HALVES) ** number % len(HALVES)]
            packed[row, at], packed[row, at + 1] = bits & 0xFF, bits >> 8
    assert_as_published(packed, fmt)
    assert not has_non_finite(packed, fmt)


@pytest.mark.parametrize("name, scales", [("MXFP4", 1), ("NVFP4", 4)])
def test_every_scale_of_8_bits(name, scales):
    fmt = FORMATS[NAMES.index(name)]
    packed = drawn_blocks(fmt, 256, fmt.block_values)
    packed[:, :scales] = torch.arange(256, dtype=torch.uint8)[:, None]
    assert_as_published(packed, fmt)


@every_format
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01, 0x7C01])
def test_scales_that_are_no_numbers_are_found(fmt, bits):
    for at in half_scales(fmt):
        packed = drawn_blocks(fmt, 3, 4 * fmt.block_values)
        assert not has_non_finite(packed, fmt)
        block = packed.view(-1, fmt.block_bytes)[7]
        block[at], block[at + 1] = bits & 0xFF, bits >> 8
        assert has_non_finite(packed, fmt)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_of_larger_matrices_in_any_dtype(fmt, dtype):
    width = 3 * fmt.block_values
    memory = torch.zeros(8, fmt.stripe_bytes(width) + 5, dtype=torch.uint8)
    packed, out = memory[1:, 3:-2], torch.full((9, width + 7), -1.0, dtype=dtype)
    packed.copy_(drawn_blocks(fmt, 7, width))
    assert decode_into(packed, fmt, out[1:8, 2:-5]).data_ptr() == out[1:8, 2:-5].data_ptr()
    assert torch.equal(out[1:8, 2:-5], published_values(packed.contiguous(), fmt).to(dtype))
    out[1:8, 2:-5] = -1
    assert out.eq(-1).all()
