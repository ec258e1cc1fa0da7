"""Quantized weights written from the descriptions of their formats, each with its values by a slow,
direct formula.

Every function returns (ending -> stored tensor, values in float32 as [out, in]).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

Set = tuple[dict[str, torch.Tensor], torch.Tensor]


def _words(integers, bits):
    """Pack integers [n, columns] along the first dimension, from the lowest bit of each word on."""
    length = -(-integers.shape[0] * bits // 32)
    words = np.zeros((length, integers.shape[1]), dtype=np.uint32)
    for column in range(integers.shape[1]):
        stream = sum(int(value) << (bits * i) for i, value in enumerate(integers[:, column]))
        for i in range(length):
            words[i, column] = (stream >> (32 * i)) & 0xFFFFFFFF
    return torch.from_numpy(words.view(np.int32))


def _scales(rng, *shape, dtype=torch.float16):
    return torch.from_numpy(rng.uniform(0.001, 0.05, shape)).to(dtype)


def _spread(scales, out, into, rows, columns):
    """The scale of every value, from those of blocks of so many rows and columns; the last ones may
    be cut off.
    """
    return scales[torch.arange(out)[:, None] // rows, torch.arange(into) // columns].float()


# ---- integers in groups of inputs; the last group may have fewer ----


@dataclass(frozen=True)
class _Groups:
    """codes, zeros and scales of inputs and groups in rows; group: of each input."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: torch.Tensor
    group: np.ndarray

    @property
    def values(self):
        differences = torch.from_numpy(self.codes - self.zeros[self.group]).float()
        return (differences * self.scales[self.group].float()).T.contiguous()


def _groups(rng, out, into, size, codes, zeros, act_order=False):
    num, group = -(-into // size), np.arange(into) // size
    return _Groups(
        rng.integers(codes.start, codes.stop, (into, out)),
        rng.integers(zeros.start, zeros.stop, (num, out)),
        _scales(rng, num, out),
        rng.permutation(group) if act_order else group,
    )


def gptq(
    rng,
    out,
    into,
    bits=4,
    version=1,
    act_order=False,
    size=32,
    has_index=True,
    symmetric=False,
):
    low = version == 1  # which has no room for zero points of 0
    zeros = range(1 << bits - 1, (1 << bits - 1) + 1) if symmetric else range(low, 1 << bits)
    drawn = _groups(rng, out, into, size, range(1 << bits), zeros, act_order)
    index = {"g_idx": torch.from_numpy(drawn.group).to(torch.int32)} if has_index else {}
    stored = {
        "qweight": _words(drawn.codes, bits),
        "qzeros": _words((drawn.zeros - low).T, bits).T.contiguous(),
        "scales": drawn.scales,
        **index,
    }
    return stored, drawn.values


def awq(rng, out, into, size=32):
    drawn = _groups(rng, out, into, size, range(16), range(16))

    def pack(integers):
        in_order = integers.reshape(len(integers), out // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        words = (in_order.astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)).sum(
            -1, dtype=np.uint32
        )
        return torch.from_numpy(words.view(np.int32))

    return {
        "qweight": pack(drawn.codes),
        "qzeros": pack(drawn.zeros),
        "scales": drawn.scales,
    }, drawn.values


def packed(
    rng,
    out,
    into,
    bits=4,
    symmetric=True,
    act_order=False,
    size=32,
):
    half = 1 << (bits - 1)
    drawn = _groups(
        rng,
        out,
        into,
        size,
        range(-half, half),
        range(1) if symmetric else range(-half, half),
        act_order,
    )
    stored = {
        "weight_packed": _words(drawn.codes + half, bits).T.contiguous(),
        "weight_scale": drawn.scales.T.contiguous(),
        "weight_shape": torch.tensor([out, into]),
    }
    if not symmetric:
        stored["weight_zero_point"] = _words(drawn.zeros.T + half, bits)
    if act_order:
        stored["weight_g_idx"] = torch.from_numpy(drawn.group).to(torch.int32)
    return stored, drawn.values


# ---- 8 bits ----


def int8(rng, out, into, size=0, has_zeros=False):
    """size: inputs of a group; 0 for all of a row."""
    codes = torch.from_numpy(rng.integers(-128, 128, (out, into))).to(torch.int8)
    size = size or into
    scales = _scales(rng, out, -(-into // size), dtype=torch.bfloat16)
    stored, zero = {"weight": codes, "weight_scale": scales}, torch.zeros(out, 1)
    if has_zeros:
        zero = stored["weight_zero_point"] = torch.from_numpy(rng.integers(-128, 128, (out, 1))).to(
            torch.int8
        )
    return stored, (codes.float() - zero.float()) * _spread(scales, out, into, 1, size)


def _fp8(rng, out, into):
    return torch.from_numpy(rng.normal(0, 60, (out, into))).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_by_block(rng, out, into, block=16):
    codes = _fp8(rng, out, into)
    scales = _scales(rng, -(-out // block), -(-into // block), dtype=torch.float32)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * _spread(
        scales, out, into, block, block
    )


def fp8_by_tensor(rng, out, into):
    codes, scale = _fp8(rng, out, into), _scales(rng, dtype=torch.bfloat16)
    stored = {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(1.5)}
    return stored, codes.float() * scale.float()


def fp8_by_channel(rng, out, into):
    codes, scales = _fp8(rng, out, into), _scales(rng, out, 1, dtype=torch.float32)
    stored = {"weight": codes, "weight_scale": scales, "input_scale": torch.tensor([1.5])}
    return stored, codes.float() * scales


def _exponents(rng, out, into):
    """Exponents of groups of 32 inputs, and the factor of every value."""
    exponents = torch.from_numpy(rng.integers(112, 124, (out, into // 32)).astype(np.uint8))
    return exponents, 2.0 ** (_spread(exponents, out, into, 1, 32) - 127)


def mxfp8(rng, out, into):
    codes, (exponents, factors) = _fp8(rng, out, into), _exponents(rng, out, into)
    return {"weight": codes, "weight_scale_inv": exponents}, codes.float() * factors


# ---- 4 bits of OCP's E2M1 ----


def _e2m1(code):
    """Sign and magnitude, computed from the bits."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return sign * magnitude


def _fp4(rng, out, into):
    codes = rng.integers(0, 16, (out, into))
    packed_codes = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
    return packed_codes, torch.tensor([_e2m1(code) for code in range(16)])[codes]


def nvfp4(rng, out, into):
    codes, numbers = _fp4(rng, out, into)
    scales = torch.from_numpy(rng.uniform(1, 300, (out, into // 16))).to(torch.float8_e4m3fn)
    global_scale = torch.tensor([2048.5])
    values = numbers * (_spread(scales, out, into, 1, 16) / global_scale)
    return {
        "weight_packed": codes,
        "weight_scale": scales,
        "weight_global_scale": global_scale,
    }, values


def mxfp4_packed(rng, out, into):
    (codes, numbers), (exponents, factors) = _fp4(rng, out, into), _exponents(rng, out, into)
    return {"weight_packed": codes, "weight_scale": exponents}, numbers * factors


# ---- bitsandbytes ----


def bnb_int8(rng, out, into):
    codes = torch.from_numpy(rng.integers(-127, 128, (out, into))).to(torch.int8)
    largest = _scales(rng, out, dtype=torch.float32)
    values = codes.float() * largest.view(-1, 1) * (1 / 127)
    return {
        "weight": codes,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, values


def bnb_nf4(rng, out, into, nested=False):
    # One table for all matrices, as bitsandbytes has one: a loop is compiled for each.
    table = torch.from_numpy(np.sort(np.random.default_rng(0).uniform(-1, 1, 16))).float()
    codes = rng.integers(0, 16, out * into)
    blocks = -(-len(codes) // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, into]}
    largest = _scales(rng, blocks, dtype=torch.float32)
    stored = {
        "weight": torch.from_numpy((codes[0::2] << 4 | codes[1::2]).astype(np.uint8)).view(-1, 1),
        "weight.absmax": largest,
        "weight.quant_map": table,
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        bytes_ = torch.from_numpy(rng.integers(0, 256, blocks).astype(np.uint8))
        nested_table, nested_largest = (
            torch.linspace(-1, 1, 256),
            _scales(rng, -(-blocks // 256), dtype=torch.float32),
        )
        largest = nested_table[bytes_.long()] * nested_largest[torch.arange(blocks) // 256] + 0.25
        stored |= {
            "weight.absmax": bytes_,
            "weight.nested_quant_map": nested_table,
            "weight.nested_absmax": nested_largest,
        }
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(
        bytearray(json.dumps(state).encode()), dtype=torch.uint8
    )
    values = table[codes] * largest[np.arange(len(codes)) // 64]
    return stored, values.view(out, into)


def _gptq_config(bits=4, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, **more}


def _awq_config(group_size):
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
    }


def _compressed(fmt, bits=4, **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": group},
    }


# Name -> quantization_config, writer. All take matrices whose sides are multiples of 32.
FORMATS = {
    "gptq-2-bits": (_gptq_config(2), partial(gptq, bits=2)),
    "gptq-3-bits": (_gptq_config(3, checkpoint_format="gptq"), partial(gptq, bits=3)),
    "gptq-4-bits": (_gptq_config(4), gptq),
    "gptq-symmetric": (_gptq_config(sym=True, desc_act=False), partial(gptq, symmetric=True)),
    "gptq-8-bits": (_gptq_config(8), partial(gptq, bits=8)),
    "gptq-version-2": (_gptq_config(checkpoint_format="gptq_v2"), partial(gptq, version=2)),
    "gptq-act-order": (_gptq_config(desc_act=True), partial(gptq, act_order=True)),
    "gptq-cut-group": (_gptq_config(group_size=64), partial(gptq, size=64, has_index=False)),
    "gptq-groups-of-16": (_gptq_config(group_size=16), partial(gptq, size=16)),
    "awq": (_awq_config(32), awq),
    "awq-cut-group": (_awq_config(64), partial(awq, size=64)),
    "int4-packed-cut-group": (
        _compressed("pack-quantized", group_size=40),
        partial(packed, size=40),
    ),
    "int4-packed-by-row": (
        _compressed("pack-quantized", group_size=None, strategy="channel"),
        lambda *a: packed(*a, size=a[2]),
    ),
    "int4-packed-symmetric": (_compressed("pack-quantized", symmetric=True, group_size=32), packed),
    "int8-packed": (_compressed("pack-quantized", 8), partial(packed, bits=8)),
    "int4-packed-zero-points": (_compressed("pack-quantized"), partial(packed, symmetric=False)),
    "int4-packed-act-order": (
        _compressed("pack-quantized"),
        partial(packed, symmetric=False, act_order=True),
    ),
    "int8": (_compressed("int-quantized", 8), int8),
    "int8-cut-group": (_compressed("int-quantized", 8, group_size=56), partial(int8, size=56)),
    "int8-zero-points": (_compressed("int-quantized", 8), partial(int8, has_zeros=True)),
    "fp8-compressed": (_compressed("float-quantized", 8), fp8_by_channel),
    "nvfp4": (_compressed("nvfp4-pack-quantized"), nvfp4),
    "mxfp4-packed": (_compressed("mxfp4-pack-quantized"), mxfp4_packed),
    "fp8-by-block": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_by_block),
    "fp8-by-cut-block": (
        {"quant_method": "fp8", "weight_block_size": [24, 24]},
        partial(fp8_by_block, block=24),
    ),
    "fp8-by-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_by_tensor),
    "fp8-fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_by_channel),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "bnb-nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb_nf4),
    "bnb-nf4-nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        partial(bnb_nf4, nested=True),
    ),
}
