"""Quantized weights written from the descriptions of their formats, each with its values by a slow, direct formula.

Every function returns (ending -> stored tensor, values in float32 as [out, in]).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Set = tuple[dict[str, torch.Tensor], torch.Tensor]


def _words(integers: np.ndarray, bits: int) -> torch.Tensor:
    """Pack integers [n, columns] along the first dimension, from the lowest bit of each word on."""
    length = -(-integers.shape[0] * bits // 32)
    words = np.zeros((length, integers.shape[1]), dtype=np.uint32)
    for column in range(integers.shape[1]):
        stream = sum(int(value) << (bits * i) for i, value in enumerate(integers[:, column]))
        for i in range(length):
            words[i, column] = (stream >> (32 * i)) & 0xFFFFFFFF
    return torch.from_numpy(words.view(np.int32))


def _scales(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.001, 0.05, shape)).to(dtype)


def gptq(
    rng: np.random.Generator,
    out: int,
    into: int,
    bits: int = 4,
    version: int = 1,
    act_order: bool = False,
    size: int = 32,
) -> Set:
    """size: inputs of a group; the last group may have fewer."""
    groups = -(-into // size)
    codes = rng.integers(0, 1 << bits, (into, out))
    zeros = rng.integers(version == 1, 1 << bits, (groups, out))  # version 1 has no room for zero points of 0
    scales = _scales(rng, groups, out)
    group = rng.permutation(np.arange(into) // size) if act_order else np.arange(into) // size
    values = torch.empty(out, into)
    for i in range(into):
        difference = torch.from_numpy(codes[i] - zeros[group[i]]).float()
        values[:, i] = difference * scales[group[i]].float()
    stored = {
        "qweight": _words(codes, bits),
        "qzeros": _words((zeros - (version == 1)).T, bits).T.contiguous(),
        "scales": scales,
        "g_idx": torch.from_numpy(group).to(torch.int32),
    }
    return stored, values


def gptq_without_index(rng: np.random.Generator, out: int, into: int, size: int = 32) -> Set:
    stored, values = gptq(rng, out, into, size=size)
    return {name: tensor for name, tensor in stored.items() if name != "g_idx"}, values


def awq(rng: np.random.Generator, out: int, into: int, size: int = 32) -> Set:
    groups, order = -(-into // size), (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = rng.integers(0, 16, (into, out)), rng.integers(0, 16, (groups, out))
    scales = _scales(rng, groups, out)

    def pack(integers: np.ndarray) -> torch.Tensor:
        words = np.zeros((integers.shape[0], out // 8), dtype=np.uint32)
        for word in range(out // 8):
            for place, column in enumerate(order):
                words[:, word] |= integers[:, word * 8 + column].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(words.view(np.int32))

    values = torch.empty(out, into)
    for i in range(into):
        values[:, i] = torch.from_numpy(codes[i] - zeros[i // size]).float() * scales[i // size].float()
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, values


def packed(
    rng: np.random.Generator,
    out: int,
    into: int,
    bits: int = 4,
    symmetric: bool = True,
    act_order: bool = False,
    size: int = 32,
) -> Set:
    half, groups = 1 << (bits - 1), -(-into // size)
    codes = rng.integers(-half, half, (out, into))
    zeros = np.zeros((out, groups), dtype=np.int64) if symmetric else rng.integers(-half, half, (out, groups))
    scales = _scales(rng, out, groups, dtype=torch.bfloat16)
    group = rng.permutation(np.arange(into) // size) if act_order else np.arange(into) // size
    values = torch.empty(out, into)
    for i in range(into):
        values[:, i] = torch.from_numpy(codes[:, i] - zeros[:, group[i]]).float() * scales[:, group[i]].float()
    stored = {
        "weight_packed": _words((codes + half).T, bits).T.contiguous(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, into]),
    }
    if not symmetric:
        stored["weight_zero_point"] = _words(zeros + half, bits)
    if act_order:
        stored["weight_g_idx"] = torch.from_numpy(group).to(torch.int32)
    return stored, values


def int8_by_channel(rng: np.random.Generator, out: int, into: int) -> Set:
    codes = torch.from_numpy(rng.integers(-128, 128, (out, into))).to(torch.int8)
    scales = _scales(rng, out, 1, dtype=torch.bfloat16)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def int8_by_group(rng: np.random.Generator, out: int, into: int, size: int) -> Set:
    """The last group may have fewer inputs."""
    codes = torch.from_numpy(rng.integers(-128, 128, (out, into))).to(torch.int8)
    scales = _scales(rng, out, -(-into // size), dtype=torch.bfloat16)
    values = torch.empty(out, into)
    for j in range(into):
        values[:, j] = codes[:, j].float() * scales[:, j // size].float()
    return {"weight": codes, "weight_scale": scales}, values


def int8_with_zero_points(rng: np.random.Generator, out: int, into: int) -> Set:
    stored, _ = int8_by_channel(rng, out, into)
    zero = torch.from_numpy(rng.integers(-128, 128, (out, 1))).to(torch.int8)
    values = (stored["weight"].float() - zero.float()) * stored["weight_scale"].float()
    return {**stored, "weight_zero_point": zero}, values


def _fp8(rng: np.random.Generator, out: int, into: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 60, (out, into))).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_by_block(rng: np.random.Generator, out: int, into: int, block: int = 16) -> Set:
    """The last blocks of a row and a column may be cut off."""
    codes = _fp8(rng, out, into)
    scales = _scales(rng, -(-out // block), -(-into // block), dtype=torch.float32)
    values = torch.empty(out, into)
    for i in range(out):
        for j in range(into):
            values[i, j] = codes[i, j].float() * scales[i // block, j // block]
    return {"weight": codes, "weight_scale_inv": scales}, values


def fp8_by_tensor(rng: np.random.Generator, out: int, into: int) -> Set:
    codes, scale = _fp8(rng, out, into), _scales(rng, dtype=torch.bfloat16)
    stored = {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(1.5)}
    return stored, codes.float() * scale.float()


def fp8_by_channel(rng: np.random.Generator, out: int, into: int) -> Set:
    codes, scales = _fp8(rng, out, into), _scales(rng, out, 1, dtype=torch.float32)
    stored = {"weight": codes, "weight_scale": scales, "input_scale": torch.tensor([1.5])}
    return stored, codes.float() * scales


# Sign and magnitude of OCP's E2M1, computed from its bits.
def _e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return sign * magnitude


def _fp4(rng: np.random.Generator, out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = rng.integers(0, 16, (out, into))
    packed_codes = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
    return packed_codes, torch.tensor([[_e2m1(int(code)) for code in row] for row in codes])


def nvfp4(rng: np.random.Generator, out: int, into: int) -> Set:
    codes, numbers = _fp4(rng, out, into)
    scales = torch.from_numpy(rng.uniform(1, 300, (out, into // 16))).to(torch.float8_e4m3fn)
    global_scale = torch.tensor([2048.5])
    values = torch.empty(out, into)
    for j in range(into):
        values[:, j] = numbers[:, j] * (scales[:, j // 16].float() / global_scale)
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": global_scale}, values


def _exponents(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(112, 124, shape).astype(np.uint8))


def mxfp4_packed(rng: np.random.Generator, out: int, into: int) -> Set:
    codes, numbers = _fp4(rng, out, into)
    exponents = _exponents(rng, out, into // 32)
    values = torch.empty(out, into)
    for j in range(into):
        values[:, j] = numbers[:, j] * 2.0 ** (exponents[:, j // 32].float() - 127)
    return {"weight_packed": codes, "weight_scale": exponents}, values


def mxfp8(rng: np.random.Generator, out: int, into: int) -> Set:
    codes, exponents = _fp8(rng, out, into), _exponents(rng, out, into // 32)
    values = torch.empty(out, into)
    for j in range(into):
        values[:, j] = codes[:, j].float() * 2.0 ** (exponents[:, j // 32].float() - 127)
    return {"weight": codes, "weight_scale_inv": exponents}, values


def bnb_int8(rng: np.random.Generator, out: int, into: int) -> Set:
    codes = torch.from_numpy(rng.integers(-127, 128, (out, into))).to(torch.int8)
    largest = _scales(rng, out, dtype=torch.float32)
    values = codes.float() * (largest.view(-1, 1) * (1 / 127))
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values


def bnb_nf4(rng: np.random.Generator, out: int, into: int, nested: bool = False) -> Set:
    table = torch.from_numpy(np.sort(rng.uniform(-1, 1, 16))).float()
    codes = rng.integers(0, 16, out * into)
    blocks = -(-len(codes) // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, into]}
    largest = _scales(rng, blocks, dtype=torch.float32)
    stored = {
        "weight": torch.from_numpy((codes[0::2] << 4 | codes[1::2]).astype(np.uint8)).view(-1, 1),
        "weight.absmax": largest,
        "weight.quant_map": table,
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        bytes_ = torch.from_numpy(rng.integers(0, 256, blocks).astype(np.uint8))
        nested_table, nested_largest = torch.linspace(-1, 1, 256), _scales(rng, -(-blocks // 256), dtype=torch.float32)
        largest = torch.stack([nested_table[int(b)] * nested_largest[i // 256] + 0.25 for i, b in enumerate(bytes_)])
        stored |= {
            "weight.absmax": bytes_,
            "weight.nested_quant_map": nested_table,
            "weight.nested_absmax": nested_largest,
        }
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(
        bytearray(json.dumps(state).encode()), dtype=torch.uint8
    )
    values = torch.stack([table[int(code)] * largest[i // 64] for i, code in enumerate(codes)])
    return stored, values.view(out, into)


def _gptq_config(bits: int = 4, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, **others}


def _awq_config(group_size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}


def _compressed_config(fmt: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}}


# Name -> quantization_config, writer. All take matrices whose sides are multiples of 32.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[np.random.Generator, int, int], Set]]] = {
    "gptq-2-bits": (_gptq_config(2), lambda *a: gptq(*a, bits=2)),
    "gptq-3-bits": (_gptq_config(3, checkpoint_format="gptq"), lambda *a: gptq(*a, bits=3)),
    "gptq-4-bits": (_gptq_config(4), gptq),
    "gptq-8-bits": (_gptq_config(8), lambda *a: gptq(*a, bits=8)),
    "gptq-version-2": (_gptq_config(checkpoint_format="gptq_v2"), lambda *a: gptq(*a, version=2)),
    "gptq-act-order": (_gptq_config(desc_act=True), lambda *a: gptq(*a, act_order=True)),
    "gptq-without-index": (_gptq_config(), gptq_without_index),
    "gptq-cut-group": (_gptq_config(group_size=64), lambda *a: gptq_without_index(*a, size=64)),
    "awq": (_awq_config(32), awq),
    "awq-cut-group": (_awq_config(64), lambda *a: awq(*a, size=64)),
    "int4-packed": (_compressed_config("pack-quantized", num_bits=4), packed),
    "int4-packed-cut-group": (
        _compressed_config("pack-quantized", num_bits=4, group_size=40),
        lambda *a: packed(*a, size=40),
    ),
    "int4-packed-by-row": (
        _compressed_config("pack-quantized", num_bits=4, group_size=None, strategy="channel"),
        lambda *a: packed(*a, size=a[2]),
    ),
    "int8-packed": (_compressed_config("pack-quantized", num_bits=8), lambda *a: packed(*a, bits=8)),
    "int4-packed-zero-points": (
        _compressed_config("pack-quantized", num_bits=4),
        lambda *a: packed(*a, symmetric=False),
    ),
    "int4-packed-act-order": (
        _compressed_config("pack-quantized", num_bits=4),
        lambda *a: packed(*a, symmetric=False, act_order=True),
    ),
    "int8": (_compressed_config("int-quantized", num_bits=8), int8_by_channel),
    "int8-cut-group": (
        _compressed_config("int-quantized", num_bits=8, group_size=56),
        lambda *a: int8_by_group(*a, size=56),
    ),
    "int8-zero-points": (_compressed_config("int-quantized", num_bits=8), int8_with_zero_points),
    "fp8-compressed": (_compressed_config("float-quantized", num_bits=8), fp8_by_channel),
    "nvfp4": (_compressed_config("nvfp4-pack-quantized", num_bits=4), nvfp4),
    "mxfp4-packed": (_compressed_config("mxfp4-pack-quantized", num_bits=4), mxfp4_packed),
    "fp8-by-block": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_by_block),
    "fp8-by-cut-block": ({"quant_method": "fp8", "weight_block_size": [24, 24]}, lambda *a: fp8_by_block(*a, block=24)),
    "fp8-by-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_by_tensor),
    "fp8-fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_by_channel),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "bnb-nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb_nf4),
    "bnb-nf4-nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda *a: bnb_nf4(*a, nested=True)),
}
