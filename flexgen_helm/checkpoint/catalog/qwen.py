"""Qwen3, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexgen_helm.checkpoint.catalog.base import CatalogEntry, llama_like
from flexgen_helm.models.architectures import qwen3, qwen3_moe

# layers, hidden size, heads, key heads, feed-forward size, tied head
_QWEN3_SIZES: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "0.6b": (28, 1024, 16, 8, 3072, True),
    "1.7b": (28, 2048, 16, 8, 6144, True),
    "4b": (36, 2560, 32, 8, 9728, True),
    "8b": (36, 4096, 32, 8, 12288, False),
    "14b": (40, 5120, 40, 8, 17408, False),
    "32b": (64, 5120, 64, 8, 25600, False),
}


def qwen3_entries() -> list[CatalogEntry]:
    """The hybrid models answer chats; their `-Base` siblings continue text and are what most scenarios want."""
    entries = []
    for size, (layers, hidden, heads, kv_heads, ffn, tied) in _QWEN3_SIZES.items():
        sizes = llama_like(layers, hidden, heads, kv_heads, ffn, vocab_size=151_936, head_dim=128)
        config = qwen3.read_config(
            {**sizes, "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
            | {"tie_word_embeddings": tied}
        )
        repo, display = f"Qwen/Qwen3-{size.upper()}", f"Qwen3 ({size.upper()}"
        entries.append(CatalogEntry(f"qwen3-{size}", repo, None, config, "bfloat16", True, f"{display})"))
        if size != "32b":  # published without a base model
            base = replace(config, max_positions=32_768)
            name = f"qwen3-{size}-base"
            entries.append(CatalogEntry(name, f"{repo}-Base", None, base, "bfloat16", False, f"{display} Base)"))
    sparse = llama_like(48, 2048, 32, 4, 6144, vocab_size=151_936, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6)
    sparse = {**sparse, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    config = qwen3_moe.read_config({**sparse, "norm_topk_prob": True, "max_position_embeddings": 40_960})
    base, hub = replace(config, max_positions=32_768), "Qwen/Qwen3-30B-A3B"
    entries.append(CatalogEntry("qwen3-30b-a3b", hub, None, config, "bfloat16", True, "Qwen3 (30B, 3B active)"))
    display = "Qwen3 (30B, 3B active, Base)"
    entries.append(CatalogEntry("qwen3-30b-a3b-base", f"{hub}-Base", None, base, "bfloat16", False, display))
    return entries
