"""OPT, OPT-IML and Galactica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.checkpoint.catalog.base import CatalogEntry
from flexgen_helm.models.architectures import opt


def _opt_config(layers: int, hidden: int, heads: int, **changes: Any) -> dict[str, Any]:
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }
    return {**config, **changes}


# layers, hidden size, heads
_OPT_SIZES: Mapping[str, tuple[int, int, int]] = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "66b": (64, 9216, 72),
    "120b": (96, 10240, 80),
    "175b": (96, 12288, 96),
}


def _opt(name: str, size: str, repo: str | None, display: str, instruct: bool = False, **changes: Any) -> CatalogEntry:
    model_config = opt.read_config(_opt_config(*_OPT_SIZES[size], **changes))
    return CatalogEntry(name, repo, None, model_config, "float16", instruct, display)


def opt_entries() -> list[CatalogEntry]:
    entries = []
    for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b"):
        repo = None if size == "175b" else f"facebook/opt-{size}"
        # The one size that norms after each block, has no final norm, and projects narrower embeddings.
        changes: dict[str, Any] = {"word_embed_proj_dim": 512, "do_layer_norm_before": False} if size == "350m" else {}
        entries.append(_opt(f"opt-{size}", size, repo, f"OPT ({size.upper()})", **changes))
    for kind, display in (("iml", "OPT-IML"), ("iml-max", "OPT-IML-Max")):
        for size in ("1.3b", "30b"):
            name = f"opt-{kind}-{size}"
            entries.append(_opt(name, size, f"facebook/{name}", f"{display} ({size.upper()})", instruct=True))
    for size in ("125m", "1.3b", "6.7b", "30b", "120b"):
        # Galactica has neither biases nor norm weights. The files of the two large sizes leave them out, those of
        # the small ones contain zeros and ones (galai#37 counts 290 tensors in the 30B: 48 x 6 and two tables).
        bare = size in ("30b", "120b")
        name = f"galactica-{size}"
        entries.append(
            _opt(
                name,
                size,
                f"facebook/{name}",
                f"Galactica ({size.upper()})",
                vocab_size=50000,
                activation_function="gelu",
                enable_bias=not bare,
                layer_norm_elementwise_affine=not bare,
            )
        )
    return entries
