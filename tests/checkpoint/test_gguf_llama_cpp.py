"""Every key and tensor of a GGUF file is read or refused: log-probabilities of drawn files against llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS, HEAD_DIM = 64, 4, 2, 96, 64, 3, 16
PROMPT = [5, 9, 7, 20, 31, 8, 60, 44, 5, 9, 10, 12, 25, 33, 1, 2, 48, 50, 63, 40]
SCALE = 0.5
SCORED = (0, 13, 28, 50)
ARCHS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2")
KEYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear by factor": {"rope.scaling.factor": 4.0},
    "linear by old key": {"rope.scale_linear": 4.0},
    "none": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    "yarn and attn_factor": {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.5,
    },
    "attn_factor": {"rope.scaling.attn_factor": 1.5},
    "no head_count_kv": {"attention.head_count_kv": None},
    "no freq_base": {"rope.freq_base": None},
    "window": {"attention.sliding_window": 8},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "final cap": {"final_logit_softcapping": 3.0},
    "unknown": {"attention.scale": 0.5},
}  # fmt: skip


def tensors(arch: str, kv_heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor."""
    query, keys = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    yield "token_embd.weight", (VOCAB, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    if not arch.startswith("gemma"):
        yield "output.weight", (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"blk.{i}."
        if arch == "phi3":
            yield layer + "attn_qkv.weight", (query + 2 * keys, HIDDEN)
            yield layer + "ffn_up.weight", (2 * FFN, HIDDEN)
        else:
            yield layer + "attn_q.weight", (query, HIDDEN)
            yield layer + "attn_k.weight", (keys, HIDDEN)
            yield layer + "attn_v.weight", (keys, HIDDEN)
            yield layer + "ffn_gate.weight", (FFN, HIDDEN)
            yield layer + "ffn_up.weight", (FFN, HIDDEN)
        yield layer + "attn_output.weight", (HIDDEN, query)
        yield layer + "ffn_down.weight", (HIDDEN, FFN)
        if arch != "olmo2":
            yield layer + "attn_norm.weight", (HIDDEN,)
            yield layer + "ffn_norm.weight", (HIDDEN,)
        if arch in ("gemma2", "gemma3", "olmo2"):
            yield layer + "post_attention_norm.weight", (HIDDEN,)
            yield layer + "post_ffw_norm.weight", (HIDDEN,)
        if arch in ("qwen3", "gemma3", "olmo2"):
            yield layer + "attn_q_norm.weight", (query if arch == "olmo2" else HEAD_DIM,)
            yield layer + "attn_k_norm.weight", (keys if arch == "olmo2" else HEAD_DIM,)
        if arch == "qwen2":
            for part, size in (("q", query), ("k", keys), ("v", keys)):
                yield f"{layer}attn_{part}.bias", (size,)


def write(path: Path, arch: str, keys: dict[str, Any], more: dict[str, tuple[int, ...]], folded: bool = False) -> Path:
    """keys: changed, without the architecture; None leaves one out. more: further tensors. folded: scales are
    multiplied into their matrices instead: llama.cpp itself leaves some out (`ffn_down.scale` of Qwen2 and Phi-3).
    """
    content = {
        "block_count": LAYERS, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5000.0,
        "rope.dimension_count": HEAD_DIM, "vocab_size": VOCAB, **keys,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    for name, value in content.items():
        if value is not None:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"{arch}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(f"t{i}" for i in range(VOCAB - 2)), "t", "1"])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(3)
    kv_heads = content["attention.head_count_kv"] or HEADS
    for name, shape in {**dict(tensors(arch, kv_heads)), **more}.items():
        # Float16 holds these exactly, so that neither side rounds.
        values = random.normal(0, 0.3, shape).astype(np.float16).astype(np.float32)
        if name.endswith(".weight") and name.replace(".weight", ".scale") in more:
            values *= SCALE if folded else 1.0
        if name.endswith((".scale", "rope_freqs.weight")):
            values = np.full(shape, SCALE, np.float32)
        if not (folded and name.endswith(".scale")):
            writer.add_tensor(name, values + ("norm" in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(path: Path) -> list[float] | None:
    """Log-probabilities of some tokens behind the prompt by llama.cpp; None if it refuses the file."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's wheel is not installed (pip install xllamacpp)")
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(path), 256, 1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    try:
        server = xllamacpp.Server(settings)
    except Exception:  # the wheel raises RuntimeError, and others for what it did not foresee
        return None
    answer = server.handle_completions({"prompt": PROMPT, "max_tokens": 1, "logprobs": VOCAB, "temperature": 0.0})
    (token,) = answer["choices"][0]["logprobs"]["content"]
    found = {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}
    return [found[i] for i in SCORED]


def ours(path: Path) -> list[float] | None:
    """The same by the engine."""
    asked = [GenerationRequest(prompt_token_ids=[*PROMPT, i], max_tokens=0, echo_logprobs=True) for i in SCORED]
    try:
        with Engine.from_pretrained(path) as engine:
            results = engine.run(asked)
    except (CheckpointError, UnsupportedArchitectureError):
        return None
    return [result.prompt_logprobs[-1] for result in results if result.prompt_logprobs is not None]


def layers(parts: Sequence[str], shape: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Names of further tensors of every layer, and shapes."""
    sizes = {"attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM, "ffn_gate": FFN, "ffn_up": FFN}
    sizes["attn_qkv"] = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return {
        f"blk.{i}.{part}": shape or (sizes.get(part.split(".")[0], HIDDEN),) for i in range(LAYERS) for part in parts
    }


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "biases": layers([f"{part}.bias" for part in MATRICES]),
    "attn_output.bias": layers(["attn_output.bias"]),
    "attn_qkv.bias": layers(["attn_qkv.bias"]),
    "scale": layers([f"{part}.scale" for part in MATRICES], (1,)),
    "scale of some": layers(["attn_output.scale", "ffn_down.scale"], (1,)),
    "weight.scale": layers(["attn_output.weight.scale"], (1,)),
    "rope_freqs": {"rope_freqs.weight": (HEAD_DIM // 2,)},
    "strange": {"strange.weight": (HIDDEN,)},
}
# Which architectures have what is not in every case; all refuse what is empty here.
TAKEN_BY = {
    **dict.fromkeys(("none", "attn_factor", "unknown", "weight.scale", "strange", "attn_qkv.bias"), ()),
    **dict.fromkeys(("biases", "attn_output.bias", "rope_freqs"), ("llama",)),
    "window": ("gemma2", "gemma3", "phi3"),
    "caps": ("gemma2",),
    "final cap": ("gemma2", "gemma3"),
    "scale": tuple(arch for arch in ARCHS if arch != "phi3"),  # which has no such matrices
}
CASES = [(arch, name, keys, {}) for arch in ARCHS for name, keys in KEYS.items()]
CASES += [(arch, name, {}, more) for arch in ARCHS for name, more in TENSORS.items()]


@pytest.mark.parametrize(("arch", "name", "keys", "more"), CASES, ids=[f"{arch}-{name}" for arch, name, *_ in CASES])
def test_a_file_has_llama_cpps_log_probabilities_or_is_refused(
    tmp_path: Path, arch: str, name: str, keys: dict[str, Any], more: dict[str, tuple[int, ...]]
) -> None:
    found = ours(write(tmp_path / "m.gguf", arch, keys, more))
    assert (found is not None) == (arch in TAKEN_BY.get(name, ARCHS))
    if found is None or (arch, name) == ("phi3", "window"):  # llama.cpp has switched off this window (#13676)
        return
    reference = theirs(write(tmp_path / "folded.gguf", arch, keys, more, folded=arch not in ("llama", "qwen3")))
    assert reference is not None, "llama.cpp refuses this file"
    # Its GELU is a table in float16.
    assert np.abs(np.array(found) - reference).max() < (5e-3 if arch.startswith("gemma") else 1e-4)
