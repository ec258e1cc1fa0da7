"""Bytes of a KV cache, from the architecture and the cache format alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.shared_sizes import ALIGNMENT, aligned


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of one run's KV cache.

    bytes_per_token: of one position in all cached layers.
    layer_bytes_per_token: of one position in one layer.
    window_bytes: of a sequence's full-precision residual window in all cached layers; a file has
        twice as many, for the prompt's and for the answer's.
    layer_window_bytes: of the window in one layer.
    state_bytes: of a sequence on the compute device, in all layers that keep a state.
    fill_tokens: positions that the last disk page of a prompt, or of a block's decode step, may
        waste.
    """

    bytes_per_token: int
    layer_bytes_per_token: int
    window_bytes: int = 0
    layer_window_bytes: int = 0
    state_bytes: int = 0
    fill_tokens: int = 0


def cache_sizes(
    config: ModelConfig,
    fmt: CacheFormat | None,
    element_bytes: int,
    *,
    on_disk: bool,
    one_layer: bool = False,
) -> CacheSizes:
    """Compute the sizes of a cache.

    fmt: None for a cache in the compute dtype.
    element_bytes: of an element in the compute dtype.
    on_disk: part of the cache may be on the disk, where quantized groups start on a page.
    one_layer: only one layer is cached at a time (prefill-only).
    """
    layers = 1 if one_layer else config.num_cache_layers
    token_bytes = 2 * config.kv_size * element_bytes  # keys and values of a layer
    states = state_bytes(config, one_layer)
    fill = 0
    if fmt is None:
        if on_disk and token_bytes % ALIGNMENT:
            fill = -(-ALIGNMENT // token_bytes)
        return CacheSizes(layers * token_bytes, token_bytes, state_bytes=states, fill_tokens=fill)
    group_bytes = sum(fmt.group_bytes(config.num_kv_heads, config.head_dim, element_bytes))
    if on_disk:
        group_bytes = aligned(group_bytes)
        fill = -(-ALIGNMENT * fmt.stored_group_tokens // group_bytes)
    per_token = -(-layers * group_bytes // fmt.stored_group_tokens)
    window = fmt.window_copies * fmt.window_tokens * token_bytes
    return CacheSizes(per_token, per_token // layers, layers * window, window, states, fill)


def state_bytes(config: ModelConfig, one_layer: bool = False) -> int:
    """Return the bytes of the states that layers keep of a sequence: in float32, before and after
    the newest token.
    """
    elements = max(config.layer_states) if one_layer else sum(config.layer_states)
    return 2 * 4 * elements
