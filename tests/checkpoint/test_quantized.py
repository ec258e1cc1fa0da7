"""Every value of every quantized format equals a slow formula or transformers' own code; faults are named."""

import json
import re
import shutil
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.checkpoint.convert import convert
from flexgen_helm.checkpoint.names import planned_precision
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.quantized.config import METHODS, read_quantization
from flexgen_helm.checkpoint.quantized.view import logical_tensors
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.checkpoint.stored_tensors import read_header
from flexgen_helm.cli import main
from flexgen_helm.errors import CheckpointError
from flexgen_helm.kernels import trial
from flexgen_helm.quant.block_products import decode_into
from flexgen_helm.quant.blocks import decode
from tests.helpers.model_folders import edit_config, edit_weights
from tests.helpers.parity import differences, prompts
from tests.helpers.quantized_sets import FORMATS, _words, fp8_by_block, gptq
from tests.helpers.tiny_models import llama_config, save_random

OUT, IN = 64, 96


def read_tensors(path, tensors, config):
    save_file(tensors, path)
    quantization = read_quantization({"quantization_config": config, "dtype": "bfloat16"}, Path("config.json"))
    return logical_tensors(read_header(path), quantization, path)


def read_whole(tensor):
    return torch.cat(list(tensor.tiles([range(tensor.num_rows)]))).view(tensor.shape)


# ---- values ----


@pytest.fixture(scope="module", params=FORMATS)
def weight(request, tmp_path_factory):
    config, write = FORMATS[request.param]
    parts, values = write(np.random.default_rng(7), OUT, IN)
    stored = {f"a.{name}": tensor for name, tensor in parts.items()}
    stored["b.weight"] = torch.ones(3, 5, dtype=torch.bfloat16)
    tensors = read_tensors(tmp_path_factory.mktemp("set") / "w.safetensors", stored, config)
    assert set(tensors) == {"a.weight", "b.weight"}, "one tensor a set, and what the config excludes is plain"
    assert torch.equal(read_whole(tensors["b.weight"]), stored["b.weight"])
    return tensors["a.weight"], values


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_rows_in_any_tiles_have_the_values_of_the_format(weight, data):
    tensor, values = weight
    assert tensor.shape == values.shape
    start = data.draw(st.integers(0, OUT - 1))
    stop = data.draw(st.integers(start + 1, OUT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexgen_helm.checkpoint.checkpoint.TILE_ELEMENTS", data.draw(st.integers(1, 3000)))
        tiles = list(tensor.tiles([range(start, stop), range(0, 1)]))
    expected = torch.cat([values[start:stop], values[:1]])
    assert torch.equal(torch.cat(tiles).view(-1, IN), expected)


@pytest.mark.parametrize("scales", [torch.float32, torch.uint8])
def test_fp8_equals_transformers(tmp_path, scales):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(1)
    codes = (torch.randn(256, 384, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator) / 100
    if scales == torch.uint8:
        scale = torch.randint(100, 126, (2, 3), generator=generator, dtype=torch.uint8)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensor = read_tensors(tmp_path / "w.safetensors", {"a.weight": codes, "a.weight_scale_inv": scale}, config)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
    assert torch.equal(read_whole(tensor["a.weight"]).to(torch.bfloat16), expected)


def test_fp4_experts_beside_fp8_equal_transformers(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-128, 128, (24, 48), generator=generator, dtype=torch.int8)
    scale = torch.randint(100, 126, (24, 3), generator=generator, dtype=torch.uint8)
    stored = {"a.weight": codes, "a.scale": scale}
    tensor = read_tensors(tmp_path / "w.safetensors", stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
    assert torch.equal(read_whole(tensor["a.weight"]).to(torch.bfloat16), expected)


def test_mxfp4_of_experts_equals_transformers_without_rounding(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 250, (3, 10, 2), generator=generator, dtype=torch.uint8)
    stored = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    tensor = read_tensors(tmp_path / "w.safetensors", stored, {"quant_method": "mxfp4"})["experts.gate_up_proj"]
    values = read_whole(tensor)
    assert tensor.shape == (3, 64, 10)
    assert torch.equal(values.to(torch.bfloat16).float(), values), "bfloat16 has all values"
    assert torch.equal(values.to(torch.bfloat16), convert_moe_packed_tensors(blocks, scales))
    rows = [range(70, 130), range(5, 6)]
    assert torch.equal(
        torch.cat(list(tensor.tiles(rows))), torch.cat([values.view(-1, 10)[r.start : r.stop] for r in rows]).view(-1)
    )


@pytest.mark.parametrize("shape", [(3, 1, 1), (3,), (3, 8, 1), (3, 1, 12), (3, 2, 3), (1,), ()])
def test_scales_of_stacked_experts(tmp_path, shape):
    """One for all; one for each expert, row, or column of each; or a grid for each."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(3, 8, 12, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator)
    stored = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale": scale}
    tensor = read_tensors(tmp_path / "w.safetensors", stored, {"quant_method": "fbgemm_fp8"})["experts.gate_up_proj"]
    grid = scale.view(3, 1, 1) if shape == (3,) else scale
    if shape == (3, 2, 3):
        grid = scale.repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert torch.equal(read_whole(tensor), codes.float() * grid)


def test_blocks_that_are_cut_off_are_not_taken_for_equal_ones(tmp_path):
    """24 rows in blocks of 16 have as many scales as two blocks of 12."""
    parts, values = fp8_by_block(np.random.default_rng(9), 24, 40, block=16)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    tensor = read_tensors(tmp_path / "w.safetensors", {f"a.{name}": part for name, part in parts.items()}, config)
    assert torch.equal(read_whole(tensor["a.weight"]), values)


# ---- whole models ----

# One of each layout; all values of all formats are compared above.
MODELS = (
    "gptq-act-order", "awq", "int4-packed-zero-points", "int8", "fp8-by-cut-block", "nvfp4", "bnb-int8",
    "bnb-nf4-nested",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_random(folder, llama_config(**sizes, tie_word_embeddings=False), 3, "bfloat16")
    return folder


def quantize(plain, folder, fmt):
    """Write a quantized copy of a folder; returns the plain tensors with the values of the quantized ones."""
    shutil.copytree(plain, folder)
    config, write = FORMATS[fmt]
    rng = np.random.default_rng(11)
    values = load_file(folder / "model.safetensors")
    stored = {}
    for name, tensor in values.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, values[name] = write(rng, *tensor.shape)
        stored |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config=config)
    return values


@pytest.mark.parametrize("fmt", MODELS)
def test_a_quantized_model_reads_as_its_values_rounded_once(plain, tmp_path, fmt):
    values = quantize(plain, tmp_path / "quantized", fmt)
    quantized = open_checkpoint(tmp_path / "quantized")
    shutil.copytree(plain, tmp_path / "expected")
    rounded = {name: tensor.to(quantized.storage_dtype).contiguous() for name, tensor in values.items()}
    save_file(rounded, tmp_path / "expected" / "model.safetensors")
    expected = open_checkpoint(tmp_path / "expected")
    assert quantized.storage_dtype == expected.storage_dtype
    assert quantized.fingerprint != expected.fingerprint
    for name in expected.shapes:
        assert torch.equal(quantized.tensor(name), expected.tensor(name)), name
        assert torch.equal(torch.cat(list(quantized.tiles(name))), expected.tensor(name).view(-1)), name


# Format -> the format that its matrices rest in, and whether rows of it are gathered from the file.
RESTS = {
    "gptq-2-bits": ("U2 F16 32 zero", False),
    "gptq-3-bits": ("U3 F16 32 zero", False),
    "gptq-4-bits": ("U4 F16 32 zero", False),
    "gptq-symmetric": ("U4 F16 32", False),
    "gptq-8-bits": ("U8 F16 32 zero", False),
    "gptq-version-2": ("U4 F16 32 zero", False),
    "gptq-cut-group": ("U4 F16 32 zero", False),
    "gptq-groups-of-16": ("U4 F16 16 zero", False),
    "awq": ("U4 F16 32 zero", False),
    "awq-cut-group": ("U4 F16 32 zero", False),
    "int4-packed-symmetric": ("U4 F16 32", True),
    "int4-packed-by-row": ("U4 F16 32", True),
    "int8-packed": ("U8 F16 32", True),
    "int4-packed-zero-points": ("U4 F16 32 zero", False),
    "int8": ("I8 BF16 32", True),
    "int8-zero-points": ("I8 BF16 32 zero", True),
    "fp8-compressed": ("F8_E4M3 F32 32", True),
    "nvfp4": ("FP4 F8_E4M3 16", True),
    "mxfp4-packed": ("FP4 F8_E8M0 32", True),
    "fp8-by-block": ("F8_E4M3 F32 16", True),
    "fp8-by-tensor": ("F8_E4M3 BF16 32", True),
    "fp8-fbgemm": ("F8_E4M3 F32 32", True),
    "mxfp8": ("F8_E4M3 F8_E8M0 32", True),
    "bnb-int8": ("I8 F32 32 x 0.00787", True),
    "bnb-nf4": ("NF4 F32 32", None),  # where rows are whole blocks
    "bnb-nf4-nested": ("NF4 F32 32", False),
}
EXPANDED = FORMATS.keys() - RESTS


@pytest.mark.parametrize("fmt", FORMATS)
def test_matrices_rest_as_published(plain, tmp_path, fmt):
    """Bit for bit the values of the slow formula, by plain torch and by the compiled loop."""
    values = quantize(plain, tmp_path / "model", fmt)
    checkpoint = open_checkpoint(tmp_path / "model")
    if fmt in EXPANDED:
        assert not checkpoint.formats and ("act-order" in fmt or "cut" in fmt)
        ((in_files, in_16_bits),) = checkpoint.expanded.values()
        elements = sum(prod(checkpoint.shapes[name]) for name in checkpoint.shapes if name.startswith("layers."))
        assert in_files < in_16_bits == 2 * (elements - 4 * 64)
        return
    assert not checkpoint.expanded
    assert len(checkpoint.formats) == 14
    by_name, (title, in_rows) = checkpoint.formats, RESTS[fmt]
    for name, packed_format in by_name.items():
        stored = name.replace("attn", "self_attn").replace(".weight", "_proj.weight")
        expected = values[f"model.{stored}"]
        packed = torch.cat([*checkpoint.packed_tiles(name)]).view(len(expected), -1)
        assert packed_format.name.replace(" 64", " 32") == title
        in_rows_here = expected.shape[1] == 64 if in_rows is None else in_rows
        assert bool(checkpoint.stored_rows(name)) == in_rows_here
        assert torch.equal(decode(packed, packed_format), expected), name
        assert torch.equal(decode_into(packed, packed_format, torch.empty(expected.shape)), expected), name
        assert trial.loops_in_use[f"products with {packed_format.name}"] == "compiled"


@pytest.mark.parametrize(
    "fmt",
    [
        "gptq-2-bits", "gptq-3-bits", "gptq-symmetric", "gptq-act-order", "awq", "int4-packed-symmetric", "int8",
        "nvfp4", "mxfp4-packed", "mxfp8", "fp8-fbgemm", "bnb-int8", "bnb-nf4",
    ],
)  # fmt: skip
def test_a_plan_counts_the_bytes_at_rest(plain, tmp_path, fmt):
    quantize(plain, tmp_path / "model", fmt)
    sizes = [
        {name: fmt.packed_bytes(64, 192) for name, fmt in formats.items()}
        for formats in (
            planned_precision(tmp_path / "model", "fp16").published.by_name,
            open_checkpoint(tmp_path / "model").formats,
        )
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("way", ["in memory", "from a disk", "from a disk to a gpu"])
@pytest.mark.parametrize("fmt", ["gptq-4-bits", "gptq-symmetric", "int4-packed-symmetric", "nvfp4", "bnb-nf4-nested"])
def test_log_probabilities_equal_those_of_the_published_values(plain, tmp_path, fmt, way):
    from transformers import AutoModelForCausalLM

    values = quantize(plain, tmp_path / "model", fmt)
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    dtype = open_checkpoint(tmp_path / "model").storage_dtype  # of what is not quantized
    rounded = {name: tensor if "_proj" in name else tensor.to(dtype) for name, tensor in values.items()}
    theirs.load_state_dict({name: tensor.float() for name, tensor in rounded.items()})

    def logprobs(ids):
        with torch.no_grad():
            return theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    asked = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=4, echo_logprobs=True, ignore_eos=True)
        for ids in prompts(6, 30, seed=5)
    ]
    folder, policy = tmp_path / "offload", Policy(4, 8, 0, 0, 1, 0, 1, 0)
    ways = {
        "in memory": {},
        "from a disk": {"policy": policy},
        "from a disk to a gpu": {"device": "sim", "limits": MemoryLimits(gpu=64 << 20), "policy": policy},
    }

    def results():
        with Engine.from_pretrained(tmp_path / "model", offload_dir=folder, unverified=True, **ways[way]) as engine:
            return engine.run(asked)

    for request, result in zip(asked, results(), strict=True):
        assert max(differences(logprobs, list(request.prompt_token_ids), result)) < 1e-5
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if ".mlp." in path.name}
    assert bool(written) == (way != "in memory" and not RESTS[fmt][1]), written
    results()
    assert written == {path: path.stat().st_mtime_ns for path in written}


def test_a_pickled_quantized_model_is_converted_and_verified(plain, tmp_path):
    quantize(plain, tmp_path / "model", "gptq-act-order")
    expected = open_checkpoint(tmp_path / "model")
    pickled = tmp_path / "pickled"
    shutil.copytree(tmp_path / "model", pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    convert(pickled, out=tmp_path / "converted")
    converted = open_checkpoint(tmp_path / "converted")
    name = "layers.1.mlp.down.weight"
    assert torch.equal(converted.tensor(name), expected.tensor(name))
    file = tmp_path / "converted" / "model.safetensors"
    header = read_header(file)[f"{LAYER}.qzeros"]
    with file.open("r+b") as opened:
        opened.seek(header.offset)
        byte = opened.read(1)[0]
        opened.seek(header.offset)
        opened.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        open_checkpoint(tmp_path / "converted")


# ---- faults ----

LAYER = "model.layers.1.mlp.down_proj"
SCALES = f"{LAYER}.scales"


def parts_of(fmt):
    """Endings without which a set cannot be read."""
    optional = {"g_idx", "activation_scale", "input_scale", "weight_format", "weight_zero_point", "weight_g_idx"}
    return [part for part in FORMATS[fmt][1](np.random.default_rng(0), 32, 64)[0] if part not in optional]


@pytest.mark.parametrize("fmt", MODELS)
def test_each_part_that_lacks_or_has_another_shape_or_type_is_refused(plain, tmp_path, fmt):
    quantize(plain, tmp_path / "model", fmt)
    SafetensorsCheckpoint(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    for name in (f"{LAYER}.{part}" for part in parts_of(fmt)):
        for damaged in ({}, {name: stored[name].reshape(-1).repeat(3)}, {name: stored[name].to(torch.int16)}):
            save_file({key: tensor for key, tensor in stored.items() if key != name} | damaged, file)
            with pytest.raises(CheckpointError, match=LAYER):
                SafetensorsCheckpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("fmt", "part", "value"),
    [
        ("awq", "scales", float("nan")),
        ("fp8-by-block", "weight_scale_inv", float("inf")),
        ("mxfp8", "weight_scale_inv", 255),  # the exponent that stands for NaN
    ],
)
def test_a_scale_that_is_not_finite_is_refused_when_read(plain, tmp_path, fmt, part, value):
    quantize(plain, tmp_path / "model", fmt)
    edit_weights(tmp_path / "model", lambda tensors: tensors[f"{LAYER}.{part}"].view(-1)[3:4].fill_(value))
    checkpoint = SafetensorsCheckpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match=rf"{LAYER}.*not finite"):
        checkpoint.tensor("layers.1.mlp.down.weight")
    checkpoint.tensor("layers.0.mlp.down.weight")
    if fmt == "awq":
        with pytest.raises(CheckpointError, match=rf"{LAYER}.*not finite"):
            list(checkpoint.packed_tiles("layers.1.mlp.down.weight"))
        list(checkpoint.packed_tiles("layers.0.mlp.down.weight"))


@pytest.mark.parametrize("group", [-1, 99])
def test_a_group_that_does_not_exist_is_refused(plain, tmp_path, group):
    for fmt, part in (("gptq-act-order", "g_idx"), ("int4-packed-act-order", "weight_g_idx")):
        folder = tmp_path / fmt
        quantize(plain, folder, fmt)
        edit_weights(folder, lambda tensors, part=part: tensors[f"{LAYER}.{part}"][:1].fill_(group))
        with pytest.raises(CheckpointError, match=f"{LAYER}.{part} names groups outside 0 to 2"):
            SafetensorsCheckpoint(folder).tensor("layers.1.mlp.down.weight")


def test_scales_of_activations_are_refused(plain, tmp_path):
    """AWQ writes them for architectures whose scales cannot be folded into a neighbour; without them results differ."""
    quantize(plain, tmp_path / "model", "awq")
    edit_weights(tmp_path / "model", lambda tensors: tensors.update({"model.layers.0.mlp.act.scales": torch.ones(96)}))
    with pytest.raises(CheckpointError, match=r"mlp\.act\.scales has no model\.layers\.0\.mlp\.act\.qweight"):
        SafetensorsCheckpoint(tmp_path / "model")


@pytest.mark.parametrize("fmt", ["awq", "nvfp4"])
def test_a_part_of_unknown_meaning_is_refused(plain, tmp_path, fmt):
    quantize(plain, tmp_path / "model", fmt)
    more = {f"{LAYER}.bias": torch.zeros(64), f"{LAYER}.input_scale": torch.ones(1), "model.extra_scale": torch.ones(1)}
    edit_weights(tmp_path / "model", lambda tensors: tensors.update(more))
    SafetensorsCheckpoint(tmp_path / "model")
    edit_weights(tmp_path / "model", lambda tensors: tensors.update({f"{LAYER}.pre_quant_scale": torch.ones(96)}))
    with pytest.raises(CheckpointError, match=f"{LAYER}.pre_quant_scale would change what is computed"):
        SafetensorsCheckpoint(tmp_path / "model")


@pytest.mark.parametrize("state", [b"{", b'{"shape": [-1, 2], "blocksize": 64, "dtype": "float16"}'])
def test_a_damaged_state_of_bitsandbytes_is_refused(plain, tmp_path, state):
    quantize(plain, tmp_path / "model", "bnb-nf4")
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    edit_weights(tmp_path / "model", lambda t: t.update({name: torch.frombuffer(bytearray(state), dtype=torch.uint8)}))
    with pytest.raises(CheckpointError, match="quant_state"):
        SafetensorsCheckpoint(tmp_path / "model")


def test_a_tensor_that_is_plain_and_quantized_is_refused(plain, tmp_path):
    quantize(plain, tmp_path / "model", "awq")
    edit_weights(tmp_path / "model", lambda tensors: tensors.update({f"{LAYER}.weight": torch.ones(64, 96)}))
    with pytest.raises(CheckpointError, match="twice"):
        SafetensorsCheckpoint(tmp_path / "model")


# ---- what config.json says of the stored tensors ----


def gptq_set(bits, stored_zero, g_idx=None):
    """A drawn set of three groups that stores one zero point, and its values where that means 2 ** (bits - 1)."""
    parts, _ = gptq(np.random.default_rng(5), OUT, IN, bits)
    half = 1 << (bits - 1)
    parts["qzeros"] = _words(np.full((OUT, 3), stored_zero), bits).T.contiguous()
    group = torch.arange(IN) // 32
    if g_idx is not None:
        parts["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    mask = (1 << bits) - 1
    stream = [
        sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(column)) for column in parts["qweight"].t()
    ]
    codes = torch.tensor([[(number >> bits * i & mask) - half for i in range(IN)] for number in stream])
    return {f"a.{name}": part for name, part in parts.items()}, codes * parts["scales"].float().t()[:, group]


@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("less", [0, 1])
def test_symmetric_gptq_has_its_zero_point_whichever_version_stored_it(tmp_path, fmt, bits, less):
    stored, values = gptq_set(bits, (1 << (bits - 1)) - less)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True, "desc_act": False}
    config |= {("checkpoint_format", "format")[bits % 3 == 2]: fmt} if fmt else {}
    assert torch.equal(read_whole(read_tensors(tmp_path / "w", stored, config)["a.weight"]), values)
    follows = read_whole(read_tensors(tmp_path / "w", stored, config | {"sym": False})["a.weight"])
    assert torch.equal(follows, values) == (less == (fmt != "gptq_v2")), "without sym the version decides"


def test_zero_points_that_are_not_symmetric_are_refused_where_they_should_be(tmp_path):
    parts, values = gptq(np.random.default_rng(5), OUT, IN)
    stored = {f"a.{name}": part for name, part in parts.items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    tensor = read_tensors(tmp_path / "w", stored, config)["a.weight"]
    for read in (lambda: read_whole(tensor), tensor.published.lay_out):
        with pytest.raises(CheckpointError, match=r"a\.qzeros has zero points from \d+ to 14, but 'sym' .* means 8"):
            read()
    for honest in ({**config, "sym": False}, {**config, "dynamic": {"+:.*": {"sym": False}}}):
        assert torch.equal(read_whole(read_tensors(tmp_path / "w", stored, honest)["a.weight"]), values)


@pytest.mark.parametrize(
    ("desc_act", "g_idx", "message"),
    [
        (False, [0] * IN, None),
        (False, None, None),
        (True, [0] * IN, "g_idx names 1 of 3 groups"),
        (None, [0] * IN, "g_idx names 1 of 3 groups"),
        (False, [0] * 48 + [2] * 48, "g_idx names 2 of 3 groups"),
    ],
)
def test_a_g_idx_that_cannot_be_meant(tmp_path, desc_act, g_idx, message):
    stored, values = gptq_set(4, 7, g_idx)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    tensors = read_tensors(tmp_path / "w", stored, config | ({} if desc_act is None else {"desc_act": desc_act}))
    if message is None:
        assert torch.equal(read_whole(tensors["a.weight"]), values)
        return
    with pytest.raises(CheckpointError, match=message):
        read_whole(tensors["a.weight"])


@pytest.mark.parametrize(
    ("fmt", "part", "settings", "message"),
    [
        ("gptq-4-bits", "g_idx", {"desc_act": True}, "sorted inputs, but its g_idx is missing"),
        ("int4-packed-act-order", "weight_g_idx", {"actorder": "group"}, "sorted inputs, but its g_idx is missing"),
        ("int4-packed-act-order", "weight_g_idx", {"actorder": "static"}, None),
        ("int4-packed-zero-points", "weight_zero_point", {"symmetric": False}, "weight_zero_point is missing"),
        ("int8-zero-points", "weight_zero_point", {"symmetric": False}, "weight_zero_point is missing"),
        ("int8-zero-points", "weight_zero_point", {"symmetric": True}, None),
        ("gptq-4-bits", None, {"group_size": 48}, r"3 groups for 96 inputs, but config.json has group sizes \(48,\)"),
        ("gptq-4-bits", None, {"dynamic": {"+:.*mlp.*": {"group_size": 40}}}, r"group sizes \(32, 40\)"),
        ("gptq-4-bits", None, {"dynamic": {"-:.*mlp.*": {}, "+:.*": {"group_size": 64, "bits": 8}}}, None),
    ],
)
def test_parts_that_config_json_asks_for(tmp_path, fmt, part, settings, message):
    config, write = FORMATS[fmt]
    stored = {
        f"a.{name}": tensor for name, tensor in write(np.random.default_rng(0), OUT, IN)[0].items() if name != part
    }
    weights = config.get("config_groups", {}).get("group_0", {}).get("weights")
    if weights is not None:
        group = {"targets": ["Linear"], "weights": {**weights, **settings}}
        config = {**config, "config_groups": {"group_0": group}}
    else:
        config = {**config, **settings}
    if message is None:
        assert set(read_tensors(tmp_path / "w", stored, config)) == {"a.weight"}
        return
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path / "w", stored, config)


def test_int8_rows_of_bitsandbytes_that_are_permuted_are_refused(tmp_path):
    config, write = FORMATS["bnb-int8"]
    stored = {f"a.{name}": tensor for name, tensor in write(np.random.default_rng(0), OUT, IN)[0].items()}
    stored["a.weight_format"] = torch.tensor(2, dtype=torch.uint8)  # col_turing
    with pytest.raises(CheckpointError, match="a.weight_format: rows of int8 are permuted"):
        read_tensors(tmp_path / "w", stored, config)


# ---- configurations ----


def _arguments(bits, kind, strategy, **more):
    return {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": bits,
        "observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True, "type": kind, **more,
    }  # fmt: skip


def _llm_compressor(fmt, weights, activations=None):
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": fmt, "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


_TOKEN = _arguments(8, "float", "token", dynamic=True, observer=None)
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True}
_LOADING = {
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
}  # fmt: skip
# Where published -> quantization_config.
PUBLISHED = {
    "openai/gpt-oss-20b": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "deepseek-ai/DeepSeek-V3": _FP8,
    "deepseek-ai/DeepSeek-V3.2": _FP8 | {"scale_fmt": "ue8m0"},
    "Qwen/Qwen3-30B-A3B-FP8": _FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    "MiniMaxAI/MiniMax-M2": _FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate"]},
    "mistralai/Ministral-3-3B": {
        "activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8", "weight_block_size": None,
    },
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV": {
        "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static",
        "quant_method": "fp8",
    },
    "meta-llama/Llama-3.1-405B-Instruct-FP8": {
        "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8",
    },
    "zai-org/GLM-4.5-FP8": _llm_compressor("float-quantized", _arguments(8, "float", "channel"), _TOKEN),
    "moonshotai/Kimi-K2-Thinking": _llm_compressor("pack-quantized", _arguments(4, "int", "group", group_size=32)),
    "an NVFP4 folder of llm-compressor": _llm_compressor(
        "nvfp4-pack-quantized",
        _arguments(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn", zp_dtype=None),
        _arguments(4, "float", "tensor_group", group_size=16, dynamic="local"),
    ) | {"transform_config": {}, "sparsity_config": {}, "version": "0.12.2"},
    "an early folder of llm-compressor": _llm_compressor("int-quantized", _arguments(8, "int", "channel"))
    | {"quantization_status": "frozen", "sparsity_config": {"format": "dense", "ignore": [], "targets": []}},
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": _GPTQ | {
        "damp_percent": 0.01, "desc_act": False, "model_file_base_name": None, "model_name_or_path": None,
        "static_groups": False, "true_sequential": True,
    },
    "TheBloke/Llama-2-7B-Chat-GPTQ": _GPTQ | {
        "damp_percent": 0.01, "desc_act": True, "model_file_base_name": "model", "true_sequential": True,
    },
    "a folder of GPTQModel": _GPTQ | {
        "checkpoint_format": "gptq", "desc_act": False, "dynamic": {"-:.*mlp.gate.*": {}, "+:.*": {"bits": 8}},
        "format": "gptq", "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.6.0"]}, "method": "gptq",
        "pack_dtype": "int32", "pack_impl": "cpu",
    },
    "a GPTQ folder of auto-round": _GPTQ | {
        "amp": True, "autoround_version": "0.5.1", "batch_size": 8, "block_name_to_quantize": "model.layers",
        "damp_percent": 0.01, "data_type": "int", "desc_act": False, "enable_minmax_tuning": True, "iters": 200,
        "enable_quanted_input": True, "gradient_accumulate_steps": 1, "low_gpu_mem_usage": True, "lr": 0.005,
        "minmax_lr": 0.005, "nsamples": 128, "provider": "auto-round", "scale_dtype": "torch.float16", "seqlen": 2048,
        "to_quant_block_names": None, "true_sequential": False,
    },
    "Qwen/Qwen2.5-7B-Instruct-AWQ": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "quant_config.json of AutoAWQ": {
        "q_group_size": 128, "quant_method": "awq", "version": "GEMM", "w_bit": 4, "zero_point": True,
    },
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": _LOADING | {
        "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes",
    },
    "without a method": _LOADING | {"load_in_8bit": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_and_an_unknown_key_is_refused(name):
    config = PUBLISHED[name]
    read = read_quantization({"quantization_config": config}, Path("config.json"))
    assert read is not None
    for neutral in (None, False, {}, []):
        assert read_quantization({"quantization_config": config | {"new_key": neutral}}, Path("config.json")) == read
    with pytest.raises(
        CheckpointError, match=rf"{read.method} weights have settings that are not known here .new_key 2"
    ):
        read_quantization({"quantization_config": config | {"new_key": 2}}, Path("config.json"))


def test_what_transformers_writes_is_read():
    """Every key that its classes write, of the methods that are read here."""
    from transformers.utils import quantization_config as classes

    written = [
        classes.GPTQConfig(bits=4, dataset="c4", tokenizer="t", desc_act=True, modules_in_block_to_quantize=None),
        classes.AwqConfig(modules_to_not_convert=["lm_head"]),
        classes.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]),
        classes.FbgemmFp8Config(modules_to_not_convert=["lm_head"]),
        classes.Mxfp4Config(modules_to_not_convert=["lm_head"], dequantize=True),
        classes.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
        classes.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"]),
    ]
    for config in written:
        content = json.loads(json.dumps(config.to_dict(), default=str))
        read = read_quantization({"quantization_config": content}, Path("config.json"))
        assert read is not None and read.method in str(content["quant_method"])


@pytest.mark.parametrize("both", [True, False])
def test_mlx_folders_are_refused_by_name(both):
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    content = {"quantization": settings, **({"quantization_config": settings} if both else {})}
    with pytest.raises(
        CheckpointError, match=r"unnamed method \(as in folders of MLX\) cannot be read .* use the original"
    ):
        read_quantization(content, Path("config.json"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "eetq"}, "eetq cannot be read .its int8 layout"),
        ({"quant_method": "new"}, "new cannot be read .supported are mxfp4"),
        ({}, None),
        ({"bits": 4}, "an unnamed method"),
        ("fp8", "must be an object"),
        ({"quant_method": "awq", "version": "gemv"}, "awq weights have version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "layout of llm-awq"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "damaged"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": []}}, "damaged"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"rotation": "x"}}}, "not known here .rotation"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"hi": 1}}}},
            "not known here .hi 1",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"dynamic": True}}}},
            "dynamic True",
        ),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "not known here .rotation 'hadamard'"),
        ({"quant_method": "gptq", "pack_dtype": "int16"}, "not known here .pack_dtype 'int16'"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"}, "format 'gptq and gptq_v2'"),
        ({"quant_method": "gptq", "dynamic": {"+:a": {"adapter": {"rank": 8}}}}, "not known here .adapter"),
        ({"quant_method": "awq", "checkpoint_format": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit 8"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point False"),
        ({"quant_method": "metal", "bits": 4}, "metal cannot be read .its layout is of Apple"),
    ],
)
def test_configurations_that_cannot_be_read_say_why(config, message):
    content = {"quantization_config": config}
    if message is None:
        assert read_quantization(content, Path("config.json")) is None
        return
    with pytest.raises(CheckpointError, match=message):
        read_quantization(content, Path("config.json"))
    with pytest.raises(CheckpointError, match=message):
        read_quantization({"text_config": content}, Path("config.json"))


def test_every_method_is_tested():
    tested = {read_quantization({"quantization_config": config}, Path()).method for config, _ in FORMATS.values()}
    assert tested | {"mxfp4"} == set(METHODS)


def test_a_plan_says_the_size_in_16_bits(plain, tmp_path, capsys):
    words = ["plan", "--prompt-len", "8", "--gen-len", "4", "--hardware", "t4", "--model"]
    quantize(plain, tmp_path / "model", "gptq-act-order")
    parameters = open_checkpoint(tmp_path / "model").config.num_parameters
    assert main([*words, str(tmp_path / "model")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    counted = re.search(r"stored as gptq and read as 16 bits; the plan counts ([\d.]+) KiB in fp16\.", said)
    assert counted and float(counted[1]) == pytest.approx(2 * parameters / 1024, rel=0.01)  # without vectors
    assert main([*words, str(plain)]) == 0
    assert "16 bits" not in capsys.readouterr().out
