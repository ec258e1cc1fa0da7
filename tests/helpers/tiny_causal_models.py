"""A tiny random model of every causal class of transformers, from its default config with smaller
sizes.
"""

from __future__ import annotations

from typing import Any

from flexgen_helm.models.architectures.base import UNLISTED_CLASSES

# By names of config entries; those that a config does not have are left out.
_SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, d_model=32, n_embd=32, dim=32, embed_dim=32, hidden_dim=32,
    embedding_size=32, num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, encoder_layers=2,
    decoder_layers=2, num_encoder_layers=2, num_decoder_layers=2, depth=1, num_attention_heads=4,
    n_head=4, n_heads=4, num_heads=4, num_key_value_heads=2, encoder_attention_heads=4,
    decoder_attention_heads=4, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
    intermediate_size=48, ffn_dim=48, n_inner=48, d_ff=48, encoder_ffn_dim=48, decoder_ffn_dim=48,
    mlp_dim=48, num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24, head_dim=8,
    max_position_embeddings=64, n_positions=64, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=1, d_kv=8,
    image_size=28, patch_size=14, pad_token_id=63, bos_token_id=62, eos_token_id=61,
    vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, is_decoder=True, emb_dim=32,
    n_words=64, pronunciation_vocab_size=64, shape_vocab_size=64, encoder_hash_byte_group_vocab=64,
    sliding_window=4, attention_chunk_size=4,
)  # fmt: skip
# What the defaults of a class lack or make inconsistent. None: left as it is by default.
_CHANGES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": dict(mamba_n_heads=8, mamba_d_head=8, attn_layer_indices=[1]),
    "Gemma3nForCausalLM": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["full_attention", "sliding_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4, intermediate_size=[48] * 4,
    ),
    "Gemma4ForCausalLM": dict(
        num_hidden_layers=6, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=16, enable_moe_block=True, top_k_experts=2,
    ),
    "CohereCompassForCausalLM": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
            for kind in ("sliding_attention", "full_attention")
        },
    ),
    **dict.fromkeys(("CodeGenForCausalLM", "GPTJForCausalLM"), dict(rotary_dim=4)),
    "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 1]]),
    "GraniteMoeHybridForCausalLM": dict(mamba_n_heads=8, mamba_d_head=8, layer_types=["mamba", "attention"]),
    "HunYuanDenseV1ForCausalLM": dict(head_dim=8),
    "HunYuanMoEV1ForCausalLM": dict(head_dim=8, num_experts=4, moe_topk=2),
    "JambaForCausalLM": dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "Lfm2ForCausalLM": dict(layer_types=["conv", "full_attention"]),
    "Lfm2MoeForCausalLM": dict(layer_types=["conv", "full_attention"]),
    "Mamba2ForCausalLM": dict(num_heads=8, head_dim=8),
    "Llama4ForCausalLM": dict(
        num_hidden_layers=4, no_rope_layer_interval=2, interleave_moe_layer_step=2, floor_scale=3,
        intermediate_size=24,
        intermediate_size_mlp=48, layer_types=["chunked_attention", "full_attention"] * 2,
    ),
    "MinistralForCausalLM": dict(head_dim=8),
    "MllamaForCausalLM": dict(num_hidden_layers=4),  # the fourth attends to an image
    "ReformerModelWithLMHead": dict(axial_pos_embds_dim=[16, 16], axial_pos_shape=[8, 8], attn_layers=["local", "lsh"]),
    "Mistral4ForCausalLM": dict(
        num_key_value_heads=4, head_dim=None, rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=8,
            beta_fast=32.0, beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
            partial_rotary_factor=0.5,
        ),
    ),
    "NemotronForCausalLM": dict(num_key_value_heads=2, head_dim=8),
    "Dots1ForCausalLM": dict(n_routed_experts=4, n_shared_experts=1),
    "ZayaForCausalLM": dict(num_experts_per_tok=1),
    "Dots3NoteForCausalLM": dict(num_key_value_heads=4),
    "ZambaForCausalLM": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, layer_types=None),
    "Zamba2ForCausalLM": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, layer_types=None),
    "DbrxForCausalLM": dict(attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0)),
    "Ernie4_5_MoeForCausalLM": dict(moe_k=2, moe_num_experts=4),
    **dict.fromkeys(
        (
            "AXK1ForCausalLM", "AXK2ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
            "HYV4ForCausalLM", "MiniCPM3ForCausalLM", "YoutuForCausalLM",
        ),
        dict(num_key_value_heads=4),  # latent attention has keys of its own for every head
    ),
    "BailingHybridForCausalLM": dict(
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, num_local_experts=4,
    ),
    "KimiLinearForCausalLM": dict(
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=4, n_group=2,
        topk_group=1, linear_head_dim=8, linear_num_heads=4, num_experts_per_tok=2,
        num_local_experts=4,
    ),
    # Positions are counted from the padding token's id on.
    **dict.fromkeys(
        (
            "CamembertForCausalLM", "Data2VecTextForCausalLM", "RobertaForCausalLM",
            "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM",
            "XmodForCausalLM",
        ),
        dict(pad_token_id=1),
    ),
    "LongcatFlashForCausalLM": dict(ffn_hidden_size=48, expert_ffn_hidden_size=24),
}  # fmt: skip


# Of these a default config makes no model: it lacks entries that only published configs have, or a
# library.
UNBUILT = {
    "Gemma3nForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "Qwen4ExpForCausalLM",
}


def causal_classes() -> list[str]:
    """The names of all causal classes of transformers that can be built here."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted((set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) | UNLISTED_CLASSES) - UNBUILT)


def tiny_config(name: str) -> Any:
    """A config of the class `name` with small sizes, in its parts too."""
    import transformers

    return _shrink(getattr(transformers, name).config_class, _CHANGES.get(name, {}))


def _shrink(config_class: Any, changes: dict[str, Any]) -> Any:
    default = config_class()
    entries = default.to_dict()
    sizes = {
        key: size
        for key, size in {**_SIZES, **changes}.items()
        if (key in entries or key in changes)
    }
    sizes = {key: size for key, size in sizes.items() if size is not None}
    if "layer_types" in entries and "layer_types" not in changes and entries["layer_types"]:
        count = next(
            (sizes[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in sizes),
            2,
        )
        sizes["layer_types"] = entries["layer_types"][-count:]
    parts = {key: getattr(default, key, None) for key in config_class.sub_configs or {}}
    parts = {key: _shrink(type(part), {}) for key, part in parts.items() if part is not None}
    return config_class(
        **{**sizes, **parts, **{key: value for key, value in changes.items() if value is not None}}
    )
