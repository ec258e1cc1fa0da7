"""Pythia, GPT-2, BLOOM and Phi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.checkpoint.catalog.base import CatalogEntry, HalfType, llama_like
from flexgen_helm.models.architectures import bloom, gpt2, gpt_neox, phi3

# layers, hidden size, heads, vocabulary (padded by the training's parallelism)
_PYTHIA_SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "14m": (6, 128, 4, 50_304),
    "70m": (6, 512, 8, 50_304),
    "160m": (12, 768, 12, 50_304),
    "410m": (24, 1024, 16, 50_304),
    "1b": (16, 2048, 8, 50_304),
    "1.4b": (24, 2048, 16, 50_304),
    "2.8b": (32, 2560, 32, 50_304),
    "6.9b": (32, 4096, 32, 50_432),
    "12b": (36, 5120, 40, 50_688),
}
# layers, hidden size, heads
_GPT2_SIZES: Mapping[str, tuple[int, int, int]] = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
_BLOOM_SIZES: Mapping[str, tuple[int, int, int]] = {
    "bloom-560m": (24, 1024, 16),
    "bloom-1b1": (24, 1536, 16),
    "bloom-1b7": (24, 2048, 16),
    "bloom-3b": (30, 2560, 32),
    "bloom-7b1": (30, 4096, 32),
    "bloom": (70, 14336, 112),
}


def pythia_entries() -> list[CatalogEntry]:
    """Each size, trained on the Pile as it is and without its duplicates."""
    entries = []
    for size, (layers, hidden, heads, words) in _PYTHIA_SIZES.items():
        model_config = gpt_neox.read_config(
            {
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "intermediate_size": 4 * hidden,
                "vocab_size": words,
                "max_position_embeddings": 2048,
                "rotary_pct": 0.25,
                "rotary_emb_base": 10_000,
            }
        )
        for ending, kind in (("", ""), ("-deduped", " deduplicated")):
            if size == "14m" and ending:
                continue
            name, display = f"pythia-{size}{ending}", f"Pythia ({size.upper()}{kind})"
            entries.append(CatalogEntry(name, f"EleutherAI/{name}", None, model_config, "float16", False, display))
    return entries


def gpt2_entries() -> list[CatalogEntry]:
    entries = []
    for name, (layers, hidden, heads) in _GPT2_SIZES.items():
        config = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024, "vocab_size": 50_257}
        display = "GPT-2" + (f" ({name.removeprefix('gpt2-')})" if "-" in name else "")
        model_config = gpt2.read_config(config)
        entries.append(CatalogEntry(name, f"openai-community/{name}", None, model_config, "float16", False, display))
    return entries


def bloom_entries() -> list[CatalogEntry]:
    entries = []
    for name, (layers, hidden, heads) in _BLOOM_SIZES.items():
        config = {"n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": 250_880}
        model_config, size = (
            bloom.read_config(config),
            "176B" if name == "bloom" else _spelt(name.removeprefix("bloom-")),
        )
        dtype: HalfType = "bfloat16" if name == "bloom" else "float16"
        entries.append(CatalogEntry(name, f"bigscience/{name}", None, model_config, dtype, False, f"BLOOM ({size})"))
    return entries


def phi_entries() -> list[CatalogEntry]:
    """The sizes with a short context, and Phi-4; all tuned to follow instructions."""
    mini: dict[str, Any] = {"vocab_size": 32_064, "max_position_embeddings": 4096, "sliding_window": 2047}
    medium = {**mini, "sliding_window": None}
    four: dict[str, Any] = {"vocab_size": 100_352, "max_position_embeddings": 16_384, "rope_theta": 250_000.0}
    sizes = (
        ("phi-3-mini-4k-instruct", "Phi-3-mini-4k-instruct", "Phi-3 mini", llama_like(32, 3072, 32, 32, 8192, **mini)),
        (
            "phi-3-medium-4k-instruct",
            "Phi-3-medium-4k-instruct",
            "Phi-3 medium",
            llama_like(40, 5120, 40, 10, 17_920, **medium),
        ),
        ("phi-4", "phi-4", "Phi-4", llama_like(40, 5120, 40, 10, 17_920, **four)),
    )
    return [
        CatalogEntry(name, f"microsoft/{repo}", None, phi3.read_config(config), "bfloat16", True, display)
        for name, repo, display, config in sizes
    ]


def _spelt(size: str) -> str:
    """7b1 -> 7.1B, 560m -> 560M."""
    whole, _, tenths = size.upper().partition("B")
    return f"{whole}.{tenths}B" if tenths else size.upper()
