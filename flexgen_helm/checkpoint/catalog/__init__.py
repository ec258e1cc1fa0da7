"""Models known by name: their architecture without a download, and where their weights are published. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen_helm.checkpoint.catalog.base import WHEEL_MODEL, CatalogEntry
from flexgen_helm.checkpoint.catalog.gemma import gemma_entries
from flexgen_helm.checkpoint.catalog.llama import llama_entries
from flexgen_helm.checkpoint.catalog.mistral import mistral_entries
from flexgen_helm.checkpoint.catalog.opt import opt_entries
from flexgen_helm.checkpoint.catalog.others import bloom_entries, gpt2_entries, phi_entries, pythia_entries
from flexgen_helm.checkpoint.catalog.qwen import qwen3_entries

__all__ = ["CATALOG", "WHEEL_MODEL", "CatalogEntry"]

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
CATALOG: Mapping[str, CatalogEntry] = {entry.name: entry for entry in _ALL}
