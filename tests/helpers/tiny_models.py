"""Tiny random checkpoints of every architecture, with a real tokenizer; `VARIANTS` switch every
feature on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.paths import DATA

VOCABULARY = 320


@dataclass(frozen=True)
class TinyModel:
    """A random checkpoint.

    path: folder of the checkpoint.
    reference: model of `transformers` in float32, from the same 16-bit weights.
    """

    path: Path
    reference: Any

    def text_parameters(self) -> Any:
        """The reference's parameters, each once, without an image encoder's."""
        for name, parameter in self.reference.named_parameters():
            if "vision_tower" not in name and "multi_modal_projector" not in name:
                yield parameter

    def logprobs(self, token_ids: list[int]) -> Any:
        """Log-probabilities [T, V] that `transformers` gives after each token."""
        import torch

        with torch.no_grad():
            return torch.log_softmax(
                self.reference(torch.tensor([token_ids])).logits[0].float(), dim=-1
            )


_DATA = yaml.safe_load((DATA / "tiny_models.yaml").read_text())


def tiny_config(kind: str, sizes: str, **changes: Any) -> Any:
    """A configuration of the class `kind` of `transformers`."""
    import transformers

    # a configuration may complete what it is given
    return getattr(transformers, kind)(**{**_DATA["sizes"][sizes], **deepcopy(changes)})


def config_like_llama(kind: str, **changes: Any) -> Any:
    """A configuration of a class that has the keys of `LlamaConfig`."""
    return tiny_config(kind, "llama", **changes)


def llama_config(**changes: Any) -> Any:
    return config_like_llama("LlamaConfig", **changes)


def gemma_config(kind: str, **changes: Any) -> Any:
    return tiny_config(kind, "gemma", **changes)


def gemma3_with_images() -> Any:
    """As the sizes from 4B on are published: the text model beside an image encoder."""
    from transformers import Gemma3Config

    text = gemma_config("Gemma3TextConfig", sliding_window_pattern=2).to_dict()
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3
    )


def _variant(kind: str, sizes: str, changes: dict[str, Any]) -> Callable[[], Any]:
    return partial(tiny_config, kind, sizes, **changes)


# Name -> configuration.
VARIANTS: dict[str, Callable[[], Any]] = {
    **{name: _variant(*of) for name, of in _DATA["variants"].items()},
    "gemma3-with-images": gemma3_with_images,
}
# Name -> GGUF architecture, configuration, whether the GGUF reader of `transformers` knows all of
# it.
GGUF_VARIANTS: dict[str, tuple[str, Callable[[], Any], bool]] = {
    name: (arch, _variant(*of) if len(of) > 1 else VARIANTS[of[0]], is_known)
    for name, (arch, is_known, *of) in _DATA["gguf"].items()
}


def build_tiny(folder: Path, variant: str, tokenizer: bool = True) -> TinyModel:
    """Save a random model of a variant, and its tokenizer, in `folder`. The weights follow from the
    name alone.
    """
    model = save_random(folder, VARIANTS[variant](), seed=zlib.crc32(variant.encode()))
    if tokenizer:
        save_tokenizer(folder)
    return TinyModel(folder, model)


def save_random(folder: Path, config: Any, seed: int, dtype: str = "float16") -> Any:
    """Save a model whose parameters, norms and biases included, are random. Returns it in
    float32.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.3 + ("norm" in name and "weight" in name)
                )
            elif not parameter.any():
                parameter.normal_(0.0, 0.15)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # Loaded from the files: casting the model would round its rotary frequencies too, which no
    # checkpoint contains. Eager attention knows every feature; of soft caps, others do not in all
    # releases.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


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
    text = [
        "the quick brown fox jumps over the lazy dog",
        "question: answer: the the and of a to in is that it was",
    ]
    backend.train_from_iterator(text * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(
        folder
    )


def kv_bytes_per_token(config: Any, bytes_per_element: int) -> int:
    """Bytes of one position's keys and values in all layers that store them."""
    return 2 * config.num_cache_layers * config.kv_size * bytes_per_element
