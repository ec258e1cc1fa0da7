"""Mistral and Mixtral."""

from __future__ import annotations

from flexgen_helm.checkpoint.catalog.base import CatalogEntry, llama_like
from flexgen_helm.models.architectures import mistral, mixtral


def mistral_entries() -> list[CatalogEntry]:
    first = llama_like(32, 4096, 32, 8, 14336, vocab_size=32_000, rms_norm_eps=1e-5, rope_theta=10_000.0)
    first |= {"max_position_embeddings": 32_768, "sliding_window": 4096, "tie_word_embeddings": False}
    later = {**first, "vocab_size": 32_768, "sliding_window": None, "rope_theta": 1e6}
    found = []
    for version, config in (("v0.1", first), ("v0.3", later)):
        model_config, hub = mistral.read_config(config), f"mistralai/Mistral-7B-{version}"
        tuned = f"mistralai/Mistral-7B-Instruct-{version}"
        found += [
            CatalogEntry(
                f"mistral-7b-{version}", hub, None, model_config, "bfloat16", False, f"Mistral {version} (7B)"
            ),
            CatalogEntry(
                f"mistral-7b-instruct-{version}",
                tuned,
                None,
                model_config,
                "bfloat16",
                True,
                f"Mistral {version} (7B Instruct)",
            ),
        ]
    config = {**later, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000}
    model_config = mixtral.read_config(config)
    for ending, display in (("", "Mixtral (8x7B)"), ("-instruct", "Mixtral (8x7B Instruct)")):
        repo = f"mistralai/Mixtral-8x7B{ending.title()}-v0.1"
        name = f"mixtral-8x7b{ending}-v0.1"
        found.append(CatalogEntry(name, repo, None, model_config, "bfloat16", bool(ending), display))
    return found
