"""Every entry of a causal model of transformers is read, bit for bit, from what `save_pretrained`
writes.
"""

from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm.checkpoint.quantized.config import read_quantization
from flexgen_helm.checkpoint.quantized.readers import logical_tensors
from flexgen_helm.checkpoint.state_dict_checkpoint import StateDictCheckpoint, StateDictReader
from flexgen_helm.checkpoint.stored_tensors import StoredTensor, read_header
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.blocks import decode
from tests.helpers.model_folders import edit_config
from tests.helpers.quantized_sets import awq, fp8_by_block, nvfp4
from tests.helpers.tiny_causal_models import tiny_config

transformers = pytest.importorskip("transformers")

LLAMA, MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
EXPERTS = "model.layers.1.mlp.experts"
# One of each kind of mapping: names only, old names, stacked experts from lists and from tensors,
# transposed and fused.
CLASSES = [
    "LlamaForCausalLM",
    "GPTNeoXForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "GraniteMoeForCausalLM",
    "JambaForCausalLM",
    "PhimoeForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Llama4ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "DeepseekV4ForCausalLM",
]


def build(name, folder=None, shard_size="1GB", **changes):
    """Return a model with random weights, saved to a folder, and the same without data."""
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        empty = getattr(transformers, name)(config)
    torch.manual_seed(5)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model, empty


def open_reader(empty, folder, config=None):
    files = sorted(folder.glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in read_header(file).items()}
    quantization = read_quantization({"quantization_config": config}, folder)
    return StateDictReader(empty, logical_tensors(stored, quantization, folder), folder)


def read(reader, key, expert=None):
    shape = reader.shapes[key] if expert is None else reader.shapes[key][1:]
    return torch.cat(list(reader.tiles(key, expert))).view(shape)


def assert_equal_to(reader, model):
    """Compare all entries with the model's, stacked ones by expert too; returns the number of
    those.
    """
    state, num_stacked = model.state_dict(), 0
    assert set(reader.shapes) == set(state)
    for key, expected in state.items():
        assert torch.equal(read(reader, key), expected), key
        if "experts" in key and expected.ndim > 1 and not key.endswith("weight"):
            num_stacked += 1
            for expert in range(len(expected)):
                assert torch.equal(read(reader, key, expert), expected[expert]), (key, expert)
    return num_stacked


@pytest.mark.parametrize("name", CLASSES)
def test_a_saved_model_is_read_bit_for_bit(name, tmp_path):
    model, empty = build(name, tmp_path)
    assert_equal_to(open_reader(empty, tmp_path), model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_shards_and_tied_heads(name, tied, tmp_path):
    model, empty = build(name, tmp_path, "20KB", tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    reader = open_reader(empty, tmp_path)
    assert (assert_equal_to(reader, model) > 0) == (name != "LlamaForCausalLM")
    assert (
        torch.equal(read(reader, "lm_head.weight"), read(reader, "model.embed_tokens.weight"))
        == tied
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built(name) -> model, the same without data, its tensors."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp(name)
        model, empty = build(name, folder, tie_word_embeddings=name == LLAMA)
        return model, empty, load_file(folder / "model.safetensors")

    return get


@pytest.fixture
def llama(built):
    return built(LLAMA)


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def test_a_tied_weight_may_be_stored_under_either_name_and_the_prefix_may_lack(llama, tmp_path):
    model, empty, tensors = llama
    assert "lm_head.weight" not in tensors
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_equal_to(open_reader(empty, write(tmp_path / "base", tensors)), model)
    tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")
    assert_equal_to(open_reader(empty, write(tmp_path / "head", tensors)), model)
    del tensors["lm_head.weight"]
    with pytest.raises(
        CheckpointError,
        match=(r"lacks the tensor model\.embed_tokens\.weight, which its config\.json"),
    ):
        open_reader(empty, write(tmp_path / "none", tensors))


UP = "model.layers.1.mlp.up_proj.weight"
FAULTS = [
    (LLAMA, lambda t: t.pop(UP), f"lacks the tensor {UP}"),
    (
        LLAMA,
        lambda t: t.update({UP: t[UP][1:]}),
        rf"tensor {UP} has the shape \[47, 32\] as {UP}, but its config.json ",
    ),
    (LLAMA, lambda t: t.update({UP: t[UP].to(torch.int8)}), f"tensor {UP} has the type I8"),
    (
        LLAMA,
        lambda t: t.update({UP.replace("weight", "bias"): torch.ones(48)}),
        "bias would change what is computed",
    ),
    (LLAMA, lambda t: t.update({UP.removeprefix("model."): torch.ones(48, 32)}), "are both"),
    (MOE, lambda t: t.pop(f"{EXPERTS}.0.gate_proj.weight"), EXPERTS),
    (
        MOE,
        lambda t: [t.pop(f"{EXPERTS}.3.{part}_proj.weight") for part in ("gate", "up", "down")],
        EXPERTS,
    ),
    # Shapes alone would not show that expert 1 lacks and that the others have moved up.
    (
        MOE,
        lambda t: [t.update({n.replace(f"{EXPERTS}.1.", f"{EXPERTS}.9."): t.pop(n)}) for n in [*t]],
        "from 0 on",
    ),
]


@pytest.mark.parametrize("name, damage, message", FAULTS)
def test_faults_are_named(built, tmp_path, name, damage, message):
    _, empty, tensors = built(name)
    tensors = dict(tensors)
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        open_reader(empty, write(tmp_path, tensors))


# ---- experts ----


EXPERTS = "model.layers.1.mlp.experts"


def test_ten_and_more_experts_keep_their_order(tmp_path):
    model, empty = build(MOE, tmp_path, num_experts=12)
    assert model.state_dict()[f"{EXPERTS}.down_proj"].shape[0] == 12
    assert_equal_to(open_reader(empty, tmp_path), model)


@pytest.mark.parametrize("name", [MOE, "GptOssForCausalLM"])
def test_an_expert_is_read_alone(name, tmp_path, monkeypatch):
    _, empty = build(name, tmp_path)
    reader = open_reader(empty, tmp_path)
    key = next(key for key in reader.shapes if key.endswith("experts.down_proj"))
    sizes, original = [], StoredTensor.read
    monkeypatch.setattr(
        StoredTensor, "read", lambda *given: (sizes.append(given[2]), original(*given))[1]
    )
    read(reader, key, 2)
    one = sum(sizes)
    read(reader, key)
    assert one * reader.shapes[key][0] == sum(sizes) - one > 0


# ---- quantized ----


def quantized(tensors, quantize, columns):
    """Tensors with each expert's matrix of a multiple of so many columns quantized, and the values
    of all.
    """
    stored, values = {}, {}
    for name, tensor in tensors.items():
        stored[name] = values[name] = tensor
        if "experts." in name and tensor.shape[1] % columns == 0:
            parts, values[name] = quantize(np.random.default_rng(len(values)), *tensor.shape)
            del stored[name]
            stored |= {
                f"{name.removesuffix('weight')}{ending}": part for ending, part in parts.items()
            }
    return stored, values


def assert_merged(values, merged):
    """merged(expert, 'gate_up') -> matrix."""
    for expert in range(4):
        gate, up, down = (
            values[f"{EXPERTS}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        assert torch.equal(merged(expert, "gate_up"), torch.cat([gate, up]))
        assert torch.equal(merged(expert, "down"), down)


@pytest.mark.parametrize(
    "config, quantize",
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_by_block),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, nvfp4),
    ],
)
def test_quantized_experts_are_merged_with_their_values(built, tmp_path, config, quantize):
    _, empty, tensors = built(MOE)
    stored, values = quantized(tensors, quantize, 16)
    reader = open_reader(empty, write(tmp_path, stored), config)
    assert_merged(values, lambda expert, part: read(reader, f"{EXPERTS}.{part}_proj", expert))
    assert reader.title(f"{EXPERTS}.gate_up_proj").endswith("and 7 more")


def test_experts_whose_codes_lie_in_columns_are_laid_in_rows(tmp_path):
    """Gate above up, in the bytes that both are multiplied in."""
    build(MOE, tmp_path, hidden_size=64, moe_intermediate_size=96)
    stored, values = quantized(load_file(tmp_path / "model.safetensors"), awq, 1)
    write(tmp_path, stored)
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    checkpoint = StateDictCheckpoint(tmp_path)

    def merged(expert, part):
        name = f"layers.1.mlp.experts.{expert}.{part}_proj.weight"
        packed = torch.cat([*checkpoint.packed_tiles(name)]).view(checkpoint.shapes[name][0], -1)
        return decode(packed, checkpoint.formats[name])

    assert_merged(values, merged)
