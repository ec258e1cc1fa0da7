"""Mixtral: Mistral with eight experts in every layer, two for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.families import llama, mistral
from flexgen_helm.models.families.base import Family, Source
from flexgen_helm.models.spec import ExpertSpec, ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    experts = ExpertSpec(
        count=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_size=config["intermediate_size"],
    )
    return mistral.read_config(config, "mixtral", experts=experts)


_MOE = "layers.{i}.block_sparse_moe."
FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    read_config=read_config,
    prefixes=llama.FAMILY.prefixes,
    tensors={
        **llama.FAMILY.tensors,
        "layers.{i}.mlp.router": Source(_MOE + "gate"),
        "layers.{i}.mlp.experts.{e}.gate": Source(_MOE + "experts.{e}.w1"),
        "layers.{i}.mlp.experts.{e}.up": Source(_MOE + "experts.{e}.w3"),
        "layers.{i}.mlp.experts.{e}.down": Source(_MOE + "experts.{e}.w2"),
    },
)
