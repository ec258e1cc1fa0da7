"""Qwen3 with experts (30B-A3B, 235B-A22B): many small experts, eight for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import qwen3
from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.architectures.fields import layer_indices, read_windows
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.decoder_config import DecoderConfig


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = {"num_key_value_heads": 4, "sliding_window": 4096, **config}  # the defaults of `transformers`
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    experts = MoEConfig(
        count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        normalize=config.get("norm_topk_prob", False),
        dense_layers=tuple(i for i in layer_indices(config) if i in dense or (i + 1) % step),
    )
    windows = read_windows(config) if config.get("use_sliding_window") else ()
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return qwen3.read_config(config, "qwen3_moe", experts=experts, windows=windows, head_dim=head_dim)


_MLP = "layers.{i}.mlp."
ARCHITECTURE = Architecture(
    name="qwen3_moe",
    hf_names=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    read_config=read_config,
    tensors={
        **qwen3.ARCHITECTURE.tensors,
        "layers.{i}.mlp.router": TensorSource(_MLP + "gate"),
        "layers.{i}.mlp.experts.{e}.gate": TensorSource(_MLP + "experts.{e}.gate_proj"),
        "layers.{i}.mlp.experts.{e}.up": TensorSource(_MLP + "experts.{e}.up_proj"),
        "layers.{i}.mlp.experts.{e}.down": TensorSource(_MLP + "experts.{e}.down_proj"),
    },
    gguf_names=("qwen3moe",),
    gguf_tensors=qwen3.ARCHITECTURE.gguf_tensors,
)
