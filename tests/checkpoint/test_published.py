"""GGUF matrices rest, travel and multiply as published: equal to `transformers` in float32 with their values."""

import random

import numpy as np
import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import BLOCK_FORMATS
from tests.helpers.gguf_files import SMALL_TOKENIZER, Kind, contents, random_blocks, write_gguf
from tests.helpers.parity import assert_equals_reference, prompts
from tests.helpers.tiny_models import VOCABULARY, config_like_llama, gemma_config, llama_config, save_random

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Name -> architecture, configuration, types of the layers' matrices by turns.
MODELS = {
    "llama": ("llama", lambda: llama_config(**SIZES, tie_word_embeddings=False), (Kind.Q4_K, Kind.Q6_K, Kind.F16)),
    "llama-tied": ("llama", lambda: llama_config(**SIZES, tie_word_embeddings=True), (Kind.Q4_0, Kind.Q8_0)),
    "qwen3": (
        "qwen3",
        lambda: config_like_llama("Qwen3Config", **{**SIZES, "head_dim": 128}),
        (Kind.Q5_K, Kind.IQ4_XS, Kind.Q5_1),
    ),
    "gemma3": (
        "gemma3",
        lambda: gemma_config("Gemma3TextConfig", **{**SIZES, "head_dim": 256}, query_pre_attn_scalar=256),
        (Kind.Q4_1, Kind.MXFP4, Kind.Q3_K),
    ),
}


def write(path, model, arch, kinds, table=Kind.Q8_0):
    """Write a model whose matrices have random blocks of the types."""
    keys, tensors = contents(model, arch)
    keys |= {**SMALL_TOKENIZER, "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCABULARY)]}
    draw, stored = np.random.default_rng(0), []
    for number, (name, values) in enumerate(tensors.items()):
        kind = Kind.F32 if values.ndim < 2 else table if "blk" not in name else kinds[number % len(kinds)]
        if kind.name in BLOCK_FORMATS:
            values = random_blocks(kind, values.shape, draw)
        stored.append((name, values, kind))
    return write_gguf(path, arch, keys, stored)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built('qwen3') -> GGUF file, and log-probabilities by `transformers` in float32 with its values."""
    made = {}

    def get(name):
        if name not in made:
            pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
            from transformers import AutoModelForCausalLM

            arch, config, kinds = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            file = write(folder / "m.gguf", save_random(folder, config(), seed=7), arch, kinds)
            theirs = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            made[name] = file, Reference(theirs)
        return made[name]

    return get


class Reference:
    def __init__(self, model):
        self._model = model

    def logprobs(self, ids):
        with torch.no_grad():
            return self._model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


WAYS = {
    "in memory": {},
    "streamed": {"limits": MemoryLimits(cpu=6 << 20)},
    "batch-invariant": {"batch_invariant": True},
    "gpu in host memory": {"device": "sim", "limits": MemoryLimits(gpu=6 << 20)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_equal_those_of_the_published_values(built, name, way, tmp_path):
    file, reference = built(name)
    draw = random.Random(3)
    requests = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=draw.choice([0, 3, 9]), echo_logprobs=True, ignore_eos=True)
        for ids in prompts(12, 40, seed=5)
    ]
    with Engine.from_pretrained(file, offload_dir=tmp_path, unverified=True, **WAYS[way]) as engine:
        results = engine.run(requests)
        for request, result in zip(requests, results, strict=True):
            assert_equals_reference(reference, list(request.prompt_token_ids), request, result)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix not in (".txt", ".lock")]
    assert sum(path.stat().st_size for path in written if "published" in str(path)) == 0


def extents(checkpoint, tensor):
    """Where a file has the rows of a matrix."""
    found = []
    for part in checkpoint.stored_rows(tensor):
        (plane,) = part.planes
        found.append(tuple(plane.offset + row * plane.row_bytes for row in (part.rows.start, part.rows.stop)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_file(built, name):
    file, _ = built(name)
    checkpoint, data = GgufCheckpoint(file), file.read_bytes()
    matrices = [tensor for tensor, shape in checkpoint.shapes.items() if len(shape) == 2]
    assert {*checkpoint.formats} >= {tensor for tensor in matrices if "F16" not in str(checkpoint._tensors[tensor])}
    for tensor, fmt in checkpoint.formats.items():
        packed = torch.cat([*checkpoint.packed_tiles(tensor)])
        assert bytes(packed.numpy()) == b"".join(data[begin:end] for begin, end in extents(checkpoint, tensor))
        values = decode(packed.view(checkpoint.shapes[tensor][0], -1), fmt)
        order = checkpoint.order(tensor)
        values = values if order is None else values[order]
        assert torch.equal(values.half(), checkpoint.tensor(tensor)), tensor


def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path):
    folder = tmp_path
    config = llama_config(**SIZES, tie_word_embeddings=False)
    file = write(folder / "m.gguf", save_random(folder, config, seed=7), "llama", (Kind.Q4_0,))
    ((begin, _),) = extents(GgufCheckpoint(file), "layers.1.mlp.up.weight")
    with file.open("r+b") as opened:
        opened.seek(begin + 5 * 18)
        opened.write(np.float16("inf").tobytes())
    with pytest.raises(CheckpointError, match="ffn_up.weight contains a value that is not finite"):
        Engine.from_pretrained(file)
    with pytest.raises(CheckpointError, match="ffn_up.weight contains a value that is not finite"):
        open_checkpoint(file).verify()


def test_values_that_a_dtype_does_not_have_are_refused_by_name(tmp_path):
    config = llama_config(**SIZES, tie_word_embeddings=False)
    file = write(tmp_path / "m.gguf", save_random(tmp_path, config, seed=7), "llama", (Kind.Q4_0,))
    ((begin, _),) = extents(GgufCheckpoint(file), "layers.1.mlp.up.weight")
    with file.open("r+b") as opened:
        opened.seek(begin + 5 * 18)
        opened.write(np.float16(-9000).tobytes() + bytes(16))  # codes of -8
    checkpoint = GgufCheckpoint(file)
    values = torch.cat([*checkpoint.packed_tiles("layers.1.mlp.up.weight")]).view(512, -1)
    assert decode(values, checkpoint.formats["layers.1.mlp.up.weight"]).max() == 72000
    with pytest.raises(CheckpointError, match="ffn_up.weight contains 72000, too large for float16"):
        list(checkpoint.packed_tiles("layers.1.mlp.up.weight", torch.float16))
    assert [*checkpoint.packed_tiles("layers.1.mlp.down.weight", torch.float16)]
    with Engine.from_pretrained(file, unverified=True) as engine:  # float32 has them
        assert engine.run([GenerationRequest(prompt_token_ids=[1, 2, 3], max_tokens=2)])[0].error is None
