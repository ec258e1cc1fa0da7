"""GGUF matrices rest, travel and multiply as published: equal to `transformers` in float32 with
their values.
"""

from functools import cache
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.block_formats import BLOCK_FORMATS
from flexgen_helm.quant.blocks import decode
from tests.helpers.gguf_files import Kind, contents, random_blocks, small_tokenizer, write_gguf
from tests.helpers.parity import assert_equals_reference, prompts
from tests.helpers.tiny_models import (
    VOCABULARY,
    config_like_llama,
    gemma_config,
    llama_config,
    save_random,
)

SIZES = dict(
    hidden_size=256,
    intermediate_size=512,
    head_dim=64,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# Name -> architecture, configuration, types of the layers' matrices by turns.
MODELS = {
    "llama": (
        "llama",
        llama_config(**SIZES, tie_word_embeddings=False),
        (Kind.Q4_K, Kind.Q6_K, Kind.F16),
    ),
    "llama-tied": (
        "llama",
        llama_config(**SIZES, tie_word_embeddings=True),
        (Kind.Q4_0, Kind.Q8_0),
    ),
    "qwen3": (
        "qwen3",
        config_like_llama("Qwen3Config", **SIZES | {"head_dim": 128}),
        (Kind.Q5_K, Kind.IQ4_XS, Kind.Q5_1),
    ),
    "gemma3": (
        "gemma3",
        gemma_config("Gemma3TextConfig", **SIZES | {"head_dim": 256}, query_pre_attn_scalar=256),
        (Kind.Q4_1, Kind.MXFP4, Kind.Q3_K),
    ),
}


def write(folder, name, kinds=None):
    """Write a model whose matrices have random blocks of the types; return its file."""
    arch, config, own_kinds = MODELS[name]
    kinds = kinds or own_kinds
    keys, tensors = contents(save_random(folder, config, seed=7), arch)
    draw, stored = np.random.default_rng(0), []
    for number, (tensor, values) in enumerate(tensors.items()):
        kind = (
            Kind.F32
            if values.ndim < 2
            else kinds[number % len(kinds)]
            if "blk" in tensor
            else Kind.Q8_0
        )
        if kind.name in BLOCK_FORMATS:
            values = random_blocks(kind, values.shape, draw)
        stored.append((tensor, values, kind))
    return write_gguf(folder / "m.gguf", arch, keys | small_tokenizer(VOCABULARY), stored)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built('qwen3') -> GGUF file, and log-probabilities by `transformers` in float32 with its
    values.
    """

    @cache
    def get(name):
        pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
        folder = tmp_path_factory.mktemp(name)
        file = write(folder, name)
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()

        @torch.no_grad()
        def logprobs(ids):
            return theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)

        return file, SimpleNamespace(logprobs=logprobs)

    return get


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
    requests = [
        GenerationRequest(
            prompt_token_ids=ids, max_tokens=(0, 3, 9)[i % 3], echo_logprobs=True, ignore_eos=True
        )
        for i, ids in enumerate(prompts(12, 40, seed=5))
    ]
    with Engine.from_pretrained(file, offload_dir=tmp_path, unverified=True, **WAYS[way]) as engine:
        for request, result in zip(requests, engine.run(requests), strict=True):
            assert_equals_reference(reference, list(request.prompt_token_ids), request, result)
    assert not [
        path for path in tmp_path.rglob("*published*/*") if path.suffix not in (".txt", ".lock")
    ]


def overwrite(file, tensor, content):
    """Put bytes into the sixth block of a matrix of Q4_0."""
    (part,) = GgufCheckpoint(file).stored_rows(tensor)
    with file.open("r+b") as opened:
        opened.seek(part.planes[0].offset + part.rows.start * part.planes[0].row_bytes + 5 * 18)
        opened.write(content)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_file(built, name):
    file, _ = built(name)
    checkpoint, reader = GgufCheckpoint(file), gguf.GGUFReader(file)
    stored = {bytes(tensor.data) for tensor in reader.tensors}
    assert len(checkpoint.formats) >= sum(
        tensor.tensor_type.name in BLOCK_FORMATS for tensor in reader.tensors
    )
    for tensor, fmt in checkpoint.formats.items():
        packed = torch.cat([*checkpoint.packed_tiles(tensor)])
        values = decode(packed.view(checkpoint.shapes[tensor][0], -1), fmt)
        order = checkpoint.order(tensor)
        assert torch.equal(
            (values if order is None else values[order]).half(), checkpoint.tensor(tensor)
        ), tensor
        assert bytes(packed.numpy()) in stored, tensor


def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path):
    file = write(tmp_path, "llama", (Kind.Q4_0,))
    overwrite(file, "layers.1.mlp.up.weight", np.float16("inf").tobytes())
    for read in (Engine.from_pretrained, lambda path: open_checkpoint(path).verify()):
        with pytest.raises(
            CheckpointError, match=("ffn_up.weight contains a value that is not finite")
        ):
            read(file)


def test_values_that_a_dtype_does_not_have_are_refused_by_name(tmp_path):
    file = write(tmp_path, "llama", (Kind.Q4_0,))
    # codes of -8
    overwrite(file, "layers.1.mlp.up.weight", np.float16(-9000).tobytes() + bytes(16))
    checkpoint = GgufCheckpoint(file)
    with pytest.raises(
        CheckpointError, match=("ffn_up.weight contains 72000, too large for float16")
    ):
        list(checkpoint.packed_tiles("layers.1.mlp.up.weight", torch.float16))
    assert [*checkpoint.packed_tiles("layers.1.mlp.down.weight", torch.float16)]
    with Engine.from_pretrained(file, unverified=True) as engine:  # float32 has them
        assert (
            engine.run([GenerationRequest(prompt_token_ids=[1, 2, 3], max_tokens=2)])[0].error
            is None
        )
