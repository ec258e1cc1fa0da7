"""Gemma 2 and 3. The repositories are gated: their licence has to be accepted on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.checkpoint.catalog.base import CatalogEntry, llama_like
from flexgen_helm.models.architectures import gemma2, gemma3

# layers, hidden size, heads, key heads, feed-forward size, elements a head, root of the scores' divisor
_GEMMA2_SIZES: Mapping[str, tuple[int, ...]] = {
    "2b": (26, 2304, 8, 4, 9216, 256, 256),
    "9b": (42, 3584, 16, 8, 14336, 256, 256),
    "27b": (46, 4608, 32, 16, 36864, 128, 144),
}
# … and window, vocabulary, positions
_GEMMA3_SIZES: Mapping[str, tuple[int, ...]] = {
    "270m": (18, 640, 4, 1, 2048, 256, 256, 512, 262_144, 32_768),
    "1b": (26, 1152, 4, 1, 6912, 256, 256, 512, 262_144, 32_768),
    "4b": (34, 2560, 8, 4, 10240, 256, 256, 1024, 262_208, 131_072),
    "12b": (48, 3840, 16, 8, 15360, 256, 256, 1024, 262_208, 131_072),
    "27b": (62, 5376, 32, 16, 21504, 128, 168, 1024, 262_208, 131_072),
}


def gemma_entries() -> list[CatalogEntry]:
    entries = []
    for size, (layers, hidden, heads, kv_heads, ffn, dim, scalar) in _GEMMA2_SIZES.items():
        config = llama_like(layers, hidden, heads, kv_heads, ffn, vocab_size=256_000, max_position_embeddings=8192)
        changes = {"head_dim": dim, "query_pre_attn_scalar": scalar, "sliding_window": 4096, "rms_norm_eps": 1e-6}
        model_config = gemma2.read_config({**config, **changes})
        for tuned in (False, True):
            ending, kind = ("-it", " Instruct") if tuned else ("", "")
            repo, display = f"google/gemma-2-{size}{ending}", f"Gemma 2 ({size.upper()}{kind})"
            entries.append(
                CatalogEntry(f"gemma-2-{size}{ending}", repo, None, model_config, "bfloat16", tuned, display)
            )
    for size, (layers, hidden, heads, kv_heads, ffn, dim, scalar, window, words, positions) in _GEMMA3_SIZES.items():
        long: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}} if positions > 32_768 else {}
        config = llama_like(layers, hidden, heads, kv_heads, ffn, vocab_size=words, max_position_embeddings=positions)
        changes = {"head_dim": dim, "query_pre_attn_scalar": scalar, "sliding_window": window, "rms_norm_eps": 1e-6}
        model_config = gemma3.read_config({**config, **changes, "rope_theta": 1e6, "rope_local_base_freq": 1e4, **long})
        for tuned in (False, True):
            ending, kind = ("-it", " Instruct") if tuned else ("-pt", "")
            # The two small sizes, text only, are published without the ending.
            repo_ending = "" if ending == "-pt" and size == "270m" else ending
            repo, display = f"google/gemma-3-{size}{repo_ending}", f"Gemma 3 ({size.upper()}{kind})"
            entries.append(
                CatalogEntry(f"gemma-3-{size}{ending}", repo, None, model_config, "bfloat16", tuned, display)
            )
    return entries
