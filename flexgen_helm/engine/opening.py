"""Open a model: its files, its tokenizer, and the device that will compute. No weights are read."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.generation_config import GenerationSettings, read_generation_settings
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.concurrency import require_linux, stop_point
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.device import (
    compute_device,
    dtype_name,
    open_device,
    read_as_float16_if_faster,
)
from flexgen_helm.engine.fingerprint import Arithmetic, engine_fingerprint
from flexgen_helm.engine.logits_processors import LogitsProcessors
from flexgen_helm.engine.rank import Rank, rank_of_process
from flexgen_helm.errors import Float16Error, UsageError
from flexgen_helm.kernels.products import compute_dtype
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.transformers_backend.decoder import LayerDecoder, decoder_of
from flexgen_helm.offload.copy_engine import CopyEngine
from flexgen_helm.progress import Message, ModelInUse, ProgressPhase, report
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.tiers import Tier
from flexgen_helm.tokenizer.chat import ChatFormat, chat_format
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from flexgen_helm.units import size


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights can be loaded.

    name: what the user calls it.
    tokenizer: None where the folder has no tokenizer files.
    chat: how prompts and messages are rendered; None without a tokenizer.
    link: copies to and from the device; None where the host computes.
    why_not_float16: what keeps a bfloat16 checkpoint from being computed in float16, on a GPU
        without bfloat16.
    given_dtype: of products, where a small model is compared; None for the fastest
        (`kernels.products`).
    """

    name: str
    options: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    chat: ChatFormat | None
    device: torch.device
    link: CopyEngine | None
    why_not_float16: str = ""
    generation: GenerationSettings = GenerationSettings()
    given_dtype: torch.dtype | None = None

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of products."""
        return self.given_dtype or compute_dtype(self.device, self.checkpoint.storage_dtype)

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a completion."""
        return self.tokenizer.eos_ids if self.tokenizer else self.generation.eos_ids

    def decoder_of(self, part: ModelConfig) -> LayerDecoder:
        """Return what computes the layers of a part of the model."""
        return decoder_of(part, self.device, self.dtype)

    def logits_processors(self) -> LogitsProcessors | None:
        """Return what applies the generation settings; None where the folder has none."""
        if not self.generation.applied:
            return None
        vocab_size = self.checkpoint.config.vocab_size
        return LogitsProcessors(self.generation, self.eos_ids, vocab_size, self.device)

    @property
    def precision(self) -> Precision:
        """As chosen, with what the checkpoint has in fewer bits."""
        return replace(self.options.chosen_precision, published=self.checkpoint.published_formats)

    @property
    def compute_tier(self) -> Tier:
        return "cpu" if self.link is None else "gpu"

    @property
    def is_simulated(self) -> bool:
        """Whether a gpu in host memory computes."""
        return self.link is not None and self.device.type == "cpu"

    @cached_property
    def fingerprint(self) -> str:
        """The digest of all that a result depends on besides the request (`engine.fingerprint`)."""
        arithmetic = Arithmetic(self.device.type, str(self.dtype))
        return engine_fingerprint(self.checkpoint, self.tokenizer, self.options, arithmetic)

    def in_float32(self, reason: Float16Error, rank: Rank) -> OpenedModel:
        """Return the model as it is loaded after values were met that float16 does not have; its
        checkpoint is changed.
        """
        self.checkpoint.read_as_float16(False)
        report(Message(f"products are in float32, which takes longer: {reason}"))
        # the engine that met them has closed the link
        _, link = open_device(self.options.device, self.options.link_gb_s, rank)
        return replace(
            self, link=link, why_not_float16=f"the GPU has no bfloat16 products, and {reason}"
        )


def open_model(
    name_or_path: str | os.PathLike[str], options: EngineConfig, name: str | None, rank: Rank
) -> OpenedModel:
    """Open a model; name: what the user calls it, None for its own name."""
    require_linux()
    resolved = resolve(name_or_path, options.revision)
    name = name or resolved.name
    report(ModelInUse(name, options.chosen_precision.name))
    device, link = open_device(options.device, options.link_gb_s, rank)
    checkpoint, tokenizer = open_files(resolved, options)
    if tokenizer is None and options.apply_chat_template is True:
        raise UsageError(f"the model {name} has no tokenizer files, and so no chat template")
    generation = read_generation_settings(checkpoint.folder, options.generation_config)
    if ignored := checkpoint.ignored_settings:
        generation = replace(generation, ignored=ignored)
        report(
            Message(
                f"settings of {name} that change nothing here, as in llama.cpp's library: "
                f"{', '.join(ignored)}"
            )
        )
    chat = (
        None if tokenizer is None else chat_format(tokenizer, options.chat, name, resolved.is_base)
    )
    why_not_float16 = read_as_float16_if_faster(device, checkpoint)
    return OpenedModel(
        name, options, checkpoint, tokenizer, chat, device, link, why_not_float16, generation
    )


def fingerprint_before_loading(
    name_or_path: str | os.PathLike[str], options: EngineConfig
) -> str | None:
    """Return the fingerprint of the engine that would be loaded, without its weights.

    None where only the engine knows: on a GPU, whose dtype is measured, and on the ranks of a
    pipeline.
    """
    if rank_of_process() is not None or compute_device(options.device).type != "cpu":
        return None
    checkpoint, tokenizer = open_files(resolve(name_or_path, options.revision), options)
    dtype = compute_dtype(torch.device("cpu"), checkpoint.storage_dtype)
    return engine_fingerprint(checkpoint, tokenizer, options, Arithmetic("cpu", str(dtype)))


def fingerprint_elsewhere(
    name_or_path: str | os.PathLike[str],
    options: EngineConfig,
    device: str,
    dtype: str,
    bit_deciders: Sequence[str],
) -> str | None:
    """Return the fingerprint that the engine has where products are in `dtype` on a `device`; None
    for no such type.

    bit_deciders: what decides the bits of results there (`what_decides_bits`).
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        return None
    checkpoint, tokenizer = open_files(resolve(name_or_path, options.revision), options)
    device_type = "cpu" if device == "sim" else device.partition(":")[0]
    arithmetic = Arithmetic(device_type, str(torch_dtype), tuple(bit_deciders))
    return engine_fingerprint(checkpoint, tokenizer, options, arithmetic)


def open_files(
    resolved: ResolvedModel, options: EngineConfig
) -> tuple[Checkpoint, Tokenizer | None]:
    """Open a checkpoint and its tokenizer."""
    report(ProgressPhase("open", resolved.name))
    checkpoint = open_checkpoint(resolved, weights=options.weights, seed=options.seed)
    stop_point()
    tokenizer = (
        Tokenizer.from_path(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None
    )
    stop_point()
    return checkpoint, tokenizer


def report_rounding(model: OpenedModel) -> None:
    """Say what the engine makes of weights that are not published in 16 bits, once they are
    loaded.
    """
    checkpoint = model.checkpoint
    if model.precision.weights is not None:
        if checkpoint.formats:
            report(
                Message(
                    f"weights of {model.name} are quantized; {model.precision.name} rounds them "
                    "again, fp16 does not"
                )
            )
        return
    if checkpoint.rounded:
        shares = (f"{share:.0%} in {dtype}" for dtype, share in checkpoint.rounded.items())
        rounded_to = dtype_name(checkpoint.storage_dtype)
        report(
            Message(
                f"matrices of {model.name} are rounded to {rounded_to}: {', '.join(shares)}; "
                "transformers in float32 keeps them"
            )
        )
    if checkpoint.expanded:
        costs = (
            f"{size(published)} of {kind} take {size(in_16_bits)}"
            for kind, (published, in_16_bits) in checkpoint.expanded.items()
        )
        report(
            Message(
                f"matrices of {model.name} do not rest as published, but in 16 bits: "
                f"{', '.join(costs)}"
            )
        )
