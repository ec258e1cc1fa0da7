"""Every key and tensor of a GGUF file is read or refused: log-probabilities of drawn files against
llama.cpp's.
"""

from functools import cache

import gguf
import numpy as np
import pytest
import transformers

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from tests.helpers.gguf_files import SMALL_TOKENIZER, Kind, contents, llama_cpp, write_gguf
from tests.helpers.tiny_models import config_like_llama

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS, HEAD_DIM = 64, 4, 2, 96, 64, 3, 16
PROMPT = [5, 9, 7, 20, 31, 8, 60, 44, 5, 9, 10, 12, 25, 33, 1, 2, 48, 50, 63, 40]
SCALE = 0.5
SCORED = (0, 13, 28, 50)
ARCHS = ("llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2")
EXPERTS = 8
OF_EXPERTS_ARCHS = ("mixtral", "qwen3moe")
KEYS = {
    "plain": {},
    "linear by factor": {"rope.scaling.factor": 4.0},
    "linear by old key": {"rope.scale_linear": 4.0},
    "none": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    "yarn and attn_factor": {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.5,
    },
    "attn_factor": {"rope.scaling.attn_factor": 1.5},
    "no head_count_kv": {"attention.head_count_kv": None},
    "no freq_base": {"rope.freq_base": None},
    "window": {"attention.sliding_window": 8},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "final cap": {"final_logit_softcapping": 3.0},
    "unknown": {"attention.scale": 0.5},
}  # fmt: skip


@cache
def plain(arch, kv_heads):
    """Keys and tensors of an architecture's model, without windows and caps, which are cases."""
    kind = {"qwen3moe": "Qwen3Moe", "gemma3": "Gemma3Text"}.get(arch, arch.capitalize())
    sizes = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-5,
        tie_word_embeddings=arch.startswith("gemma"), pad_token_id=0,
    )  # fmt: skip
    if arch in OF_EXPERTS_ARCHS:
        sizes |= dict(
            num_local_experts=EXPERTS,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    if arch.startswith(("gemma", "qwen3")):
        sizes["head_dim"] = HEAD_DIM
    config = config_like_llama(f"{kind}Config", **sizes)
    keys, tensors = contents(
        transformers.AutoModelForCausalLM.from_config(config), stored_arch(arch)
    )
    cases = (".attention.sliding_window", ".attn_logit_softcapping", ".final_logit_softcapping")
    return {
        **keys,
        **dict.fromkeys(cases),
        ".rope.dimension_count": HEAD_DIM,
        ".rope.freq_base": 5000.0,
    }, tensors


def stored_arch(arch):
    return "llama" if arch == "mixtral" else arch


def scales(count):
    """A factor of a matrix, or of every expert's: exact in float16, and another one for the next
    expert.
    """
    return (SCALE * 2.0 ** (np.arange(count) % 3)).astype(np.float32)


def write(
    path,
    arch,
    keys,
    more,
    folded=False,
    kind=Kind.F32,
):
    """keys: changed, without the architecture; None leaves one out. more: further tensors. kind: of
    the matrices.

    folded: scales are multiplied into their matrices instead: llama.cpp itself leaves some out
    (`ffn_down.scale` of Qwen2 and Phi-3). Matrices of another kind are stored as the numbers in
    float32 that they stand for: llama.cpp would round the other factor of a product too.
    """
    kv_heads = HEADS if "attention.head_count_kv" in keys else KV_HEADS
    content, tensors = plain(arch, kv_heads)
    tokens = {
        **SMALL_TOKENIZER, "tokenizer.ggml.tokens": [*(f"t{i}" for i in range(VOCAB - 2)), "t", "1"],
        "tokenizer.ggml.token_type": [gguf.TokenType.NORMAL] * VOCAB, "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0,
    }  # fmt: skip
    random = np.random.default_rng(3)
    stored = []
    for name, shape in {**{name: values.shape for name, values in tensors.items()}, **more}.items():
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
        if kind == Kind.F32 or values.ndim == 1 or "gate_inp" in name:
            stored.append((name, values + ("norm" in name), Kind.F32))
        elif folded:
            stored.append(
                (name, gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind), Kind.F32)
            )
        else:
            stored.append((name, values, kind))
    changed = {f".{name}": value for name, value in keys.items()}
    return write_gguf(path, stored_arch(arch), {**tokens, **content, **changed}, stored)


def theirs(path):
    """Log-probabilities of some tokens behind the prompt by llama.cpp; None if it refuses the
    file.
    """
    xllamacpp, settings = llama_cpp(path, 256)
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    try:
        server = xllamacpp.Server(settings)
    except Exception:  # the wheel raises RuntimeError, and others for what it did not foresee
        return None
    answer = server.handle_completions(
        {"prompt": PROMPT, "max_tokens": 1, "logprobs": VOCAB, "temperature": 0.0}
    )
    (token,) = answer["choices"][0]["logprobs"]["content"]
    found = {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}
    return [found[i] for i in SCORED]


def ours(path):
    """The same by the engine."""
    asked = [
        GenerationRequest(prompt_token_ids=[*PROMPT, i], max_tokens=0, echo_logprobs=True)
        for i in SCORED
    ]
    try:
        with Engine.from_pretrained(path) as engine:
            results = engine.run(asked)
    except (CheckpointError, UnsupportedArchitectureError):
        return None
    return [result.prompt_logprobs[-1] for result in results if result.prompt_logprobs is not None]


def layers(parts, shape=()):
    """Names of further tensors of every layer, and shapes."""
    sizes = {
        "attn_k": KV_HEADS * HEAD_DIM,
        "attn_v": KV_HEADS * HEAD_DIM,
        "ffn_gate": FFN,
        "ffn_up": FFN,
    }
    sizes["attn_qkv"] = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return {
        f"blk.{i}.{part}": shape or (sizes.get(part.split(".")[0], HIDDEN),)
        for i in range(LAYERS)
        for part in parts
    }


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
OF_EXPERTS = {
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
TENSORS = {
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
    **dict.fromkeys(("softmax", "one expert"), OF_EXPERTS_ARCHS),
    **dict.fromkeys(
        ("none", "attn_factor", "unknown", "weight.scale", "strange", "attn_qkv.bias"), ()
    ),
    "biases": ("llama",),
    "window": ("gemma2", "gemma3", "phi3"),
    "caps": ("gemma2",),
    "final cap": ("gemma2", "gemma3"),
    "attn_output.bias": ("llama", "mixtral"),
    "rope_freqs": ("llama", "mixtral"),
    # with such matrices
    "scale": tuple(arch for arch in ARCHS if arch != "phi3" and arch not in OF_EXPERTS_ARCHS),
    "scale of some": tuple(arch for arch in ARCHS if arch not in OF_EXPERTS_ARCHS),
    "scale of experts": OF_EXPERTS_ARCHS,
}


def archs_of(name):
    """All architectures where some take it and others do not; else those whose readers differ
    most.
    """
    return (
        ARCHS if name == "plain" or TAKEN_BY.get(name) else ("llama", "qwen3moe", "gemma3", "phi3")
    )


CASES = [(arch, name, keys, {}) for name, keys in KEYS.items() for arch in archs_of(name)]
CASES += [(arch, name, {}, more) for name, more in TENSORS.items() for arch in archs_of(name)]
SCALES_OF_EXPERTS = layers(
    [f"ffn_{part}_exps.scale" for part in ("gate", "up", "down")], (EXPERTS,)
)
CASES += [(arch, name, keys, {}) for arch in OF_EXPERTS_ARCHS for name, keys in OF_EXPERTS.items()]
CASES += [(arch, "scale of experts", {}, SCALES_OF_EXPERTS) for arch in OF_EXPERTS_ARCHS]


@pytest.mark.parametrize(
    "arch, name, keys, more", CASES, ids=[f"{arch}-{name}" for arch, name, *_ in CASES]
)
def test_a_file_has_llama_cpps_log_probabilities_or_is_refused(tmp_path, arch, name, keys, more):
    found = ours(write(tmp_path / "m.gguf", arch, keys, more))
    assert (found is not None) == (arch in TAKEN_BY.get(name, ARCHS))
    # llama.cpp has switched off this window (#13676)
    if found is None or (arch, name) == ("phi3", "window"):
        return
    reference = theirs(
        write(tmp_path / "folded.gguf", arch, keys, more, folded=arch not in ("llama", "qwen3"))
    )
    assert reference is not None, "llama.cpp refuses this file"
    # Its GELU is a table in float16.
    assert np.abs(np.array(found) - reference).max() < (5e-3 if arch.startswith("gemma") else 1e-4)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("arch", OF_EXPERTS_ARCHS)
def test_experts_of_another_type_are_the_numbers_that_they_stand_for(tmp_path, arch, kind):
    stored = Kind[kind]
    found = ours(write(tmp_path / "m.gguf", arch, {}, {}, kind=stored))
    reference = theirs(write(tmp_path / "folded.gguf", arch, {}, {}, folded=True, kind=stored))
    assert found is not None and reference is not None
    assert np.abs(np.array(found) - reference).max() < 1e-4
