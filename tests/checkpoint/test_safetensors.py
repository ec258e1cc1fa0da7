"""Every kind of damage to a safetensors folder is refused by name; an intact one is read the same
in every way.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
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


FILE, SHARD, INDEX = (
    "model.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Untied, with random norms, which would otherwise be ones."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    save_random(folder, llama_config(**sizes, tie_word_embeddings=False), 3, "float32")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_many_tiles_and_many_threads_give_the_same_bytes(folder, monkeypatch):
    whole = SafetensorsCheckpoint(folder)
    expected = [whole.tensor(name) for name in whole.shapes]
    monkeypatch.setattr("flexgen_helm.checkpoint.logical_tensor.TILE_ELEMENTS", 7)
    with ThreadPoolExecutor(8) as pool:
        assert all(map(torch.equal, pool.map(whole.tensor, whole.shapes), expected))


def test_a_single_file_is_opened_beside_its_config(folder):
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(folder / "model.safetensors")
    checkpoint.verify()
    assert checkpoint.tokenizer_path == folder


def test_every_truncation_is_refused_when_opening(folder):
    content = (folder / FILE).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) - 1}
    cuts |= {len(content) * i // 16 for i in range(16)}
    for damaged in (*(content[:cut] for cut in sorted(cuts)), content + b"x"):
        (folder / FILE).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(folder)


def test_a_file_that_changes_after_opening_is_refused_when_read(folder):
    checkpoint = open_checkpoint(folder)
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        checkpoint.tensor("head.norm.weight")


def put(name, tensor):
    return lambda folder: edit_weights(folder, lambda tensors: tensors.update({name: tensor}))


def without(name):
    return lambda folder: edit_weights(folder, lambda tensors: tensors.pop(name))


def config(**changes):
    return lambda folder: edit_config(folder, **changes)


def config_text(content):
    return lambda folder: (folder / "config.json").write_text(content)


def only(name):
    def rename(folder):
        (folder / FILE).rename(folder / name)
        (folder / name).write_bytes(b"\x80\x04cbuiltins\nexec\n")

    return rename


def twice(folder):
    shutil.copy(folder / FILE, folder / "more.safetensors")
    (folder / FILE).rename(folder / "weights.safetensors")


def twice_in_the_index(folder):
    twice(folder)
    index = {"weight_map": {"a": "weights.safetensors", "b": "more.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))


DAMAGES = {
    "a missing tensor": (
        without("model.layers.1.mlp.up_proj.weight"),
        r"lacks the tensor model\.layers\.1\.mlp\.up_p",
    ),
    "a missing head": (without("lm_head.weight"), r"lm_head\.weight"),
    "another shape": (
        put(NORM, torch.zeros(17)),
        r"model\.norm\.weight has the shape \[17\].*\[16\]",
    ),
    "integers": (
        put(NORM, torch.zeros(16, dtype=torch.int8)),
        r"model\.norm\.weight has the type I8",
    ),
    "a pickle": (only("pytorch_model.bin"), "flexgen-helm convert"),
    "a pickle of Meta": (only("consolidated.00.pth"), "flexgen-helm convert"),
    "no weights": (lambda folder: (folder / FILE).unlink(), "no weights"),
    "two files": (twice, "2 safetensors files"),
    "a tensor twice": (
        twice_in_the_index,
        r"more\.safetensors and weights\.safetensors both have a tensor ",
    ),
    "another architecture": (
        config(architectures=["RwkvForCausalLM"], model_type="rwkv"),
        "RwkvForCausalLM",
    ),
    "another method": (config(quantization_config={"quant_method": "eetq"}), "eetq"),
    "many layers": (
        config(num_hidden_layers=2_000_000_000),
        "num layers is 2000000000; at most 10,000",
    ),
    "more layers than stored": (config(num_hidden_layers=9000), "too few for 9000 layers"),
    "less than no layer": (config(num_hidden_layers=-1), "num layers is -1"),
    "uneven heads": (config(num_key_value_heads=3), "unevenly"),
    "no heads": (config(num_attention_heads=0, head_dim=None), "wrong kind"),
    "no sizes": (config_text('{"architectures": ["LlamaForCausalLM"]}'), "lacks 'hidden_size'"),
    "no JSON": (config_text("{"), "no readable JSON"),
    "no object": (config_text("[]"), "one JSON object"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 2


def test_a_tied_head_need_not_exist(folder):
    without("lm_head.weight")(folder)
    edit_config(folder, tie_word_embeddings=True)
    open_checkpoint(folder).verify()


@pytest.mark.parametrize(
    "value, fits", [(65519.0, True), (-65519.0, True), (65520.0, False), (-1e5, False)]
)
def test_overflow_of_float16_is_an_error_exactly_where_rounding_overflows(folder, value, fits):
    def change(tensors):
        tensors[NORM][5] = tensors["model.embed_tokens.weight"][3, 5] = value

    edit_weights(folder, change)
    checkpoint = open_checkpoint(folder)
    if fits:
        assert abs(checkpoint.tensor("embed.tokens.weight")[3, 5].item()) == 65504
        # a device may have only float16 for it
        assert checkpoint.tensor("head.norm.weight")[5].item() == value
        return
    for name, stored in (
        ("embed.tokens.weight", "model.embed_tokens.weight"),
        ("head.norm.weight", NORM),
    ):
        with pytest.raises(
            CheckpointError, match=(rf"tensor {stored} contains .*too large for float16")
        ):
            checkpoint.tensor(name)


FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "most, dtype, factor, lost",
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
    error = (exact - exact.to(checkpoint.storage_dtype).double()).norm() / exact.norm().clamp(
        min=1e-300
    )
    assert (error > 0.1) == lost and (error < 2**-8) == (not lost)
    if not lost:
        checkpoint.verify()
        return
    with pytest.raises(
        CheckpointError,
        match=(r"v_proj.weight would lose .*% of its norm in float16; use a copy .*bfloat16"),
    ):
        checkpoint.verify()


@pytest.mark.parametrize(
    "name",
    [
        FILE,
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        SHARD,
        INDEX,
        "m.gguf",
    ],
)
def test_a_git_lfs_pointer_is_named(folder, name):
    (folder / "tokenizer.json").write_text("{}")
    if name in (SHARD, INDEX):
        (folder / FILE).rename(folder / SHARD.replace("2-of", "1-of"))
        index = {"weight_map": {"1": SHARD.replace("2-of", "1-of"), "2": SHARD}}
        (folder / INDEX).write_text(json.dumps(index))
    (folder / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n"
    )
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer .* `git lfs pull`"):
        open_files(resolve(folder / name if name == "m.gguf" else folder), EngineConfig())
        read_generation_settings(folder, EngineConfig().generation_config)


def test_the_files_that_macos_puts_beside_others_are_no_weights(folder):
    (folder / FILE).rename(folder / "weights.safetensors")
    for file in list(folder.iterdir()):
        (folder / f"._{file.name}").write_bytes(b"\0\5\x16\7" + bytes(100))
    open_checkpoint(folder).verify()
    assert pickle_names(["._pytorch_model.bin", "._x.bin", "x.bin"]) == ["x.bin"]


def sentinel(folder):
    """Put code into the folder that every `auto_map` there names; returns the file that it would
    leave.
    """
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass C: pass\nM = T = C\n")
    auto_map = {
        "AutoConfig": "evil.C",
        "AutoModelForCausalLM": "evil.M",
        "AutoTokenizer": ["evil.T", None],
    }
    edit_config(folder, auto_map=auto_map, trust_remote_code=True)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": auto_map, "tokenizer_class": "T", "trust_remote_code": True})
    )
    return ran


def test_code_named_by_the_config_is_never_run(folder):
    ran = sentinel(folder)
    open_checkpoint(folder).verify()
    # as Microsoft publishes it
    edit_config(folder, architectures=["Phi3ForCausalLM"], model_type="phi3")
    assert read_config(folder)[0].name == "phi3"
    edit_config(folder, architectures=["EvilForCausalLM"], model_type="evil")
    with pytest.raises(
        UnsupportedArchitectureError, match=r"EvilForCausalLM.*auto_map.*never run"
    ) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 2 and not ran.exists()


def test_the_code_would_run_where_it_is_trusted(folder, tmp_path, monkeypatch):
    """The trap of the test above is one: `transformers` runs it when told to."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    ran = sentinel(folder)
    with pytest.raises(Exception):  # noqa: B017 - what follows the import does not matter
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert ran.exists()


def test_damage_that_no_hash_tells_is_found_only_where_it_is_not_finite(folder):
    """A plain folder has nothing to compare with; its fingerprint says that it is another model."""
    before = open_checkpoint(folder).fingerprint
    content = bytearray((folder / FILE).read_bytes())
    content[-4] ^= 1
    (folder / FILE).write_bytes(content)
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.fingerprint != before and checkpoint.origin == str(folder.resolve())


@settings(max_examples=60)
@given(name=st.sampled_from([FILE, "config.json"]), data=st.data())
def test_damaged_bytes_never_raise_anything_but_our_errors(folder, name, data):
    content = (folder / name).read_bytes()
    damaged = bytearray(content)
    offsets = st.integers(0, min(len(content), 4000) - 1)
    for at, value in data.draw(
        st.dictionaries(offsets, st.integers(0, 255), min_size=1, max_size=8)
    ).items():
        damaged[at] = value
    (folder / name).write_bytes(damaged)
    with suppress(FlexgenError):
        open_checkpoint(folder).verify()
    (folder / name).write_bytes(content)
