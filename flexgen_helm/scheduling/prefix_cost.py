"""What it costs to share a beginning of prompts: one segment more, for a batch and for each of its tokens. No torch."""

from __future__ import annotations

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.constants import UNLIMITED
from flexgen_helm.scheduling.prefix_tree import PrefixCostModel

# Seconds that a batch takes in one layer for one more segment of keys: a few small operations.
_SEGMENT_S = 1e-4
# Operations that a token takes for one more segment, for each element of its queries: passes over queries and merged
# outputs, in operations of products that take as long (7 % of computing the token for SmolLM2-135M on two cores, 1 %
# for 7B).
_SEGMENT_FLOPS = 900.0
# Rates that the two are weighed with. Not measured: what is shared, and with it the last bits of a result, must not
# change between two processes.
_TYPICAL_FLOPS = {"cpu": 2e11, "cuda": 1e14}


def prefix_cost(config: ModelConfig, device: str) -> PrefixCostModel:
    """Return what sharing a prefix costs in tokens, over all layers; room is left open. device: its type in torch."""
    flops_per_layer = config.linear_flops_per_token / config.num_layers
    return PrefixCostModel(
        UNLIMITED,
        _SEGMENT_S * _TYPICAL_FLOPS[device] / flops_per_layer,
        token_overhead=_SEGMENT_FLOPS * config.q_size / flops_per_layer,
    )
