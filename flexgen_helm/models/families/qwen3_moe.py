"""Qwen3 with experts (30B-A3B, 235B-A22B): many small experts, eight for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.families import llama, qwen3
from flexgen_helm.models.families.base import Family, Source
from flexgen_helm.models.families.fields import read_windows
from flexgen_helm.models.spec import ExpertSpec, ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    experts = ExpertSpec(
        count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        normalize=config.get("norm_topk_prob", False),
        dense_layers=tuple(i for i in range(config["num_hidden_layers"]) if i in dense or (i + 1) % step),
    )
    windows = read_windows(config, lambda layer: True) if config.get("use_sliding_window") else ()
    return qwen3.read_config(config, "qwen3_moe", experts=experts, windows=windows)


def read_gguf(metadata: Mapping[str, Any]) -> ModelSpec:
    return llama.read_gguf(metadata, "qwen3moe", "qwen3_moe", qk_norm=True)


_MLP = "layers.{i}.mlp."
FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    read_config=read_config,
    prefixes=qwen3.FAMILY.prefixes,
    tensors={
        **qwen3.FAMILY.tensors,
        "layers.{i}.mlp.router": Source(_MLP + "gate"),
        "layers.{i}.mlp.experts.{e}.gate": Source(_MLP + "experts.{e}.gate_proj"),
        "layers.{i}.mlp.experts.{e}.up": Source(_MLP + "experts.{e}.up_proj"),
        "layers.{i}.mlp.experts.{e}.down": Source(_MLP + "experts.{e}.down_proj"),
    },
    gguf_architectures=("qwen3moe",),
    read_gguf=read_gguf,
    gguf_tensors=qwen3.FAMILY.gguf_tensors,
)
