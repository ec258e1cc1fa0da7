"""Safetensors folders against `transformers`, and every kind of damage that must be refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.safetensors_source import SafetensorsCheckpoint
from flexgen_helm.core.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from flexgen_helm.models.spec import tensor_shapes

transformers = pytest.importorskip("transformers")

OPT_SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "ffn_dim": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "word_embed_proj_dim": 16,
}
LLAMA_SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "opt": {},
    "opt-350m": {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-untied": {"tie_word_embeddings": False},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
}


def build(variant: str) -> Any:
    torch.manual_seed(3)
    if variant.startswith("llama"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA_SIZES, **VARIANTS[variant]}))
    else:
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**{**OPT_SIZES, **VARIANTS[variant]}))
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a swap
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def linear(name: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for leaf in ("weight", "bias"):
        if getattr(module, leaf, None) is not None:
            yield f"{name}.{leaf}", getattr(module, leaf)


def reference(model: Any) -> dict[str, torch.Tensor]:
    """Canonical tensors by walking the modules of `transformers`, independently of the families' name maps."""
    found: dict[str, torch.Tensor] = {}
    is_opt = hasattr(model.model, "decoder")
    body = model.model.decoder if is_opt else model.model
    found.update(linear("embed.tokens", body.embed_tokens))
    if is_opt:
        found.update(linear("embed.positions", body.embed_positions))
        found.update(linear("embed.project_in", body.project_in))
        found.update(linear("head.project_out", body.project_out))
        found.update(linear("head.norm", body.final_layer_norm))
    else:
        found.update(linear("head.norm", body.norm))
    if not model.config.tie_word_embeddings:
        found.update(linear("head.lm", model.lm_head))
    for i, layer in enumerate(body.layers):
        at = f"layers.{i}"
        attention = layer.self_attn
        for letter in "qkv":
            found.update(linear(f"{at}.attn.{letter}", getattr(attention, f"{letter}_proj")))
        found.update(linear(f"{at}.attn.o", attention.out_proj if is_opt else attention.o_proj))
        if is_opt:
            parts = {
                "attn_norm": layer.self_attn_layer_norm,
                "mlp_norm": layer.final_layer_norm,
                "mlp.up": layer.fc1,
                "mlp.down": layer.fc2,
            }
        else:
            parts = {
                "attn_norm": layer.input_layernorm,
                "mlp_norm": layer.post_attention_layernorm,
                "mlp.gate": layer.mlp.gate_proj,
                "mlp.up": layer.mlp.up_proj,
                "mlp.down": layer.mlp.down_proj,
            }
        for name, module in parts.items():
            found.update(linear(f"{at}.{name}", module))
    return found


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "llama"
    build("llama-untied").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("shard_size", ["1GB", "6KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_equals_the_one_in_transformers(
    variant: str, dtype: torch.dtype, shard_size: str, tmp_path: Path
) -> None:
    model = build(variant).to(dtype)
    model.save_pretrained(tmp_path / "m", max_shard_size=shard_size)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (shard_size == "6KB")
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.rest_dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    expected = reference(model)
    assert set(expected) == set(tensor_shapes(checkpoint.spec))
    for name, shape in tensor_shapes(checkpoint.spec).items():
        tensor = checkpoint.tensor(name)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous() and tensor.dtype == checkpoint.rest_dtype
        assert torch.equal(tensor, expected[name].detach().to(checkpoint.rest_dtype)), name
    assert checkpoint.tokenizer_path is None


def test_bare_decoder_export_of_opt_is_found_by_its_other_prefix(tmp_path: Path) -> None:
    model = build("opt")
    model.model.save_pretrained(tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors")
    assert all(name.startswith("decoder.") for name in names)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert torch.equal(checkpoint.tensor("head.norm.bias"), reference(model)["head.norm.bias"].half())


def test_many_tiles_and_many_threads_give_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SafetensorsCheckpoint(folder)
    expected = {name: whole.tensor(name) for name in whole.shapes}
    monkeypatch.setattr("flexgen_helm.checkpoint.safetensors_source.TILE_ELEMENTS", 7)
    with ThreadPoolExecutor(8) as pool:
        for name, tensor in zip(expected, pool.map(whole.tensor, expected), strict=True):
            assert torch.equal(tensor, expected[name])


def test_a_single_file_is_opened_beside_its_config(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(folder / "model.safetensors")
    checkpoint.verify()
    assert checkpoint.tokenizer_path == folder


def test_every_truncation_is_refused_when_opening(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) - 1}
    cuts |= {len(content) * i // 64 for i in range(64)}
    for cut in sorted(cuts):
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(folder)
    file.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_truncation_of_one_shard_names_the_shard(tmp_path: Path) -> None:
    build("opt").save_pretrained(tmp_path / "m", max_shard_size="6KB")
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(tmp_path / "m")


def test_a_file_that_changes_after_opening_is_refused_when_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        checkpoint.tensor("head.norm.weight")


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("absent.safetensors", "absent.safetensors, which is missing"),
        ("../outside.safetensors", "outside the folder"),
        ("a/../../outside.safetensors", "outside the folder"),
        ("/etc/hostname", "outside the folder"),
        ("..\\outside.safetensors", "outside the folder"),
    ],
)
def test_index_may_name_only_files_of_the_folder(folder: Path, shard: str, message: str) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"model.norm.weight": shard, "lm_head.weight": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_unusable_index_is_refused(folder: Path, content: str) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(folder)


def test_untied_head_must_exist_and_a_tied_one_need_not(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        open_checkpoint(folder)
    edit_config(folder, tie_word_embeddings=True)
    open_checkpoint(folder).verify()


def test_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(17)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \[17\].*\[16\]"):
        open_checkpoint(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the type I8"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_names_file_and_tensor(folder: Path, value: float, dtype: torch.dtype) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors["model.layers.0.self_attn.v_proj.weight"][3, 2] = value

    edit_weights(folder, change)
    checkpoint = open_checkpoint(folder)
    checkpoint.tensor("layers.0.attn.k.weight")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.layers\.0\.self_attn\.v_proj"):
        checkpoint.tensor("layers.0.attn.v.weight")
    with pytest.raises(CheckpointError, match="not finite"):
        checkpoint.verify()


@pytest.mark.parametrize(("value", "fits"), [(65519.0, True), (-65519.0, True), (65520.0, False), (-1e5, False)])
def test_overflow_of_float16_is_an_error_exactly_where_rounding_overflows(
    folder: Path, value: float, fits: bool
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][5] = value

    edit_weights(folder, change)
    checkpoint = open_checkpoint(folder)
    if fits:
        assert abs(checkpoint.tensor("head.norm.weight")[5].item()) == 65504
    else:
        with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight contains .*too large for float16"):
            checkpoint.tensor("head.norm.weight")


def test_code_named_by_the_config_is_never_run(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("open(__file__ + '.ran', 'w').close()\nraise SystemExit('ran')\n")
    edit_config(folder, auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"})
    open_checkpoint(folder).verify()
    assert not (folder / "modeling_evil.py.ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_command_to_use(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cbuiltins\nexec\n")
    with pytest.raises(CheckpointError, match="flexgen-helm convert") as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 2


def test_folder_without_weights_or_with_too_many(folder: Path) -> None:
    file = folder / "model.safetensors"
    other = file.rename(folder / "weights.safetensors")
    open_checkpoint(folder).verify()
    shutil.copy(other, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        open_checkpoint(folder)
    other.unlink()
    (folder / "more.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(folder)


def test_config_problems_are_named(folder: Path) -> None:
    file = folder / "config.json"
    edit_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(UnsupportedArchitectureError, match="MambaForCausalLM"):
        open_checkpoint(folder)
    edit_config(folder, architectures=["LlamaForCausalLM"], quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="gptq"):
        open_checkpoint(folder)
    edit_config(folder, quantization_config=None, num_attention_heads=0, head_dim=None)
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


def test_dummy_weights_follow_seed_and_name_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, again, other = (open_checkpoint(folder, weights="dummy", seed=seed) for seed in (0, 0, 1))
    for name in reversed(list(first.shapes)):
        first.tensor(name)
    for name, shape in again.shapes.items():
        tensor = again.tensor(name)
        assert tuple(tensor.shape) == shape and tensor.dtype == torch.float16
        assert torch.equal(tensor, first.tensor(name))
    assert not torch.equal(again.tensor("embed.tokens.weight"), other.tensor("embed.tokens.weight"))
    assert not torch.equal(again.tensor("layers.0.attn.q.weight"), again.tensor("layers.1.attn.q.weight"))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(again.tensor("head.norm.weight"), torch.ones(16, dtype=torch.float16))


def test_dummy_weights_of_the_catalogue() -> None:
    big = open_checkpoint("flexgen/opt-175b-4bit", weights="dummy")
    assert big.tensor("layers.95.attn.q.bias").shape == (12288,)
    small = open_checkpoint("smollm2-135m", weights="dummy")
    assert small.rest_dtype == torch.bfloat16
    table = small.tensor("embed.tokens.weight").float()
    assert table.std().item() == pytest.approx(0.02, rel=0.01) and abs(table.mean().item()) < 1e-4
    with pytest.raises(CheckpointError, match="not published.*dummy"):
        open_checkpoint("opt-175b")
    with pytest.raises(UsageError, match="dummy weights of org--repo"):
        open_checkpoint("org/repo", weights="dummy")


def test_dummy_hidden_states_of_a_deep_model_stay_small(tmp_path: Path) -> None:
    """The residual stream of 48 random layers, computed by `transformers`, is far from float16's end."""
    config = transformers.LlamaConfig(**{**LLAMA_SIZES, "hidden_size": 64, "num_hidden_layers": 48})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    dummy = open_checkpoint(tmp_path, weights="dummy")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in reference(model).items():
            parameter.copy_(dummy.tensor(name))
        states = model(torch.arange(20)[None], output_hidden_states=True).hidden_states
    assert max(state.abs().max().item() for state in states) < 100
