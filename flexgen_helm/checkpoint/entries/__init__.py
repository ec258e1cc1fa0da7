"""Models known by name: their architecture without a download, and where their weights are published. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen_helm.checkpoint.entries.base import WHEEL_MODEL, CatalogueEntry
from flexgen_helm.checkpoint.entries.gemma import gemma_entries
from flexgen_helm.checkpoint.entries.llama import llama_entries
from flexgen_helm.checkpoint.entries.mistral import mistral_entries
from flexgen_helm.checkpoint.entries.opt import opt_entries
from flexgen_helm.checkpoint.entries.others import bloom_entries, gpt2_entries, phi_entries, pythia_entries
from flexgen_helm.checkpoint.entries.qwen import qwen3_entries

__all__ = ["CATALOGUE", "WHEEL_MODEL", "CatalogueEntry"]

_ALL = (
    *opt_entries(),
    *llama_entries(),
    *qwen3_entries(),
    *mistral_entries(),
    *gemma_entries(),
    *pythia_entries(),
    *gpt2_entries(),
    *bloom_entries(),
    *phi_entries(),
)
CATALOGUE: Mapping[str, CatalogueEntry] = {entry.name: entry for entry in _ALL}
