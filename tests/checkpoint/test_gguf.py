"""GGUF files of every family, written with llama.cpp's names and rules, equal to their folder;
damage refused.

What the writer here believes about the format is checked by `transformers`, which reads the same
files.
"""

import json
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, cli
from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.checkpoint.gguf_checkpoint import _logical_tensor
from flexgen_helm.checkpoint.local_files import quick_fingerprint
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.models.config import tensor_shapes
from flexgen_helm.models.decoder import inverse_frequencies
from flexgen_helm.progress import observed_by
from tests.helpers.gguf_files import Kind, contents, small_tokenizer, write_gguf
from tests.helpers.tiny_models import GGUF_VARIANTS, VOCABULARY, llama_config, save_random

# The safetensors configuration says more than the file: our family's name of what the file calls
# llama.
RENAMED = {"mixtral": "llama"}
F16 = Kind.F16


def write(path, model, arch="llama", kind=F16, keys=(), parts=1, **changes):
    """changes: GGUF tensor name (dots as __) -> array to store instead, or None to leave it out."""
    known, tensors = contents(model, arch)
    tensors |= {name.replace("__", "."): values for name, values in changes.items()}
    keys = {**known, **small_tokenizer(VOCABULARY), **dict(keys)}
    stored = [
        (name, x, kind if x.ndim > 1 else Kind.F32) for name, x in tensors.items() if x is not None
    ]
    return write_gguf(path, arch, keys, stored, parts)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built('qwen3') -> folder of safetensors, GGUF file, model in float32."""

    @cache
    def get(name):
        arch, config, _ = GGUF_VARIANTS[name]
        folder = tmp_path_factory.mktemp(name)
        model = save_random(folder, config(), seed=7)
        return folder, write(folder / "m.gguf", model, arch), model

    return get


@pytest.mark.parametrize("name", GGUF_VARIANTS)
def test_spec_and_tensors_equal_those_of_the_folder(built, name):
    folder, file, _ = built(name)
    original, read = SafetensorsCheckpoint(folder), open_checkpoint(file)
    found, expected = read.config, replace(original.config, norm_plus_one=False)
    expected = replace(expected, architecture=RENAMED.get(name, expected.architecture))
    assert found.norm_eps == pytest.approx(expected.norm_eps, rel=1e-6)  # float32 in the file
    if name == "llama3":
        assert found.rope.kind == "factors"
        ours, theirs = (
            inverse_frequencies(config.rope, config.head_dim) for config in (found, expected)
        )
        assert torch.allclose(ours, theirs, rtol=1e-5)
        found = replace(found, rope=expected.rope)
    if name == "phi3-longrope":
        assert found.rope.magnitude == pytest.approx(expected.rope.magnitude, rel=1e-6)
        found = replace(found, rope=replace(found.rope, magnitude=expected.rope.magnitude))
    assert replace(found, norm_eps=expected.norm_eps) == expected
    for tensor, shape in read.shapes.items():
        values, wanted = read.tensor(tensor), original.tensor(tensor).float()
        assert tuple(values.shape) == shape and values.is_contiguous()
        # Norms are stored as 1 + w in float32, which float16 has not.
        assert torch.equal(
            values.float(), wanted + (original.config.norm_plus_one and "norm" in tensor)
        ), tensor


@pytest.mark.parametrize("name", [name for name, (_, _, known) in GGUF_VARIANTS.items() if known])
def test_transformers_reads_the_same_file_to_the_same_model(built, name):
    """The writer above is no private dialect."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
    from transformers import AutoModelForCausalLM

    folder, file, model = built(name)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[5, 9, 77, 200, 31, 8, 60, 44, 5, 9, 100, 12, 250]])
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids).logits).abs().max() < 2e-3


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A folder and its model, whose rows have a multiple of 32 elements."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return folder, save_random(folder, llama_config(**sizes, tie_word_embeddings=False), 7)


@pytest.fixture
def llama(llama_folder):
    return llama_folder[1]


@pytest.mark.parametrize(
    "kind, step",
    [("F32", 0.0), ("BF16", 2**-8), ("Q8_0", 1 / 254 + 2**-10), ("Q4_1", 1 / 15 + 2**-10)],
)
def test_tensors_equal_the_originals_within_the_quantization(
    llama_folder, kind, step, tmp_path, monkeypatch
):
    """Half a step over a group's range: of 8 bits twice the largest value, of 4 bits as much;
    float16 scales.
    """
    folder, model = llama_folder
    file = write(tmp_path / "m.gguf", model, kind=Kind[kind])
    original, read = open_checkpoint(folder), open_checkpoint(file)
    assert read.storage_dtype == (torch.bfloat16 if kind == "BF16" else torch.float16)
    assert read.tokenizer_path == file
    whole = {name: read.tensor(name) for name in read.shapes}
    monkeypatch.setattr("flexgen_helm.checkpoint.logical_tensor.TILE_ELEMENTS", 70)
    for name, tensor in whole.items():
        expected, is_matrix = original.tensor(name).float(), tensor.ndim > 1
        assert tensor.dtype == (read.storage_dtype if is_matrix else torch.float32)
        assert (tensor.float() - expected).abs().max() <= is_matrix * step * expected.abs().max(), (
            name
        )
        assert torch.equal(tensor, read.tensor(name)), "tile by tile"


def test_a_plan_takes_every_name_that_a_run_takes(llama, tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "m.gguf", llama, kind=Kind.BF16)
    (tmp_path / "models.yaml").write_text("own: m.gguf\nsmall: {path: m.gguf, precision: 4bit}\n")
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    opened = open_checkpoint(file)
    for name, precision in (
        (str(file), "fp16"),
        ("own", "fp16"),
        ("flexgen/own-4bit", "4bit"),
        ("small", "4bit"),
    ):
        assert read_model_config(name) == (
            opened.config,
            str(opened.storage_dtype).removeprefix("torch."),
        )
        flags = [
            "--prompt-len",
            "9",
            "--gen-len",
            "1",
            "--num-seqs",
            "3",
            "--hardware",
            "laptop",
            "--json",
        ]
        assert cli.main(["plan", "--model", name, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["policy"]["precision"] == precision


def test_every_truncation_is_refused(llama, tmp_path):
    file = write(tmp_path / "m.gguf", llama)
    content = file.read_bytes()
    for cut in {
        0,
        1,
        3,
        4,
        8,
        23,
        24,
        len(content) - 1,
        *(len(content) * i // 24 for i in range(24)),
    }:
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_checkpoint(file)


def bad(value):
    values = np.zeros((64, 64), np.float32)
    values[5, 7] = value
    return values


UP = "blk__1__ffn_up__weight"
FAULTS = [
    ("llama", UP, None, r"m\.gguf lacks the tensor blk\.1\.ffn_up\.weight"),
    ("llama", UP, np.zeros((64, 128), np.float32), r"blk\.1\.ffn_up\.weight has the shape"),
    ("llama", UP, bad(np.nan), r"m\.gguf: tensor blk\.1\.ffn_up\.weight contains .*not finite"),
    ("llama", UP, bad(np.inf), r"m\.gguf: tensor blk\.1\.ffn_up\.weight contains .*not finite"),
    (
        "llama",
        UP,
        bad(7e4),
        r"m\.gguf: tensor blk\.1\.ffn_up\.weight contains .*too large for float16",
    ),
    (
        "mixtral",
        "blk__1__ffn_down_exps__weight",
        np.zeros((3, 48, 80), np.float32),
        r"down_exps\.weight has the shape \[3, ",
    ),
    # Long factors do not stand in for short ones.
    (
        "phi3",
        "rope_factors_long__weight",
        np.full(6, 2.0, np.float32),
        r"1 tensors that nothing here reads.*factors_long",
    ),
]


@pytest.mark.parametrize("name, tensor, values, message", FAULTS)
def test_a_fault_of_a_tensor_is_named(built, llama, tmp_path, name, tensor, values, message):
    model, arch = (llama, "llama") if name == "llama" else (built(name)[2], RENAMED.get(name, name))
    file = write(tmp_path / "m.gguf", model, arch, Kind.F32, **{tensor: values})
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message):
        open_checkpoint(file).verify()


@pytest.mark.parametrize(
    "number, message",
    [
        (25, r"the type I16, for which gguf [\d.]+ has no dequantization"),
        (99, r"the type 99, newer than the installed gguf package [\d.]+: pip install -U gguf"),
    ],
)
def test_types_that_cannot_be_dequantized_are_refused_at_opening(llama, tmp_path, number, message):
    file = write(tmp_path / "m.gguf", llama)
    # rows of 64 elements
    before, name, after = file.read_bytes().partition(b"blk.1.ffn_down.weight")
    sizes = 4 + 2 * 8
    file.write_bytes(
        before + name + after[:sizes] + number.to_bytes(4, "little") + after[sizes + 4 :]
    )
    errors = (CheckpointError, UnsupportedArchitectureError)
    with pytest.raises(errors, match=rf"blk\.1\.ffn_down\.weight has {message}"):
        open_checkpoint(file)


def test_a_model_in_parts_is_read_whole(llama, tmp_path):
    whole = open_checkpoint(write(tmp_path / "whole.gguf", llama))
    write(tmp_path / "m.gguf", llama, parts=2)
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    read = open_checkpoint(first)
    assert read.config == whole.config
    assert all(torch.equal(read.tensor(name), whole.tensor(name)) for name in whole.shapes)
    assert read.fingerprint == quick_fingerprint(resolve(str(first)), first)
    with pytest.raises(
        CheckpointError, match=(r"part 2 of 2; name the part that ends in -00001-of-00002.*--merge")
    ):
        open_checkpoint(second)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="both have a tensor"):
        open_checkpoint(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf cannot be read"):
        open_checkpoint(first)


def test_settings_of_sampling_are_named_and_recorded(llama, tmp_path):
    """What `llama-server` and transformers would take of the file and of its folder, but for what
    requests say.
    """
    keys = {"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 1.5}
    path = write(tmp_path / "m.gguf", llama, kind=Kind.F32, keys=keys)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "repetition_penalty": 1.5}'
    )
    events, ignored = [], {"general.sampling.penalty_repeat": 1.5, "repetition_penalty": 1.5}
    with observed_by(events.append), Engine.from_pretrained(path, device="cpu") as engine:
        engine.run([GenerationRequest(prompt_token_ids=[5], max_tokens=1)])
        assert engine.last_run["generation_config"] == {"applied": {}, "ignored": ignored}
    (text,) = [event.text for event in events if "change nothing" in getattr(event, "text", "")]
    assert text.endswith(": " + ", ".join(ignored))


OTHER_KINDS = [
    (
        "llama",
        {"general.type": "adapter", "adapter.type": "lora"},
        "no language model but of the kind 'adapter'",
    ),
    ("imatrix", {"general.type": "imatrix"}, "no language model but of the kind 'imatrix'"),
    ("clip", {"general.type": "mmproj"}, "no language model but of the kind 'mmproj'"),
    ("clip", {}, "architecture 'clip' is not supported"),
    ("controlvector", {}, "architecture 'controlvector' is not supported"),
    ("mamba", {}, "mamba"),
    ("llama", {"split.no": "0"}, "is damaged: it is part"),
    ("llama", {"split.count": "0"}, "is damaged: it is part"),
]


@pytest.mark.parametrize("arch, keys, named", OTHER_KINDS)
def test_a_file_that_is_no_language_model_is_refused_by_its_kind(tmp_path, arch, keys, named):
    path = write_gguf(
        tmp_path / "m.gguf", arch, keys, [("t", np.ones((4, 32), np.float32), Kind.F32)]
    )
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=named):
        open_checkpoint(path)


def test_foreign_files_are_named(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "llama", {".a": 1, ".b": 2}, [])
    file.write_bytes(file.read_bytes().replace(b"llama.b", b"llama.a"))
    with pytest.raises(CheckpointError, match="two values under one key"):
        open_checkpoint(file)
    file.write_text("no model at all, but longer than a header of 24 bytes")
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_checkpoint(file)


def test_the_wheels_model_has_every_tensor_in_its_shape(wheel_model):
    read = open_checkpoint(wheel_model)
    listed = open_checkpoint("smollm2-135m-instruct-q4_1", weights="dummy").config
    assert read.config.norm_eps == pytest.approx(listed.norm_eps, rel=1e-6)  # float32 in the file
    assert replace(read.config, norm_eps=listed.norm_eps) == listed
    assert read.storage_dtype == torch.float16 and read.tokenizer_path == wheel_model
    shapes = tensor_shapes(read.config)
    for name in (*(name for name in shapes if name.startswith("layers.29.")), "head.norm.weight"):
        assert tuple(read.tensor(name).shape) == shapes[name]


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "IQ2_XS", "IQ1_S", "TQ1_0", "BF16"])
@pytest.mark.parametrize("shape", [(24, 256), (97, 256), (3, 11, 4096), (768,)])
def test_values_of_any_type_are_those_of_the_package(kind, shape, tmp_path):
    """Whole, and of a part of the rows; our table has the first two types."""
    size, stored_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    stored_shape = (*shape[:-1], shape[-1] // size * stored_bytes)
    values = np.random.default_rng(5).integers(0, 64, stored_shape, dtype=np.uint8)
    (tmp_path / "bytes").write_bytes(values.tobytes())
    tensor = _logical_tensor(
        StoredTensor(SourceFile.open(tmp_path / "bytes"), "w", kind, shape, 0, values.size)
    )
    with np.errstate(all="ignore"):
        expected = (
            gguf.quants.dequantize(values, Kind[kind])
            .astype(np.float32)
            .reshape(tensor.num_rows, -1)
        )
    for rows in (range(tensor.num_rows), range(3, 9)):
        found = torch.cat([*tensor.tiles([rows])]).float().numpy()
        np.testing.assert_array_equal(found, expected[rows.start : rows.stop].ravel())
