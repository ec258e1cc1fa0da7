"""Every value of every quantized format equals a slow formula or transformers' own code; faults are
named.
"""

import json
import re
import shutil
from contextlib import nullcontext
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import quantization_config as classes

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.checkpoint.convert import convert
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.planned_weights import planned_precision
from flexgen_helm.checkpoint.quantized.config import METHODS, read_quantization
from flexgen_helm.checkpoint.quantized.readers import logical_tensors
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.checkpoint.stored_tensors import read_header
from flexgen_helm.cli import main
from flexgen_helm.errors import CheckpointError
from flexgen_helm.kernels import trial
from flexgen_helm.quant.block_products import decode_into
from flexgen_helm.quant.blocks import decode
from tests.helpers.model_folders import edit_config, edit_weights
from tests.helpers.parity import differences, prompts
from tests.helpers.paths import ROOT
from tests.helpers.quantized_sets import FORMATS, fp8_by_block, gptq
from tests.helpers.tiny_models import llama_config, save_random

OUT, IN = 64, 96


def read_tensors(path, tensors, config):
    save_file(tensors, path)
    quantization = read_quantization(
        {"quantization_config": config, "dtype": "bfloat16"}, Path("config.json")
    )
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
    assert set(tensors) == {"a.weight", "b.weight"}, (
        "one tensor a set, and what the config excludes is plain"
    )
    assert torch.equal(read_whole(tensors["b.weight"]), stored["b.weight"])
    return tensors["a.weight"], values


@settings(
    max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_any_rows_in_any_tiles_have_the_values_of_the_format(weight, data):
    tensor, values = weight
    assert tensor.shape == values.shape
    start = data.draw(st.integers(0, OUT - 1))
    stop = data.draw(st.integers(start + 1, OUT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "flexgen_helm.checkpoint.logical_tensor.TILE_ELEMENTS",
            data.draw(st.integers(1, 3000)),
        )
        tiles = list(tensor.tiles([range(start, stop), range(0, 1)]))
    expected = torch.cat([values[start:stop], values[:1]])
    assert torch.equal(torch.cat(tiles).view(-1, IN), expected)


def drawn(low, high, *shape, dtype=torch.uint8):
    return torch.randint(
        low, high, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype
    )


def fp8(*shape):
    """Every code but the two that are no numbers."""
    return (drawn(0, 127, *shape) | drawn(0, 2, *shape) << 7).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "name, codes, scales",
    [
        ("weight_scale_inv", fp8(256, 384), drawn(1, 99, 2, 3).float() / 9000),
        ("weight_scale_inv", fp8(256, 384), drawn(100, 126, 2, 3)),
        # FP4 of experts
        ("scale", drawn(-128, 128, 24, 48, dtype=torch.int8), drawn(100, 126, 24, 3)),
    ],
)
def test_fp8_and_fp4_beside_it_equal_transformers(tmp_path, name, codes, scales):
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensor = read_tensors(
        tmp_path / "w.safetensors", {"a.weight": codes, f"a.{name}": scales}, config
    )
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(read_whole(tensor["a.weight"]).to(torch.bfloat16), expected)


def test_mxfp4_of_experts_equals_transformers_without_rounding(tmp_path):
    blocks, scales = drawn(0, 256, 3, 10, 2, 16), drawn(0, 250, 3, 10, 2)
    stored = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    tensor = read_tensors(tmp_path / "w.safetensors", stored, {"quant_method": "mxfp4"})[
        "experts.gate_up_proj"
    ]
    values = read_whole(tensor)
    assert tensor.shape == (3, 64, 10)
    assert torch.equal(values.to(torch.bfloat16).float(), values), "bfloat16 has all values"
    assert torch.equal(values.to(torch.bfloat16), convert_moe_packed_tensors(blocks, scales))
    tiles = torch.cat([*tensor.tiles([range(70, 130), range(5, 6)])])
    assert torch.equal(tiles, values.view(-1, 10)[[*range(70, 130), 5]].view(-1))


@pytest.mark.parametrize("shape", [(3, 1, 1), (3,), (3, 8, 1), (3, 1, 12), (3, 2, 3), (1,), ()])
def test_scales_of_stacked_experts(tmp_path, shape):
    """One for all; one for each expert, row, or column of each; or a grid for each."""
    codes, scale = fp8(3, 8, 12), torch.rand(shape)
    stored = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale": scale}
    tensor = read_tensors(tmp_path / "w.safetensors", stored, {"quant_method": "fbgemm_fp8"})[
        "experts.gate_up_proj"
    ]
    grid = scale.view(3, 1, 1) if shape == (3,) else scale
    if shape == (3, 2, 3):
        grid = scale.repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert torch.equal(read_whole(tensor), codes.float() * grid)


def test_blocks_that_are_cut_off_are_not_taken_for_equal_ones(tmp_path):
    """24 rows in blocks of 16 have as many scales as two blocks of 12."""
    parts, values = fp8_by_block(np.random.default_rng(9), 24, 40, block=16)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    tensor = read_tensors(
        tmp_path / "w.safetensors", {f"a.{name}": part for name, part in parts.items()}, config
    )
    assert torch.equal(read_whole(tensor["a.weight"]), values)


# ---- whole models ----

# One of each layout; all values of all formats are compared above.
MODELS = (
    "gptq-act-order", "awq", "int4-packed-zero-points", "int8", "fp8-by-cut-block", "nvfp4",
    "bnb-int8", "bnb-nf4-nested",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "llama"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    save_random(folder, llama_config(**sizes, tie_word_embeddings=False), 3, "bfloat16")
    return folder


def quantize(plain, folder, fmt):
    """Write a quantized copy of a folder; returns the plain tensors with the values of the
    quantized ones.
    """
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


# Format -> the format that its matrices rest in; with a star where rows of it are gathered from the
# file, and a question mark where those that are whole blocks are.
RESTS = {
    line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1]
    for line in """
gptq-2-bits              U2 F16 32 zero
gptq-3-bits              U3 F16 32 zero
gptq-4-bits              U4 F16 32 zero
gptq-symmetric           U4 F16 32
gptq-8-bits              U8 F16 32 zero
gptq-version-2           U4 F16 32 zero
gptq-cut-group           U4 F16 32 zero
gptq-groups-of-16        U4 F16 16 zero
awq                      U4 F16 32 zero
awq-cut-group            U4 F16 32 zero
int4-packed-symmetric    *U4 F16 32
int4-packed-by-row       *U4 F16 32
int8-packed              *U8 F16 32
int4-packed-zero-points  U4 F16 32 zero
int8                     *I8 BF16 32
int8-zero-points         *I8 BF16 32 zero
fp8-compressed           *F8_E4M3 F32 32
nvfp4                    *FP4 F8_E4M3 16
mxfp4-packed             *FP4 F8_E8M0 32
fp8-by-block             *F8_E4M3 F32 16
fp8-by-tensor            *F8_E4M3 BF16 32
fp8-fbgemm               *F8_E4M3 F32 32
mxfp8                    *F8_E4M3 F8_E8M0 32
bnb-int8                 *I8 F32 32 x 0.00787
bnb-nf4                  ?NF4 F32 32
bnb-nf4-nested           NF4 F32 32
""".strip().splitlines()
}
EXPANDED = FORMATS.keys() - RESTS
# Of whose scales and zero points config.json says too little for a plan.
GUESSED = {
    "int8-packed", "int4-packed-zero-points", "int4-packed-act-order", "int8-zero-points",
    "fp8-compressed", "fp8-by-block", "fp8-by-cut-block", "fp8-by-tensor",
}  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_matrices_read_as_their_values_and_rest_as_published(plain, tmp_path, fmt):
    """Bit for bit the values of the slow formula, rounded once where read, by plain torch and by
    the compiled loop.
    """
    values = quantize(plain, tmp_path / "model", fmt)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.fingerprint != open_checkpoint(plain).fingerprint
    matrices = [
        name for name in checkpoint.shapes if name.startswith("layers.") and "norm" not in name
    ]
    stored = {
        name: name.replace("attn", "self_attn").replace(".weight", "_proj.weight")
        for name in matrices
    }
    for name in matrices:
        expected = values[f"model.{stored[name]}"].to(checkpoint.storage_dtype)
        assert torch.equal(checkpoint.tensor(name), expected), name
        assert torch.equal(torch.cat(list(checkpoint.tiles(name))), expected.view(-1)), name
    planned = planned_precision(tmp_path / "model", "fp16").published.by_name
    sizes = [
        {name: f.packed_bytes(64, 192) for name, f in found.items()}
        for found in (planned, checkpoint.formats)
    ]
    assert (sizes[0] == sizes[1]) == (fmt not in GUESSED), "a plan counts the bytes at rest"
    if fmt in EXPANDED:
        assert not checkpoint.formats and ("act-order" in fmt or "cut" in fmt)
        ((in_files, in_16_bits),) = checkpoint.expanded.values()
        assert in_files < in_16_bits == 2 * sum(prod(checkpoint.shapes[name]) for name in matrices)
        return
    assert not checkpoint.expanded and checkpoint.formats.keys() == {*matrices}
    mark, title = re.fullmatch(r"([*?]?)(.*)", RESTS[fmt]).groups()
    for name, packed_format in checkpoint.formats.items():
        expected = values[f"model.{stored[name]}"]
        packed = torch.cat([*checkpoint.packed_tiles(name)]).view(len(expected), -1)
        assert packed_format.name.replace(" 64", " 32") == title
        assert bool(checkpoint.stored_rows(name)) == (
            mark == "*" or mark == "?" and expected.shape[1] == 64
        )
        assert torch.equal(decode(packed, packed_format), expected), name
        assert torch.equal(
            decode_into(packed, packed_format, torch.empty(expected.shape)), expected
        ), name
        assert trial.loops_in_use[f"products with {packed_format.name}"] == "compiled"


@pytest.mark.parametrize("way", ["in memory", "from a disk", "from a disk to a gpu"])
@pytest.mark.parametrize(
    "fmt", ["gptq-4-bits", "gptq-symmetric", "int4-packed-symmetric", "nvfp4", "bnb-nf4-nested"]
)
def test_log_probabilities_equal_those_of_the_published_values(plain, tmp_path, fmt, way):
    values = quantize(plain, tmp_path / "model", fmt)
    theirs = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    dtype = open_checkpoint(tmp_path / "model").storage_dtype  # of what is not quantized
    theirs.load_state_dict(
        {name: (x if "_proj" in name else x.to(dtype)).float() for name, x in values.items()}
    )

    @torch.no_grad()
    def logprobs(ids):
        return theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    settings = dict(max_tokens=4, echo_logprobs=True, ignore_eos=True)
    asked = [GenerationRequest(prompt_token_ids=ids, **settings) for ids in prompts(6, 30, seed=5)]
    folder, options = (
        tmp_path / "offload",
        {"offload_dir": tmp_path / "offload", "unverified": True},
    )
    if way != "in memory":
        options["policy"] = Policy(4, 8, 0, 0, 1, 0, 1, 0)
    if way.endswith("gpu"):
        options |= {"device": "sim", "limits": MemoryLimits(gpu=64 << 20)}

    def written():
        with Engine.from_pretrained(tmp_path / "model", **options) as engine:
            for request, result in zip(asked, engine.run(asked), strict=True):
                assert max(differences(logprobs, list(request.prompt_token_ids), result)) < 1e-5
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if ".mlp." in path.name}

    first = written()
    assert bool(first) == (way != "in memory" and "*" not in RESTS[fmt]), first
    assert first == written()


def test_a_pickled_quantized_model_is_converted(plain, tmp_path):
    quantize(plain, tmp_path / "model", "gptq-act-order")
    name = "layers.1.mlp.down.weight"
    expected = open_checkpoint(tmp_path / "model").tensor(name)
    file = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "model" / "pytorch_model.bin")
    file.unlink()
    assert torch.equal(open_checkpoint(convert(tmp_path / "model").path).tensor(name), expected)


# ---- faults ----

LAYER = "model.layers.1.mlp.down_proj"
SCALES = f"{LAYER}.scales"


def parts_of(fmt):
    """Endings without which a set cannot be read."""
    optional = {
        "g_idx",
        "activation_scale",
        "input_scale",
        "weight_format",
        "weight_zero_point",
        "weight_g_idx",
    }
    return [
        part
        for part in FORMATS[fmt][1](np.random.default_rng(0), 32, 64)[0]
        if part not in optional
    ]


@pytest.mark.parametrize("fmt", MODELS)
def test_each_part_that_lacks_or_has_another_shape_or_type_is_refused(plain, tmp_path, fmt):
    folder = tmp_path / "model"
    quantize(plain, folder, fmt)
    SafetensorsCheckpoint(folder)
    stored = load_file(folder / "model.safetensors")
    for name in (f"{LAYER}.{part}" for part in parts_of(fmt)):
        for damaged in (
            {},
            {name: stored[name].reshape(-1).repeat(3)},
            {name: stored[name].to(torch.int16)},
        ):
            kept = {key: tensor for key, tensor in stored.items() if key != name}
            save_file(kept | damaged, folder / "model.safetensors")
            with pytest.raises(CheckpointError, match=LAYER):
                SafetensorsCheckpoint(folder)


def fault(fmt, part, change, message):
    """change: a function of the tensor that is stored, or another one."""
    return pytest.param(fmt, part, change, message, id=f"{fmt} {part}")


def fill(value):
    return lambda tensor: tensor.view(-1)[3:4].fill_(value)


def stated(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


GROUPS = "names groups outside 0 to 2"
STATE = "weight.quant_state.bitsandbytes__nf4"
CHANGED = "pre_quant_scale would change what is computed"
FAULTS = [
    fault("awq", "scales", fill(float("nan")), "not finite"),
    fault("fp8-by-block", "weight_scale_inv", fill(float("inf")), "not finite"),
    fault("mxfp8", "weight_scale_inv", fill(255), "not finite"),  # the exponent that stands for NaN
    fault("gptq-act-order", "g_idx", fill(-1), GROUPS),
    fault("gptq-act-order", "g_idx", fill(99), GROUPS),
    fault("int4-packed-act-order", "weight_g_idx", fill(-1), GROUPS),
    fault("int4-packed-act-order", "weight_g_idx", fill(99), GROUPS),
    # AWQ writes scales of activations for architectures where they cannot be folded into a
    # neighbour.
    fault("awq", "act.scales", torch.ones(96), rf"act\.scales has no {LAYER}\.act\.qweight"),
    fault("awq", "pre_quant_scale", torch.ones(96), CHANGED),
    fault("nvfp4", "pre_quant_scale", torch.ones(96), CHANGED),
    fault("bnb-nf4", STATE, stated(b"{"), "quant_state"),
    fault(
        "bnb-nf4",
        STATE,
        stated(b'{"shape": [-1, 2], "blocksize": 64, "dtype": "float16"}'),
        "quant_state",
    ),
    # col_turing
    fault(
        "bnb-int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "rows of int8 are permuted"
    ),
    fault("awq", "weight", torch.ones(64, 96), "twice"),
]


@pytest.mark.parametrize("fmt, part, change, message", FAULTS)
def test_a_fault_is_named_at_the_latest_when_its_tensor_is_read(
    plain, tmp_path, fmt, part, change, message
):
    folder = tmp_path / "model"
    quantize(plain, folder, fmt)
    harmless = {f"{LAYER}.bias": torch.zeros(64), "model.extra_scale": torch.ones(1)}
    edit_weights(folder, lambda tensors: tensors.update(harmless))
    SafetensorsCheckpoint(folder).tensor("layers.1.mlp.down.weight")
    name = f"{LAYER}.{part}"
    edit_weights(
        folder,
        lambda t: t.update({name: change}) if isinstance(change, torch.Tensor) else change(t[name]),
    )
    with pytest.raises(CheckpointError, match=rf"{LAYER}.*{message}"):
        SafetensorsCheckpoint(folder).tensor("layers.1.mlp.down.weight")
    if message == "not finite" and fmt == "awq":
        with pytest.raises(CheckpointError, match=rf"{LAYER}.*not finite"):
            list(SafetensorsCheckpoint(folder).packed_tiles("layers.1.mlp.down.weight"))
    if message == "not finite":
        SafetensorsCheckpoint(folder).tensor("layers.0.mlp.down.weight")


# ---- what config.json says of the stored tensors ----


def gptq_set(bits=4, less=1, g_idx=None):
    """A set of three groups that stores 2 ** (bits - 1), less that much, as every zero point; and
    its values.
    """
    parts, values = gptq(np.random.default_rng(5), OUT, IN, bits, version=2 - less, symmetric=True)
    if g_idx is not None:
        parts["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    return {f"a.{name}": part for name, part in parts.items()}, values


@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("less", [0, 1])
def test_symmetric_gptq_has_its_zero_point_whichever_version_stored_it(tmp_path, fmt, bits, less):
    stored, values = gptq_set(bits, less)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
    }
    config |= {("checkpoint_format", "format")[bits % 3 == 2]: fmt} if fmt else {}
    assert torch.equal(read_whole(read_tensors(tmp_path / "w", stored, config)["a.weight"]), values)
    follows = read_whole(read_tensors(tmp_path / "w", stored, config | {"sym": False})["a.weight"])
    assert torch.equal(follows, values) == (less == (fmt != "gptq_v2")), (
        "without sym the version decides"
    )


def test_zero_points_that_are_not_symmetric_are_refused_where_they_should_be(tmp_path):
    parts, values = gptq(np.random.default_rng(5), OUT, IN)
    stored = {f"a.{name}": part for name, part in parts.items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    tensor = read_tensors(tmp_path / "w", stored, config)["a.weight"]
    for read in (lambda: read_whole(tensor), tensor.published.open_rows):
        with pytest.raises(
            CheckpointError,
            match=(r"a\.qzeros has zero points from \d+ to 14, but 'sym' .* means 8"),
        ):
            read()
    for honest in ({"sym": False}, {"dynamic": {"+:.*": {"sym": False}}}):
        assert torch.equal(
            read_whole(read_tensors(tmp_path / "w", stored, config | honest)["a.weight"]), values
        )


@pytest.mark.parametrize(
    "settings, g_idx, message",
    [
        ({"desc_act": False}, [0] * IN, None),
        ({"desc_act": False}, None, None),
        ({"desc_act": True}, [0] * IN, "g_idx names 1 of 3 groups"),
        ({}, [0] * IN, "g_idx names 1 of 3 groups"),
        ({"desc_act": False}, [0] * 48 + [2] * 48, "g_idx names 2 of 3 groups"),
    ],
)
def test_a_g_idx_that_cannot_be_meant(tmp_path, settings, g_idx, message):
    stored, values = gptq_set(g_idx=g_idx)
    tensors = read_tensors(
        tmp_path / "w", stored, {"quant_method": "gptq", "bits": 4, "group_size": 32, **settings}
    )
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        assert torch.equal(read_whole(tensors["a.weight"]), values)


@pytest.mark.parametrize(
    "fmt, part, settings, message",
    [
        ("gptq-4-bits", "g_idx", {"desc_act": True}, "sorted inputs, but its g_idx is missing"),
        (
            "int4-packed-act-order",
            "weight_g_idx",
            {"actorder": "group"},
            "sorted inputs, but its g_idx is missing",
        ),
        ("int4-packed-act-order", "weight_g_idx", {"actorder": "static"}, None),
        (
            "int4-packed-zero-points",
            "weight_zero_point",
            {"symmetric": False},
            "weight_zero_point is missing",
        ),
        (
            "int8-zero-points",
            "weight_zero_point",
            {"symmetric": False},
            "weight_zero_point is missing",
        ),
        ("int8-zero-points", "weight_zero_point", {"symmetric": True}, None),
        (
            "gptq-4-bits",
            None,
            {"group_size": 48},
            r"3 groups for 96 inputs, but config.json has group sizes \(48,\)",
        ),
        (
            "gptq-4-bits",
            None,
            {"dynamic": {"+:.*mlp.*": {"group_size": 40}}},
            r"group sizes \(32, 40\)",
        ),
        (
            "gptq-4-bits",
            None,
            {"dynamic": {"-:.*mlp.*": {}, "+:.*": {"group_size": 64, "bits": 8}}},
            None,
        ),
    ],
)
def test_parts_that_config_json_asks_for(tmp_path, fmt, part, settings, message):
    config, write = FORMATS[fmt]
    parts, _ = write(np.random.default_rng(0), OUT, IN)
    stored = {f"a.{name}": tensor for name, tensor in parts.items() if name != part}
    config = json.loads(json.dumps(config))
    (config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config).update(
        settings
    )
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        assert set(read_tensors(tmp_path / "w", stored, config)) == {"a.weight"}


# ---- configurations ----


# Where published -> quantization_config.
PUBLISHED = json.loads((ROOT / "tests" / "data" / "quantization_configs.json").read_text())


def read_config(config, **content):
    return read_quantization({"quantization_config": config, **content}, Path("config.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_and_an_unknown_key_is_refused(name):
    read = read_config(PUBLISHED[name])
    assert read is not None
    for neutral in (None, False, {}, []):
        assert read_config(PUBLISHED[name] | {"new_key": neutral}) == read
    with pytest.raises(
        CheckpointError,
        match=(rf"{read.method} weights have settings .* not known here .new_key 2"),
    ):
        read_config(PUBLISHED[name] | {"new_key": 2})


def test_what_transformers_writes_is_read():
    """Every key that its classes write, of the methods that are read here."""
    skip = {"modules_to_not_convert": ["lm_head"]}
    for config in (
        classes.GPTQConfig(
            bits=4, dataset="c4", tokenizer="t", desc_act=True, modules_in_block_to_quantize=None
        ),
        classes.AwqConfig(**skip),
        classes.FineGrainedFP8Config(**skip),
        classes.FbgemmFp8Config(**skip),
        classes.Mxfp4Config(**skip, dequantize=True),
        classes.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
        classes.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"]),
    ):
        content = json.loads(json.dumps(config.to_dict(), default=str))
        read = read_config(content)
        assert read is not None and read.method in str(content["quant_method"])


@pytest.mark.parametrize("settings", [None, {"group_size": 64, "bits": 4, "mode": "affine"}])
def test_mlx_folders_are_refused_by_name(settings):
    with pytest.raises(
        CheckpointError,
        match=(r"unnamed method \(as in folders of MLX\) cannot be read .* use the orig"),
    ):
        read_config(settings, quantization={"group_size": 64, "bits": 4, "mode": "affine"})


REFUSED = yaml.safe_load((ROOT / "tests" / "data" / "quantization_refused.yaml").read_text())


@pytest.mark.parametrize("config, message", [*REFUSED, ("fp8", "must be an object")])
def test_configurations_that_cannot_be_read_say_why(config, message):
    for content in (
        {"quantization_config": config},
        {"text_config": {"quantization_config": config}},
    ):
        with pytest.raises(CheckpointError, match=message):
            read_quantization(content, Path("config.json"))


def test_no_configuration_is_none():
    assert read_config({}) is None


def test_every_method_is_tested():
    tested = {
        read_quantization({"quantization_config": config}, Path()).method
        for config, _ in FORMATS.values()
    }
    assert tested | {"mxfp4"} == set(METHODS)


def test_a_plan_says_the_size_in_16_bits(plain, tmp_path, capsys):
    quantize(plain, tmp_path / "model", "gptq-act-order")
    said = []
    for folder in (tmp_path / "model", plain):
        flags = ["--prompt-len", "8", "--gen-len", "4", "--hardware", "t4"]
        assert main(["plan", *flags, "--model", str(folder)]) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    counted = re.search(
        r"stored as gptq and read as 16 bits; the plan counts ([\d.]+) KiB in fp16\.", said[0]
    )
    parameters = open_checkpoint(tmp_path / "model").config.num_parameters
    assert float(counted[1]) == pytest.approx(2 * parameters / 1024, rel=0.01)  # without vectors
    assert "16 bits" not in said[1]
