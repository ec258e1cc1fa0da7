"""Every entry of a causal model of transformers is read, bit for bit, from what `save_pretrained` writes."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm.checkpoint.quantized.config import read_quantization
from flexgen_helm.checkpoint.quantized.view import logical_tensors
from flexgen_helm.checkpoint.state_dict import StateDictCheckpoint, StateDictReader
from flexgen_helm.checkpoint.stored_tensors import StoredTensor, read_header
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.blocks import decode
from tests.helpers.model_folders import edit_config
from tests.helpers.quantized_sets import awq, fp8_by_block, nvfp4
from tests.helpers.tiny_causal_models import tiny_config

transformers = pytest.importorskip("transformers")

# One of each kind of mapping: names only, old names, stacked experts from lists and from tensors, transposed and fused.
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


def build(name, **changes):
    """Return a model with random weights, and the same without data."""
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        empty = getattr(transformers, name)(config)
    torch.manual_seed(5)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_()
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
    """Compare all entries with the model's, stacked ones by expert too; returns the number of those."""
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
    model, empty = build(name)
    model.save_pretrained(tmp_path)
    assert_equal_to(open_reader(empty, tmp_path), model)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_shards_and_tied_heads(name, tmp_path):
    for tied in (True, False):
        model, empty = build(name, tie_word_embeddings=tied)
        folder = tmp_path / str(tied)
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        reader = open_reader(empty, folder)
        stacked = assert_equal_to(reader, model)
        assert (stacked > 0) == (name != "LlamaForCausalLM")
        assert torch.equal(read(reader, "lm_head.weight"), read(reader, "model.embed_tokens.weight")) == tied


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model, empty = build("LlamaForCausalLM", tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, empty, load_file(folder / "model.safetensors")


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_tied_weight_may_be_stored_under_either_name_and_the_prefix_may_lack(llama, tmp_path):
    model, empty, tensors = llama
    assert "lm_head.weight" not in tensors
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_equal_to(open_reader(empty, write(tmp_path / "base", tensors)), model)
    tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")
    assert_equal_to(open_reader(empty, write(tmp_path / "head", tensors)), model)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.embed_tokens\.weight, which its config\.json"):
        open_reader(empty, write(tmp_path / "none", tensors))


def _change(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop(UP), f"lacks the tensor {UP}"),
        (_change(UP, lambda t: t[1:]), rf"tensor {UP} has the shape \[47, 32\] as {UP}, but its config.json asks for"),
        (_change(UP, lambda t: t.to(torch.int8)), f"tensor {UP} has the type I8"),
        (
            lambda t: t.update({UP.replace("weight", "bias"): torch.ones(48)}),
            "up_proj.bias would change what is computed",
        ),
        (lambda t: t.update({UP.removeprefix("model."): torch.ones(48, 32)}), "are both"),
    ],
)
def test_faults_are_named(llama, tmp_path, damage, message):
    _, empty, tensors = llama
    tensors = dict(tensors)
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        open_reader(empty, write(tmp_path, tensors))


# ---- experts ----


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    model, empty = build("Qwen3MoeForCausalLM")
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    return model, empty, load_file(folder / "model.safetensors")


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("removed", [["0.gate_proj"], ["3.gate_proj", "3.up_proj", "3.down_proj"]])
def test_a_missing_expert_is_refused(experts, tmp_path, removed):
    _, empty, tensors = experts
    tensors = dict(tensors)
    for name in removed:
        del tensors[f"{EXPERTS}.{name}.weight"]
    with pytest.raises(CheckpointError, match=EXPERTS):
        open_reader(empty, write(tmp_path, tensors))


def test_experts_that_are_numbered_otherwise_are_refused(experts, tmp_path):
    """Shapes alone would not show that expert 1 lacks and that the others have moved up."""
    _, empty, tensors = experts
    tensors = {name.replace(f"{EXPERTS}.1.", f"{EXPERTS}.9."): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="not numbered from 0 on"):
        open_reader(empty, write(tmp_path, tensors))


def test_ten_and_more_experts_keep_their_order(tmp_path):
    model, empty = build("Qwen3MoeForCausalLM", num_experts=12)
    model.save_pretrained(tmp_path)
    assert model.state_dict()[f"{EXPERTS}.down_proj"].shape[0] == 12
    assert_equal_to(open_reader(empty, tmp_path), model)


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_an_expert_is_read_alone(name, tmp_path, monkeypatch):
    model, empty = build(name)
    model.save_pretrained(tmp_path)
    reader = open_reader(empty, tmp_path)
    key = next(key for key in reader.shapes if key.endswith("experts.down_proj"))
    sizes = []
    original = StoredTensor.read
    monkeypatch.setattr(
        StoredTensor, "read", lambda self, offset, size: (sizes.append(size), original(self, offset, size))[1]
    )
    read(reader, key, 2)
    one = sum(sizes)
    read(reader, key)
    assert one * reader.shapes[key][0] == sum(sizes) - one > 0


# ---- quantized ----


@pytest.mark.parametrize(
    ("config", "quantize"),
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_by_block),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, nvfp4),
    ],
)
def test_quantized_experts_are_merged_with_their_values(experts, tmp_path, config, quantize):
    _, empty, tensors = experts
    stored, values = {}, {}
    for name, tensor in tensors.items():
        values[name] = tensor
        if "experts." in name and tensor.shape[1] % 16 == 0:
            parts, values[name] = quantize(np.random.default_rng(len(values)), *tensor.shape)
            stored |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in parts.items()}
        else:
            stored[name] = tensor
    reader = open_reader(empty, write(tmp_path, stored), config)
    for expert in range(4):
        gate, up, down = (values[f"{EXPERTS}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(read(reader, f"{EXPERTS}.gate_up_proj", expert), torch.cat([gate, up]))
        assert torch.equal(read(reader, f"{EXPERTS}.down_proj", expert), down)
    assert reader.title(f"{EXPERTS}.gate_up_proj").endswith("and 7 more")


def test_experts_whose_codes_lie_in_columns_are_laid_in_rows(tmp_path):
    """Gate above up, in the bytes that both are multiplied in."""
    model, _ = build("Qwen3MoeForCausalLM", hidden_size=64, moe_intermediate_size=96)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored, values = dict(tensors), {}
    for name, tensor in tensors.items():
        if "experts." in name:
            parts, values[name] = awq(np.random.default_rng(len(values)), *tensor.shape)
            stored |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in parts.items()}
            del stored[name]
    write(tmp_path, stored)
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    checkpoint = StateDictCheckpoint(tmp_path)
    for expert in range(4):
        gate, up, down = (values[f"{EXPERTS}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        for name, expected in (("gate_up", torch.cat([gate, up])), ("down", down)):
            name = f"layers.1.mlp.experts.{expert}.{name}_proj.weight"
            packed = torch.cat([*checkpoint.packed_tiles(name)]).view(len(expected), -1)
            assert torch.equal(decode(packed, checkpoint.formats[name]), expected)
