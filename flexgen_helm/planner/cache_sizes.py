"""Bytes of a KV cache, from the architecture and the cache format alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.constants import ALIGNMENT
from flexgen_helm.quant.precisions import CacheFormat


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of one run's KV cache.

    bytes_per_token: of one position in all cached layers.
    layer_bytes_per_token: of one position in one layer.
    window_bytes: of a sequence on the compute device: its full-precision residual window in all cached layers, and the
        states of layers that keep one.
    fill_tokens: positions that the last disk page of a prompt, or of a block's decode step, may waste.
    host_attends: attention over cache blocks in host memory runs there, so that those blocks are not fetched.
    """

    bytes_per_token: int
    layer_bytes_per_token: int
    window_bytes: int = 0
    fill_tokens: int = 0
    host_attends: bool = False


def cache_sizes(
    config: ModelConfig,
    fmt: CacheFormat | None,
    element_bytes: int,
    *,
    on_disk: bool,
    host_attention: bool = False,
    one_layer: bool = False,
) -> CacheSizes:
    """Compute the sizes of a cache.

    fmt: None for a cache in the compute dtype.
    element_bytes: of an element in the compute dtype.
    on_disk: part of the cache may be on the disk, where quantized groups start on a page.
    host_attention: attention over a cache in host memory may run there; a quantized cache is always fetched.
    one_layer: only one layer is cached at a time (prefill-only).
    """
    layers = 1 if one_layer else config.num_cache_layers
    plain = 2 * config.kv_size * element_bytes
    states = state_bytes(config, one_layer)
    if fmt is None:
        fill = 0 if not on_disk or plain % ALIGNMENT == 0 else -(-ALIGNMENT // plain)
        return CacheSizes(layers * plain, plain, states, fill, host_attention)
    group = sum(fmt.group_bytes(config.num_kv_heads, config.head_dim, element_bytes))
    if on_disk:
        group = -(-group // ALIGNMENT) * ALIGNMENT
    per_token = -(-layers * group // fmt.stored_group_tokens)
    windows = fmt.window_copies * fmt.window_tokens * layers * plain
    return CacheSizes(per_token, per_token // layers, windows + states)


def state_bytes(config: ModelConfig, one_layer: bool) -> int:
    """Return the bytes of the states that layers keep of a sequence: in float32, before and after the newest token."""
    elements = max(config.layer_states) if one_layer else sum(config.layer_states)
    return 2 * 4 * elements
