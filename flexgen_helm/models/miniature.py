"""Makes a configuration small: the same class and the same features, one period of its layers,
narrow matrices.

A model of such a configuration runs in a moment, whole by `transformers` and by the engine, so the
two can be compared for any model, wherever it is opened (`engine/proof.py`). Torch and
`transformers` are imported inside functions.

    hidden size 8192, 64 heads of 128, 80 layers       hidden size 64, 4 heads of 16, 2 layers
    window of 4096, every second layer                 window of 12, every second layer
    rotation, caps, scales, biases, tying              the same

What must not change with the size are features: which entries are there, which are zero, which are
equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexgen_helm.models.architectures import architecture_by_modules, architecture_of_config
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.decoder_config import DecoderConfig
from flexgen_helm.models.transformers_backend.config import TransformersConfig

HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
VOCABULARY, POSITIONS, WINDOW = 96, 128, 12
# Layers that are tried: as many as have every kind of layer.
_LAYER_COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
# More would take longer than somebody waits for.
MAX_WEIGHTS = 6_000_000

# Size of every small configuration -> entries that have it, where they are more than 1.
_SIZES = {
    HIDDEN: "hidden_size d_model n_embd embed_dim emb_dim",
    HIDDEN // 2: "word_embed_proj_dim embedding_size global_head_dim swa_head_dim",
    80: "intermediate_size ffn_dim decoder_ffn_dim n_inner ffn_hidden_size intermediate_size_mlp "
    "mlp_dim dff dense_intermediate_size block_ff_dim",
    40: "moe_intermediate_size expert_ffn_hidden_size expert_intermediate_size",
    48: (
        "shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size moe_latent_size"
    ),
    POSITIONS: (
        "max_position_embeddings n_positions max_sequence_length max_target_positions n_ctx "
        "index_topk"
    ),
    WINDOW: "sliding_window attention_chunk_size local_attention window_size",
    VOCABULARY: "vocab_size vocab_size_per_layer_input n_words decoder_vocab_size "
    "pronunciation_vocab_size shape_vocab_size",
    24: "q_lora_rank kv_lora_rank gate_low_rank_dim",
    HEAD_DIM: "qk_rope_head_dim qk_nope_head_dim v_head_dim swa_v_head_dim mamba_d_head "
    "mamba_head_dim linear_key_head_dim linear_value_head_dim",
    8: "rotary_dim hidden_size_per_layer_input laurel_rank num_experts "
    "num_local_experts n_routed_experts moe_num_experts mamba_d_state ssm_state_size "
    "mamba_chunk_size chunk_size",
    4: "linear_num_value_heads",
    0: "num_hidden_layers n_layer n_layers num_layers",  # the caller sets them
    2: "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts "
    "num_selected_experts n_group num_expert_group moe_router_num_groups "
    "n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups n_groups "
    "mamba_num_groups mamba_dt_rank linear_num_key_heads",
}
_SIZE_OF: Mapping[str, int] = {
    name: size for size, names in _SIZES.items() for name in names.split()
}
# Of parts beside the language model: they are built, and not used.
_SIZES_OF_OTHER_PARTS = dict(
    num_hidden_layers=1, num_blocks=1, num_attention_heads=4, image_size=28, patch_size=14
)
_LAYERS = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "swa_num_attention_heads",
)
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
)
# Numbers of layers, which become layers of the small configuration.
_NUMBERS_OF_LAYERS = {
    "mlp_only_layers",
    "attn_layer_indices",
    "moe_layers",
    "full_attn_idxs",
    "kv_shared_layer_index",
}
# Entries without influence on values, and those of tokens.
_WITHOUT_INFLUENCE = re.compile(
    "_name_or_path|architectures|auto_map|transformers_version|dtype|torch_dtype|use_cache|initializer_range|"
    "initializer_factor|init_std|id2label|label2id|problem_type|output_attentions|output_hidden_states|return_dict|"
    "chunk_size_feed_forward|quantization_config|gradient_checkpointing|task_specific_params|finetuning_task|"
    "tokenizer_class|prefix|torchscript|pruned_heads|is_encoder_decoder|cross_attention_hidden_size|"
    "router_jitter_noise|router_aux_loss_coef|output_router_logits|pretraining_tp|model_type|"
    r"text_config|.*(_token_ids?|dropout|_pdrop)"
)


def kind_text(content: Mapping[str, Any]) -> str:
    """Return what a `config.json` says besides sizes: two models of one kind compute by the same
    steps.

    Numbers count as 0, 1, or larger. Of entries with a value for every layer, the different values
    count.
    """
    text = content.get("text_config")
    entries = {**content, **text} if isinstance(text, Mapping) else dict(content)
    num_equal_heads = sum(
        bool(entries.get(name)) and entries[name] == entries.get(heads)
        for name in _KV_HEADS
        for heads in _HEADS
    )
    names = entries.get("architectures") or [""]
    features = {
        name: value
        for name, value in entries.items()
        if not _WITHOUT_INFLUENCE.fullmatch(name) and not _is_other_part(value)
    }
    return json.dumps([str(names[0]), num_equal_heads, _kind(features)], sort_keys=True)


def _is_other_part(value: Any) -> bool:
    """Whether an entry is the configuration of a part beside the language model; `attn_config` of
    MPT is none, and decides values.
    """
    return isinstance(value, Mapping) and bool(value.get("model_type"))


def _kind(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _kind(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return sorted({json.dumps(_kind(inner), sort_keys=True) for inner in value})
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (0, 1):
        return value
    return "n"


def miniatures(content: Mapping[str, Any], config: ModelConfig) -> Iterator[tuple[Any, Any]]:
    """Yield the class of `transformers` and small configurations of it that have every kind of
    layer of `config`.

    content: of `config.json`.
    """
    from flexgen_helm.models.transformers_backend.empty_model import class_and_config

    find = (
        architecture_by_modules
        if isinstance(config, TransformersConfig)
        else architecture_of_config
    )
    cls, whole = class_and_config(json.dumps(content))
    full = whole.to_dict()
    kinds = layer_kinds(config)
    counts_from_padding = isinstance(config, TransformersConfig) and config.modules.padding_id >= 0
    for layers in _layers_tried(full, config.num_layers):
        try:
            entries = small_config(full, layers)
            if not counts_from_padding:  # a published id may lie outside the small vocabulary
                entries["pad_token_id"] = VOCABULARY - 1
            small = type(whole)(**entries)
            small_content = json.loads(small.to_json_string()) | {"architectures": [cls.__name__]}
            small_kinds = layer_kinds(find(small_content).read_config(small_content))
        except Exception:  # a configuration class raises whatever its entries lead to
            continue
        if small_kinds == kinds:
            yield cls, small


def layer_kinds(config: ModelConfig) -> frozenset[Any]:
    """Return what distinguishes the layers of a model, apart from their sizes."""
    return frozenset(_layer_kind(config, layer) for layer in range(config.num_layers))


def _layer_kind(config: ModelConfig, layer: int) -> Any:
    window = config.window(layer)
    common = window is None, window is not None and window.is_chunked, config.moe(layer) is None
    if isinstance(config, DecoderConfig):
        return *common, config.layer_rope(layer) == config.rope
    assert isinstance(config, TransformersConfig)
    kind = config.modules.kind(layer)
    mixer = None if kind.mixer is None else replace(kind.mixer, states=(), width=0)
    names = tuple(name for name, _ in (*kind.matrices, *kind.resident))
    reads = any(layer in shared.readers for shared in config.modules.shared_keys)
    return (
        *common,
        names,
        tuple(experts.path for experts in kind.experts),
        mixer,
        kind.attends,
        reads,
    )


def _layers_tried(full: Mapping[str, Any], count: int) -> Iterator[list[int]]:
    """Yield the layers of the whole model that the small one has: the first of each kind, or a
    beginning.
    """
    lists = _layer_lists(full, count).values()
    shared = count - (full.get("num_kv_shared_layers") or 0)
    signatures = [
        (layer >= shared, *(json.dumps(values[layer]) for values in lists))
        for layer in range(count)
    ]
    first = sorted({signatures.index(signature) for signature in signatures})
    if lists and len(first) > 1:
        yield first
        yield sorted({*first, *(layer + 1 for layer in first if layer + 1 < count)})
    for number in sorted({*_LAYER_COUNTS, count}):
        if number <= min(count, _LAYER_COUNTS[-1]):
            yield list(range(number))


def _layer_lists(full: Mapping[str, Any], count: int) -> dict[str, Sequence[Any]]:
    """Return the entries that have a value for each layer."""
    return {
        name: value
        for name, value in full.items()
        if isinstance(value, (list, tuple))
        and len(value) == count
        and name not in _NUMBERS_OF_LAYERS
    }


def small_config(full: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the entries of a small configuration with these layers of the whole one."""
    numbers = {name: value for name, value in full.items() if isinstance(value, int)}
    count = next((numbers[name] for name in _LAYERS if name in numbers), len(layers))
    small = {
        name: value
        for name, value in full.items()
        if name not in ("architectures", "dtype", "torch_dtype")
    }
    for name, value in small.items():
        if isinstance(value, Mapping) and "model_type" in value:  # a part that sees or hears
            small[name] = {
                key: _smaller(key, inner) for key, inner in value.items()
            } | _SIZES_OF_OTHER_PARTS
        elif name == "per_layer_config" and isinstance(value, Mapping):
            of_layers = [value.get(str(layer)) for layer in layers]
            small[name] = {
                str(new): small_config(entries, layers)
                for new, entries in enumerate(of_layers)
                if entries
            }
        elif name in _NUMBERS_OF_LAYERS and isinstance(value, (list, tuple)):
            small[name] = [new for new, layer in enumerate(layers) if layer in value]
        else:
            small[name] = _smaller(name, value)
    for name, value in _layer_lists(full, count).items():
        small[name] = [_smaller(name, value[layer]) for layer in layers]
    small |= dict.fromkeys(numbers.keys() & _LAYERS, len(layers))
    if shared := full.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = sum(layer >= count - shared for layer in layers)
    if "first_k_dense_replace" in numbers:
        small["first_k_dense_replace"] = min(numbers["first_k_dense_replace"], 1)
    if "moe_layer_end_index" in numbers:
        small["moe_layer_end_index"] = len(layers) - 1
    for groups in numbers.keys() & {"n_group", "num_expert_group"}:
        if "topk_group" in numbers:  # experts are selected in as many groups as before, or fewer
            small["topk_group"] = small[groups] if numbers["topk_group"] == numbers[groups] else 1
    for name in ("word_embed_proj_dim", "embedding_size"):
        if full.get(name) is not None and full[name] == full.get("hidden_size"):
            small[name] = HIDDEN
    _set_heads(numbers, small)
    _set_states(full, small)
    _set_rope(full, small)
    return small


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _SIZE_OF and value > 1:
        return _SIZE_OF[name]
    return value % VOCABULARY if name.endswith("_token_id") else value


def _set_heads(numbers: Mapping[str, int], small: dict[str, Any]) -> None:
    """Set the heads so that those which are as many as others stay so.

    A head is wider than its share of the hidden size where it was another width than that.
    """
    heads = next((numbers[name] for name in _HEADS if name in numbers), HEADS)
    small |= dict.fromkeys(numbers.keys() & _HEADS, HEADS)
    for name in numbers.keys() & _KV_HEADS:
        small[name] = HEADS if numbers[name] >= heads else 1 if numbers[name] == 1 else HEADS // 2
    if "head_dim" in numbers:
        hidden = next(
            (numbers[name] for name in ("hidden_size", "d_model", "n_embd") if name in numbers), 0
        )
        small["head_dim"] = (
            HEAD_DIM if hidden and numbers["head_dim"] * heads == hidden else HEAD_DIM + 8
        )
        if numbers.keys() >= {"qk_rope_head_dim", "kv_lora_rank"}:
            parts = ("qk_rope_head_dim", "qk_nope_head_dim")
            is_sum = numbers["head_dim"] == sum(numbers[part] for part in parts)
            small["head_dim"] = (
                sum(small[part] for part in parts) if is_sum else small["qk_rope_head_dim"]
            )
    if small.get("query_pre_attn_scalar") is not None:
        small["query_pre_attn_scalar"] = 20  # no width of a head, so that a mistake shows


def _set_states(full: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Heads of Mamba are as wide together as what they are given."""
    inner = int((full.get("mamba_expand") or full.get("expand") or 2) * HIDDEN)
    for name in ("mamba_n_heads", "mamba_num_heads"):
        if isinstance(full.get(name), int):
            small[name] = inner // HEAD_DIM
    if "expand" in full and "head_dim" in full:  # Mamba 2
        small["num_heads"], small["head_dim"] = inner // HEAD_DIM, HEAD_DIM
    if full.get("mamba_d_ssm") is not None:
        small["mamba_d_ssm"] = inner
    if "linear_num_key_heads" in full and full["linear_num_key_heads"] == full.get(
        "linear_num_value_heads"
    ):
        small["linear_num_value_heads"] = small["linear_num_key_heads"]


def _set_rope(full: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Rotations are stretched as before, from a context that prompts of a few dozen tokens
    reach.
    """
    dim = small.get("head_dim") or HIDDEN // next(
        (small[name] for name in _HEADS if name in small), HEADS
    )
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(full.get(name), Mapping):
            small[name] = _small_rope(full[name], int(dim), full)
    if isinstance(full.get("original_max_position_embeddings"), int):
        small["original_max_position_embeddings"] = POSITIONS // 2


def _small_rope(rope: Mapping[str, Any], dim: int, full: Mapping[str, Any]) -> dict[str, Any]:
    # Parameters may be those of each kind of layer.
    small = {
        name: _small_rope(value, dim, full) if isinstance(value, Mapping) else value
        for name, value in rope.items()
    }
    rotated = (
        int(dim * (rope.get("partial_rotary_factor") or full.get("partial_rotary_factor") or 1.0))
        // 2
    )
    for name in ("short_factor", "long_factor"):
        if name in rope and rope[name] is not None:
            small[name] = [rope[name][len(rope[name]) * pair // rotated] for pair in range(rotated)]
    if rope.get("mrope_section") is not None:
        parts = len(rope["mrope_section"])
        small["mrope_section"] = [
            rotated - (parts - 1) * (rotated // parts),
            *[rotated // parts] * (parts - 1),
        ]
    if rope.get("original_max_position_embeddings") is not None:
        # Prompts reach beyond half of the positions, and beyond a quarter by far.
        long = rope.get("rope_type", rope.get("type")) in ("longrope", "su", "dynamic")
        small["original_max_position_embeddings"] = POSITIONS // (2 if long else 4)
    return small
