"""Tiny random checkpoints of every architecture, with a real tokenizer; `VARIANTS` switch every
feature on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 320


@dataclass(frozen=True)
class TinyModel:
    """A random checkpoint.

    path: folder of the checkpoint.
    reference: model of `transformers` in float32, from the same 16-bit weights.
    """

    path: Path
    reference: Any

    def text_parameters(self) -> Any:
        """The reference's parameters, each once, without an image encoder's."""
        for name, parameter in self.reference.named_parameters():
            if "vision_tower" not in name and "multi_modal_projector" not in name:
                yield parameter

    def logprobs(self, token_ids: list[int]) -> Any:
        """Log-probabilities [T, V] that `transformers` gives after each token."""
        import torch

        with torch.no_grad():
            return torch.log_softmax(
                self.reference(torch.tensor([token_ids])).logits[0].float(), dim=-1
            )


# Sizes, in the keys of each configuration class.
_COMMON: dict[str, Any] = dict(vocab_size=VOCABULARY, initializer_range=0.15, eos_token_id=0)
_LLAMA = dict(
    _COMMON, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=96, tie_word_embeddings=True, rms_norm_eps=1e-6,
    bos_token_id=None,
)  # fmt: skip
_OPT = dict(
    vocab_size=VOCABULARY, hidden_size=48, ffn_dim=80, num_hidden_layers=3, num_attention_heads=6,
    max_position_embeddings=96, word_embed_proj_dim=48, init_std=0.15, bos_token_id=0,
    eos_token_id=0, pad_token_id=1,
)  # fmt: skip
_GPT2 = dict(_COMMON, n_embd=48, n_layer=3, n_head=6, n_positions=96, bos_token_id=0)
_NEOX = dict(
    _COMMON, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3,
    max_position_embeddings=96, bos_token_id=0,
)  # fmt: skip
_BLOOM = dict(_COMMON, hidden_size=48, n_layer=3, n_head=6, bos_token_id=0)


def tiny_config(kind: str, sizes: Mapping[str, Any], **changes: Any) -> Any:
    """A configuration of the class `kind` of `transformers`."""
    import transformers

    return getattr(transformers, kind)(**{**sizes, **changes})


def config_like_llama(kind: str, **changes: Any) -> Any:
    """A configuration of a class that has the keys of `LlamaConfig`."""
    return tiny_config(kind, _LLAMA, **changes)


def llama_config(**changes: Any) -> Any:
    return config_like_llama("LlamaConfig", **changes)


def gemma_config(kind: str, **changes: Any) -> Any:
    gemma = dict(
        head_dim=16, num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=20, pad_token_id=1
    )
    return config_like_llama(kind, **{**gemma, **changes})


def gemma3_with_images() -> Any:
    """As the sizes from 4B on are published: the text model beside an image encoder."""
    from transformers import Gemma3Config

    text = gemma_config("Gemma3TextConfig", sliding_window_pattern=2).to_dict()
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3
    )


LONGROPE: dict[str, Any] = dict(
    rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
    short_factor=[1.0 + i / 4 for i in range(6)], long_factor=[2.0 + i for i in range(6)],
)  # fmt: skip
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=24
)
# Name -> configuration. The tests compare each variant with `transformers`, and check that every
# field of its `DecoderConfig` that differs from the default matters.
VARIANTS: dict[str, Callable[[], Any]] = {
    "llama": llama_config,
    "llama-untied-biases": lambda: llama_config(
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True, num_key_value_heads=6
    ),
    "llama-wide-heads": lambda: llama_config(head_dim=16, num_key_value_heads=1),
    "llama3-rope": lambda: llama_config(rope_parameters=LLAMA3),
    "llama-linear-rope": lambda: llama_config(
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    ),
    "llama-yarn-rope": lambda: llama_config(rope_parameters=YARN),
    "mistral": lambda: config_like_llama("MistralConfig", head_dim=None, sliding_window=11),
    "mistral-no-window": lambda: config_like_llama(
        "MistralConfig", head_dim=None, sliding_window=None, tie_word_embeddings=False
    ),
    "qwen2": lambda: config_like_llama("Qwen2Config"),
    "qwen2-windows": lambda: config_like_llama(
        "Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: config_like_llama("Qwen3Config", head_dim=16),
    "qwen3-windows": lambda: config_like_llama(
        "Qwen3Config",
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=2,
    ),
    "qwen3-yarn-rope": lambda: config_like_llama(
        "Qwen3Config",
        head_dim=16,
        rope_parameters={**YARN, "beta_slow": 0.1, "attention_factor": 1.2},
    ),
    "mixtral": lambda: config_like_llama(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=13
    ),
    "qwen3-moe": lambda: config_like_llama(
        "Qwen3MoeConfig",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        attention_bias=True,
    ),
    "qwen3-moe-raw-weights": lambda: config_like_llama(
        "Qwen3MoeConfig",
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=12,
    ),
    "gemma2": lambda: gemma_config(
        "Gemma2Config", attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: gemma_config(
        "Gemma3TextConfig",
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=50000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
    "gemma3-with-images": gemma3_with_images,
    "phi3": lambda: config_like_llama("Phi3Config", sliding_window=15, pad_token_id=1),
    "phi3-longrope": lambda: config_like_llama(
        "Phi3Config",
        head_dim=16,
        hidden_size=96,
        rope_parameters=LONGROPE,
        max_position_embeddings=400,
        original_max_position_embeddings=96,
        pad_token_id=1,
        tie_word_embeddings=False,
    ),
    "olmo2": lambda: config_like_llama("Olmo2Config"),
    "olmo2-untied-biases": lambda: config_like_llama(
        "Olmo2Config", tie_word_embeddings=False, attention_bias=True, num_key_value_heads=6
    ),
    "gpt2": lambda: tiny_config("GPT2Config", _GPT2),
    "gpt2-untied": lambda: tiny_config(
        "GPT2Config", _GPT2, n_inner=70, tie_word_embeddings=False, scale_attn_weights=False
    ),
    "gpt-neo": lambda: tiny_config(
        "GPTNeoConfig",
        _COMMON,
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        max_position_embeddings=96,
        window_size=11,
        attention_types=[[["global", "local"], 1], [["local"], 1]],
        bos_token_id=0,
    ),
    "mpt": lambda: tiny_config(
        "MptConfig", _COMMON, d_model=48, n_heads=6, n_layers=3, max_seq_len=96
    ),
    "pythia": lambda: tiny_config("GPTNeoXConfig", _NEOX),
    "gpt-neox-one-after-the-other": lambda: tiny_config(
        "GPTNeoXConfig",
        _NEOX,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_fast",
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="linear", rope_theta=5000.0, factor=2.0, partial_rotary_factor=0.5
        ),
    ),
    "bloom": lambda: tiny_config("BloomConfig", _BLOOM),
    "bloom-untied": lambda: tiny_config("BloomConfig", _BLOOM, tie_word_embeddings=False, n_head=4),
    "opt": lambda: tiny_config("OPTConfig", _OPT),
    "opt-350m": lambda: tiny_config(
        "OPTConfig", _OPT, word_embed_proj_dim=24, do_layer_norm_before=False
    ),
    "galactica": lambda: tiny_config(
        "OPTConfig", _OPT, activation_function="gelu", enable_bias=False
    ),
    "opt-plain-norms": lambda: tiny_config("OPTConfig", _OPT, layer_norm_elementwise_affine=False),
    "opt-untied": lambda: tiny_config("OPTConfig", _OPT, tie_word_embeddings=False),
}
# Name -> GGUF architecture, configuration, whether the GGUF reader of `transformers` knows all of
# it. The tests compare GGUF files of these with safetensors folders.
GGUF_VARIANTS: dict[str, tuple[str, Callable[[], Any], bool]] = {
    "llama": ("llama", lambda: llama_config(tie_word_embeddings=False), True),
    "llama3": ("llama", VARIANTS["llama3-rope"], False),
    "mixtral": (
        "llama",
        lambda: config_like_llama(
            "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        False,
    ),
    "qwen2": ("qwen2", VARIANTS["qwen2"], True),
    "qwen3": ("qwen3", lambda: config_like_llama("Qwen3Config", head_dim=128), True),
    "qwen3moe": (
        "qwen3moe",
        lambda: config_like_llama(
            "Qwen3MoeConfig",
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
        False,
    ),
    "phi3": ("phi3", VARIANTS["phi3"], False),
    "phi3-longrope": ("phi3", VARIANTS["phi3-longrope"], False),
    "olmo2": ("olmo2", VARIANTS["olmo2"], False),
    "gemma2": (
        "gemma2",
        lambda: gemma_config("Gemma2Config", head_dim=256, query_pre_attn_scalar=256),
        True,
    ),
    "gemma3": (
        "gemma3",
        lambda: gemma_config(
            "Gemma3TextConfig", head_dim=256, query_pre_attn_scalar=256, num_hidden_layers=7
        ),
        True,
    ),
}


def build_tiny(folder: Path, variant: str, tokenizer: bool = True) -> TinyModel:
    """Save a random model of a variant, and its tokenizer, in `folder`. The weights follow from the
    name alone.
    """
    model = save_random(folder, VARIANTS[variant](), seed=zlib.crc32(variant.encode()))
    if tokenizer:
        save_tokenizer(folder)
    return TinyModel(folder, model)


def save_random(folder: Path, config: Any, seed: int, dtype: str = "float16") -> Any:
    """Save a model whose parameters, norms and biases included, are random. Returns it in
    float32.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.3 + ("norm" in name and "weight" in name)
                )
            elif not parameter.any():
                parameter.normal_(0.0, 0.15)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # Loaded from the files: casting the model would round its rotary frequencies too, which no
    # checkpoint contains. Eager attention knows every feature; of soft caps, others do not in all
    # releases.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of `VOCABULARY` tokens, trained on a few sentences; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [
        "the quick brown fox jumps over the lazy dog",
        "question: answer: the the and of a to in is that it was",
    ]
    backend.train_from_iterator(text * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(
        folder
    )


def kv_bytes_per_token(config: Any, bytes_per_element: int) -> int:
    """Bytes of one position's keys and values in all layers that store them."""
    return 2 * config.num_cache_layers * config.kv_size * bytes_per_element
