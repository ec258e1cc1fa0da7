"""Every kind of damage to a safetensors folder is refused by name; an intact one is read the same in every way."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flexgen_helm.checkpoint.folder import pickle_names, read_config
from flexgen_helm.checkpoint.generation_config import read_generation_settings
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.opening import open_files
from flexgen_helm.errors import CheckpointError, FlexgenError, UnsupportedArchitectureError
from tests.helpers.model_folders import edit_config, edit_weights
from tests.helpers.tiny_models import llama_config, save_random

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Untied, with random norms, which would otherwise be ones."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_random(folder, llama_config(**sizes, tie_word_embeddings=False), 3, "float32")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_many_tiles_and_many_threads_give_the_same_bytes(folder, monkeypatch):
    whole = SafetensorsCheckpoint(folder)
    expected = {name: whole.tensor(name) for name in whole.shapes}
    monkeypatch.setattr("flexgen_helm.checkpoint.checkpoint.TILE_ELEMENTS", 7)
    with ThreadPoolExecutor(8) as pool:
        for name, tensor in zip(expected, pool.map(whole.tensor, expected), strict=True):
            assert torch.equal(tensor, expected[name])


def test_a_single_file_is_opened_beside_its_config(folder):
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(folder / "model.safetensors")
    checkpoint.verify()
    assert checkpoint.tokenizer_path == folder


def test_every_truncation_is_refused_when_opening(folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) - 1}
    cuts |= {len(content) * i // 16 for i in range(16)}
    for cut in sorted(cuts):
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(folder)
    file.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_a_file_that_changes_after_opening_is_refused_when_read(folder):
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        checkpoint.tensor("head.norm.weight")


def test_missing_tensor_is_named(folder):
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(folder)


def test_untied_head_must_exist_and_a_tied_one_need_not(folder):
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        open_checkpoint(folder)
    edit_config(folder, tie_word_embeddings=True)
    open_checkpoint(folder).verify()


def test_wrong_shape_is_named_with_both_shapes(folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(17)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \[17\].*\[16\]"):
        open_checkpoint(folder)


def test_integer_weights_are_refused(folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the type I8"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("value", "fits"), [(65519.0, True), (-65519.0, True), (65520.0, False), (-1e5, False)])
def test_overflow_of_float16_is_an_error_exactly_where_rounding_overflows(folder, value, fits):
    def change(tensors):
        tensors["model.norm.weight"][5] = tensors["model.embed_tokens.weight"][3, 5] = value

    edit_weights(folder, change)
    checkpoint = open_checkpoint(folder)
    if fits:
        assert abs(checkpoint.tensor("embed.tokens.weight")[3, 5].item()) == 65504
        assert checkpoint.tensor("head.norm.weight")[5].item() == value  # a device may have only float16 for it
    else:
        with pytest.raises(
            CheckpointError, match=r"tensor model\.embed_tokens\.weight contains .*too large for float16"
        ):
            checkpoint.tensor("embed.tokens.weight")
        with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight contains .*too large for float16"):
            checkpoint.tensor("head.norm.weight")


FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("most", "dtype", "factor", "lost"),
    [
        (FLOAT32, FLOAT32, 1e-7, True),
        (FLOAT32, FLOAT32, 1e-25, True),  # whose squares float32 does not have
        (FLOAT32, FLOAT32, 1e-2, False),
        (FLOAT32, FLOAT32, 0.0, False),
        (FLOAT16, BFLOAT16, 1e-7, True),
        (FLOAT16, FLOAT32, 1e-7, True),
        (FLOAT16, BFLOAT16, 1.0, False),
        (BFLOAT16, FLOAT32, 1e-7, False),  # bfloat16 has the range of float32
    ],
)
def test_a_matrix_that_would_vanish_in_float16_is_refused(folder, most, dtype, factor, lost):
    """A slow formula says what is lost, and that the limit lies between the cases."""
    name = "model.layers.1.self_attn.v_proj.weight"

    def change(tensors):
        for key in tensors:
            tensors[key] = tensors[key].to(most)
        tensors[name] = (tensors[name].double() * factor).to(dtype)
        tensors["model.norm.weight"] = torch.full((16,), 1e-9)  # vectors stay in float32

    edit_weights(folder, change)
    checkpoint = open_checkpoint(folder)
    exact = load_file(folder / "model.safetensors")[name].double()
    error = (exact - exact.to(checkpoint.storage_dtype).double()).norm() / exact.norm().clamp(min=1e-300)
    assert (error > 0.1) == lost and (error < 2**-8) == (not lost)
    if not lost:
        checkpoint.verify()
        return
    with pytest.raises(
        CheckpointError, match=r"v_proj.weight would lose .*% of its norm in float16; use a copy .*bfloat16"
    ):
        checkpoint.verify()


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    + ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "m.gguf"],
)
def test_a_git_lfs_pointer_is_named(folder, name):
    (folder / "tokenizer.json").write_text("{}")
    if name in ("model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        index = {"weight_map": {str(n): f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer .* `git lfs pull`"):
        options = EngineConfig()
        open_files(resolve(folder / name if name == "m.gguf" else folder), options)
        read_generation_settings(folder, options.generation_config)


def test_the_files_that_macos_puts_beside_others_are_no_weights(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    for file in list(folder.iterdir()):
        (folder / f"._{file.name}").write_bytes(b"\0\5\x16\7" + bytes(100))
    open_checkpoint(folder).verify()
    assert pickle_names(["._pytorch_model.bin", "._x.bin", "x.bin"]) == ["x.bin"]
    assert pickle_names(["._x.bin"]) == []


def sentinel(folder):
    """Put code into the folder that every `auto_map` there names; returns the file that it would leave."""
    (folder / "evil.py").write_text("open(__file__ + '.ran', 'w').close()\nclass C: pass\nM = T = C\n")
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    edit_config(folder, auto_map=auto_map, trust_remote_code=True)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": auto_map, "tokenizer_class": "T", "trust_remote_code": True})
    )
    return folder / "evil.py.ran"


def test_code_named_by_the_config_is_never_run(folder):
    ran = sentinel(folder)
    open_checkpoint(folder).verify()
    edit_config(folder, architectures=["Phi3ForCausalLM"], model_type="phi3")  # as Microsoft publishes it
    assert read_config(folder)[0].name == "phi3"
    assert not ran.exists()


def test_a_foreign_architecture_is_refused_though_it_brings_its_code(folder):
    ran = sentinel(folder)
    edit_config(folder, architectures=["EvilForCausalLM"], model_type="evil")
    with pytest.raises(UnsupportedArchitectureError, match=r"EvilForCausalLM.*auto_map.*never run") as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 2 and not ran.exists()


def test_the_code_would_run_where_it_is_trusted(folder, tmp_path, monkeypatch):
    """The trap of the tests above is one: `transformers` runs it when told to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path / "modules")])
    sentinel(folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass C: pass\n")
    with pytest.raises(Exception):  # noqa: B017 - what follows the import does not matter
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_damage_that_no_hash_tells_is_found_only_where_it_is_not_finite(folder):
    """A plain folder has nothing to compare with; its fingerprint says that it is another model."""
    before = open_checkpoint(folder).fingerprint
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(bytes(content))
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.fingerprint != before and checkpoint.origin == str(folder.resolve())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_command_to_use(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cbuiltins\nexec\n")
    with pytest.raises(CheckpointError, match="flexgen-helm convert") as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 2


def test_folder_without_weights_or_with_too_many(folder):
    file = folder / "model.safetensors"
    weights = file.rename(folder / "weights.safetensors")
    open_checkpoint(folder).verify()
    shutil.copy(weights, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        open_checkpoint(folder)
    index = {"weight_map": {"a": weights.name, "b": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"more\.safetensors and weights\.safetensors both have a tensor "):
        open_checkpoint(folder)
    for file in (weights, folder / "more.safetensors", folder / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(folder)


def test_config_problems_are_named(folder):
    file = folder / "config.json"
    edit_config(folder, architectures=["RwkvForCausalLM"], model_type="rwkv")
    with pytest.raises(UnsupportedArchitectureError, match="RwkvForCausalLM"):
        open_checkpoint(folder)
    edit_config(folder, architectures=["LlamaForCausalLM"], quantization_config={"quant_method": "eetq"})
    with pytest.raises(CheckpointError, match="eetq"):
        open_checkpoint(folder)
    edit_config(folder, quantization_config=None, num_hidden_layers=2_000_000_000)
    with pytest.raises(CheckpointError, match="num layers is 2000000000; at most 10,000"):
        open_checkpoint(folder)
    edit_config(folder, num_hidden_layers=9000)
    with pytest.raises(CheckpointError, match="too few for 9000 layers"):
        open_checkpoint(folder)
    for wrong, message in (({"num_hidden_layers": -1}, "num layers is -1"), ({"num_key_value_heads": 3}, "unevenly")):
        edit_config(folder, **{"num_hidden_layers": 2, **wrong})
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    edit_config(folder, num_attention_heads=0, head_dim=None)
    with pytest.raises(CheckpointError, match="wrong kind"):
        open_checkpoint(folder)
    for content, message in (
        ('{"architectures": ["LlamaForCausalLM"]}', "lacks 'hidden_size'"),
        ("{", "no readable JSON"),
        ("[]", "one JSON object"),
    ):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        open_checkpoint(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["model.safetensors", "config.json"]), data=st.data())
def test_damaged_bytes_never_raise_anything_but_our_errors(folder, name, data):
    file = folder / name
    content = file.read_bytes()
    offsets = st.integers(0, min(len(content), 4000) - 1)
    damaged = bytearray(content)
    for at, value in data.draw(st.dictionaries(offsets, st.integers(0, 255), min_size=1, max_size=8)).items():
        damaged[at] = value
    file.write_bytes(bytes(damaged))
    try:
        open_checkpoint(folder).verify()
    except FlexgenError:
        pass
    finally:
        file.write_bytes(content)
