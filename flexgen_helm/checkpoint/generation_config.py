"""Settings of `generation_config.json`: what `generate` of transformers would apply beside a
request. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_helm.checkpoint.folder import CONFIG, GENERATION_CONFIG, read_json
from flexgen_helm.errors import CheckpointError

# Each name with the values at which it does nothing; null never does anything.
# Applied to the logits of every token.
ALWAYS: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (),  # 0 takes precedence over min_length
    "no_repeat_ngram_size": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": (),
    "suppress_tokens": (),
}
# Applied at a temperature above 0.
SAMPLED: Mapping[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (),
    "top_h": (),
    "top_k": (0,),
    "typical_p": (1,),
}
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "assistant_ensemble_weight": (),
    "cache_implementation": (
        "dynamic", "dynamic_full", "hybrid", "hybrid_chunked", "offloaded", "offloaded_static",
        "paged", "sliding_window", "static",
    ),  # a quantized cache changes values
    "constraints": ([],),
    "dola_layers": (),
    "force_bos_token_to_be_generated": (False,),
    "force_words_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "is_assistant": (False,),
    "max_time": (),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "stop_strings": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}  # fmt: skip
# Why these change no answer.
IRRELEVANT: Mapping[str, tuple[str, ...]] = {
    "the request says it": (
        "do_sample", "max_length", "max_new_tokens", "num_return_sequences", "temperature", "top_p",
    ),
    "the tokenizer reads it": ("bos_token_id", "eos_token_id", "pad_token_id"),
    "beams alone "
    "have it": ("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups"),
    "encoders alone have it": ("decoder_start_token_id",),
    "drafts change the speed": (
        "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
        "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp",
    ),
    "it divides the work": (
        "cache_config", "compile_config", "continuous_batching_config", "disable_compile",
        "low_memory", "max_cache_len", "prefill_chunk_size", "use_cache",
    ),
    "it adds outputs": (
        "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "return_dict_in_generate",
    ),
    "a logit that is not finite fails its request": ("remove_invalid_values",),
    "the order of tokens stays": ("renormalize_logits",),
    "it describes the file": (
        "_commit_hash", "_from_model_config", "_original_object_hash", "transformers_version",
    ),
}  # fmt: skip
_HARMLESS = {name for names in IRRELEVANT.values() for name in names}
_MATTERING = {**ALWAYS, **SAMPLED, **REFUSED}


@dataclass(frozen=True)
class GenerationSettings:
    """What a model's folder says of every answer.

    path: the file that says it; None without a folder.
    applied, ignored: settings by name, those of `ignored` by the user's wish.
    eos_ids: tokens that end an answer; a tokenizer may name others.
    top_p: what `generate` takes for a sampled request that says none.
    """

    path: Path | None = None
    applied: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)
    eos_ids: Collection[int] = ()
    top_p: float = 1.0


def read_generation_settings(folder: Path | None, choice: str = "auto") -> GenerationSettings:
    """Read the settings that would change answers; choice: 'ignore' applies none of them.

    Without a `generation_config.json` they are those of `config.json`, as in transformers.
    Raises `CheckpointError` for a setting that is not supported, or not known.
    """
    if folder is None:
        return GenerationSettings()
    path = folder / GENERATION_CONFIG
    if path.is_file():
        content = read_json(path)
    else:
        path = folder / CONFIG
        content = read_json(path)
        # A model of several parts has settings in the part that generates, if not above it.
        parts = (content.get(name) for name in ("decoder", "generator", "text_config"))
        nested: Any = next(filter(None, parts), {})
        if not isinstance(nested, Mapping):
            raise CheckpointError(
                f"{path} is damaged: it describes a part of the model by {repr(nested)[:80]}"
            )
        own_entries = {name: value for name, value in content.items() if value is not None}
        content = {
            name: value
            for name, value in {**nested, **own_entries}.items()
            if name in (*_MATTERING, "top_p")
        }
    settings = {
        name: value
        for name, value in content.items()
        if value is not None and name not in _HARMLESS and value not in _MATTERING.get(name, ())
    }
    if choice == "ignore":
        return GenerationSettings(path, ignored=settings, eos_ids=configured_eos_ids(folder))
    for name, value in settings.items():
        if name not in ALWAYS and name not in SAMPLED:
            verb = "supported" if name in REFUSED else "known here"
            raise CheckpointError(
                f"{path} sets {name} to {repr(value)[:80]}, which is not {verb} and may change "
                "answers; --generation-config ignore leaves the file's settings out"
            )
    top_p = 1.0 if content.get("top_p") is None else content["top_p"]
    if not isinstance(top_p, (int, float)):
        raise CheckpointError(f"{path} sets top_p to {repr(top_p)[:80]}, which is no number")
    return GenerationSettings(
        path, applied=settings, eos_ids=configured_eos_ids(folder), top_p=float(top_p)
    )


def configured_eos_ids(folder: Path) -> set[int]:
    """Return every `eos_token_id` (an id or a list of them) of the generation and the model
    configuration.
    """
    ids: set[int] = set()
    for name in (GENERATION_CONFIG, CONFIG):
        if not (folder / name).is_file():
            continue
        config = read_json(folder / name)
        # A multimodal checkpoint has its language model's settings one level down.
        text_config = config.get("text_config") or {}
        if not isinstance(text_config, dict):
            raise CheckpointError(f"{folder / name} has a text_config that is no JSON object")
        for section in (config, text_config):
            value = section.get("eos_token_id")
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(token_id, int) for token_id in listed):
                raise CheckpointError(
                    f"{folder / name} gives eos_token_id as {repr(value)[:80]}, not as token ids"
                )
            ids.update(listed)
    return ids
