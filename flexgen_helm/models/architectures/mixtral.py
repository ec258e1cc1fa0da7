"""Mixtral: Mistral with eight experts in every layer, two for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama, mistral
from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.decoder_config import DecoderConfig

# What `transformers` takes for entries that a `config.json` leaves out, where Llama's default is another.
_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    experts = MoEConfig(
        count=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_size=config["intermediate_size"],
    )
    return mistral.read_config({**_DEFAULTS, **config}, "mixtral", experts=experts)


_MOE = "layers.{i}.block_sparse_moe."
ARCHITECTURE = Architecture(
    name="mixtral",
    hf_names=("MixtralForCausalLM", "MixtralModel"),
    read_config=read_config,
    tensors={
        **llama.ARCHITECTURE.tensors,
        "layers.{i}.mlp.router": TensorSource(_MOE + "gate"),
        "layers.{i}.mlp.experts.{e}.gate": TensorSource(_MOE + "experts.{e}.w1"),
        "layers.{i}.mlp.experts.{e}.up": TensorSource(_MOE + "experts.{e}.w3"),
        "layers.{i}.mlp.experts.{e}.down": TensorSource(_MOE + "experts.{e}.w2"),
    },
)
