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
F32 = gguf.GGMLQuantizationType.F32
ARCHS = ("llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2")
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_FFN = 8, 2, 32
# Of files with experts; Mixtral's are Llama's, and its experts have the size of an MLP.
EXPERT_KEYS: dict[str, dict[str, int]] = {
    "mixtral": {"expert_count": EXPERTS, "expert_used_count": EXPERTS_PER_TOKEN},
    "qwen3moe": {
        "expert_count": EXPERTS, "expert_used_count": EXPERTS_PER_TOKEN, "expert_feed_forward_length": EXPERT_FFN,
    },
}  # fmt: skip
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
        yield layer + "attn_output.weight", (HIDDEN, query)
        if arch in EXPERT_KEYS:
            inner = FFN if arch == "mixtral" else EXPERT_FFN
            yield layer + "ffn_gate_inp.weight", (EXPERTS, HIDDEN)
            yield layer + "ffn_gate_exps.weight", (EXPERTS, inner, HIDDEN)
            yield layer + "ffn_up_exps.weight", (EXPERTS, inner, HIDDEN)
            yield layer + "ffn_down_exps.weight", (EXPERTS, HIDDEN, inner)
        else:
            if arch != "phi3":
                yield layer + "ffn_gate.weight", (FFN, HIDDEN)
                yield layer + "ffn_up.weight", (FFN, HIDDEN)
            yield layer + "ffn_down.weight", (HIDDEN, FFN)
        if arch != "olmo2":
            yield layer + "attn_norm.weight", (HIDDEN,)
            yield layer + "ffn_norm.weight", (HIDDEN,)
        if arch in ("gemma2", "gemma3", "olmo2"):
            yield layer + "post_attention_norm.weight", (HIDDEN,)
            yield layer + "post_ffw_norm.weight", (HIDDEN,)
        if arch in ("qwen3", "qwen3moe", "gemma3", "olmo2"):
            yield layer + "attn_q_norm.weight", (query if arch == "olmo2" else HEAD_DIM,)
            yield layer + "attn_k_norm.weight", (keys if arch == "olmo2" else HEAD_DIM,)
        if arch == "qwen2":
            for part, size in (("q", query), ("k", keys), ("v", keys)):
                yield f"{layer}attn_{part}.bias", (size,)


def scales(count: int) -> np.ndarray:
    """A factor of a matrix, or of every expert's: exact in float16, and another one for the next expert."""
    return (SCALE * 2.0 ** (np.arange(count) % 3)).astype(np.float32)


def write(
    path: Path,
    arch: str,
    keys: dict[str, Any],
    more: dict[str, tuple[int, ...]],
    folded: bool = False,
    kind: gguf.GGMLQuantizationType = F32,
) -> Path:
    """keys: changed, without the architecture; None leaves one out. more: further tensors. kind: of the matrices.

    folded: scales are multiplied into their matrices instead: llama.cpp itself leaves some out (`ffn_down.scale` of
    Qwen2 and Phi-3). Matrices of another kind are stored as the numbers in float32 that they stand for: llama.cpp
    would round the other factor of a product too.
    """
    content = {
        "block_count": LAYERS, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5000.0,
        "rope.dimension_count": HEAD_DIM, "vocab_size": VOCAB,
        **EXPERT_KEYS.get(arch, {}), **keys,
    }  # fmt: skip
    stored_arch = "llama" if arch == "mixtral" else arch
    writer = gguf.GGUFWriter(path, stored_arch)
    for name, value in content.items():
        if value is not None:
            add = {
                str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool,
            }[type(value)]  # fmt: skip
            add(f"{stored_arch}.{name}", value)
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
        if folded and name.endswith(".weight") and name.replace(".weight", ".scale") in more:
            (count,) = more[name.replace(".weight", ".scale")]
            values = (values.reshape(count, -1) * scales(count)[:, None]).reshape(shape)
        if name.endswith(".scale"):
            values = scales(*shape)
        if name == "rope_freqs.weight":
            values = np.full(shape, SCALE, np.float32)
        if folded and name.endswith(".scale"):
            continue
        if kind == F32 or values.ndim == 1 or "gate_inp" in name:
            writer.add_tensor(name, values + ("norm" in name))
            continue
        data = gguf.quants.quantize(values, kind)
        if folded:
            writer.add_tensor(name, gguf.quants.dequantize(data, kind).astype(np.float16).astype(np.float32))
        else:
            writer.add_tensor(name, data, raw_dtype=kind)
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
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "softmax": {"expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0},
    "one expert": {"expert_used_count": 1},
    "no expert_used_count": {"expert_used_count": None},
    "sigmoid": {"expert_gating_func": 2},
    "weights as they are": {"expert_weights_norm": False},
    "scaled weights": {"expert_weights_scale": 2.0},
    "shared": {"expert_shared_count": 1},
    "groups": {"expert_group_count": 2, "expert_group_used_count": 1},
    "dense layers": {"leading_dense_block_count": 1},
}
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
    **dict.fromkeys(OF_EXPERTS, ()),
    **dict.fromkeys(("softmax", "one expert"), tuple(EXPERT_KEYS)),
    **dict.fromkeys(("none", "attn_factor", "unknown", "weight.scale", "strange", "attn_qkv.bias"), ()),
    "biases": ("llama",),
    "window": ("gemma2", "gemma3", "phi3"),
    "caps": ("gemma2",),
    "final cap": ("gemma2", "gemma3"),
    "attn_output.bias": ("llama", "mixtral"),
    "rope_freqs": ("llama", "mixtral"),
    "scale": tuple(arch for arch in ARCHS if arch != "phi3" and arch not in EXPERT_KEYS),  # with such matrices
    "scale of some": tuple(arch for arch in ARCHS if arch not in EXPERT_KEYS),
    "scale of experts": tuple(EXPERT_KEYS),
}
CASES = [(arch, name, keys, {}) for arch in ARCHS for name, keys in KEYS.items()]
CASES += [(arch, name, {}, more) for arch in ARCHS for name, more in TENSORS.items()]
SCALES_OF_EXPERTS = layers([f"ffn_{part}_exps.scale" for part in ("gate", "up", "down")], (EXPERTS,))
CASES += [(arch, name, keys, {}) for arch in EXPERT_KEYS for name, keys in OF_EXPERTS.items()]
CASES += [(arch, "scale of experts", {}, SCALES_OF_EXPERTS) for arch in EXPERT_KEYS]


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


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("arch", list(EXPERT_KEYS))
def test_experts_of_another_type_are_the_numbers_that_they_stand_for(tmp_path: Path, arch: str, kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    found = ours(write(tmp_path / "m.gguf", arch, {}, {}, kind=stored))
    reference = theirs(write(tmp_path / "folded.gguf", arch, {}, {}, folded=True, kind=stored))
    assert found is not None and reference is not None
    assert np.abs(np.array(found) - reference).max() < 1e-4
