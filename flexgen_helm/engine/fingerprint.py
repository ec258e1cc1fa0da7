"""The digest of all that a result depends on besides the request. Importing it does not import
torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, NamedTuple

from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.folder import CONFIG
from flexgen_helm.checkpoint.generation_config import GenerationSettings, read_generation_settings
from flexgen_helm.checkpoint.local_files import quick_fingerprint
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.rank import rank_of_process
from flexgen_helm.hardware.cuda_presence import why_no_cuda
from flexgen_helm.hardware.processor import processor_kind
from flexgen_helm.identity import own_digest, text_of
from flexgen_helm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flexgen_helm.checkpoint.checkpoint import Checkpoint

# Part of every fingerprint: raised when a change of the code can change a result.
RESULTS_VERSION = 9


class Arithmetic(NamedTuple):
    """What multiplies.

    device_type, dtype: as torch prints them.
    bits: what decides them there (`what_decides_bits`); None for this machine's.
    """

    device_type: str
    dtype: str
    bits: tuple[str, ...] | None = None


def engine_fingerprint(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    options: EngineConfig,
    arithmetic: Arithmetic,
) -> str:
    """Return the digest by which responses are cached: of all that a result depends on besides the
    request.

    Where modules of `transformers` compute, their files are part of it.
    """
    code = (digest,) if (digest := checkpoint.config.values_digest) else ()
    generation = read_generation_settings(checkpoint.folder, options.generation_config)
    further_texts = *code, *_generation_texts(generation)
    return _digest(checkpoint.fingerprint, tokenizer, options, arithmetic, further_texts)


def quick_engine_fingerprint(
    name_or_path: str | os.PathLike[str], options: EngineConfig
) -> str | None:
    """Return `engine_fingerprint` of an engine that would be loaded, known without torch; None
    where it takes torch.

    It does on a GPU, whose dtype is measured, on the ranks of a pipeline, and for the weights of
    which `quick_fingerprint` returns None.
    """
    is_host = options.device in ("cpu", "sim") or (options.device == "auto" and why_no_cuda())
    if not is_host or options.weights == "dummy" or rank_of_process() is not None:
        return None
    resolved = resolve(name_or_path, options.revision)
    path = fetch(resolved)
    if (weights := quick_fingerprint(resolved, path)) is None:
        return None
    path = path.parent if path.suffix == ".safetensors" else path
    generation = read_generation_settings(
        path if path.is_dir() else None, options.generation_config
    )
    return _digest(
        weights,
        Tokenizer.from_path(path),
        options,
        Arithmetic("cpu", "torch.float32"),
        _generation_texts(generation),
    )


def what_decides_bits(options: EngineConfig) -> tuple[str, ...]:
    """Return what decides the bits of answers that do not follow their batch: processor, and
    digests of the loops.
    """
    return (
        (processor_kind(), own_digest("kernels"), own_digest("quant"))
        if options.batch_invariant
        else ()
    )


def _generation_texts(generation: GenerationSettings) -> tuple[str, ...]:
    """Return what generation settings add to a digest; nothing where `config.json`, which is part
    of the weights' fingerprint, has them all.
    """
    eos_ids = (
        sorted(generation.eos_ids) if generation.path and generation.path.name != CONFIG else []
    )
    return (
        (json.dumps([generation.applied, eos_ids], sort_keys=True),)
        if generation.applied or eos_ids
        else ()
    )


def _digest(
    weights: str,
    tokenizer: Tokenizer | None,
    options: EngineConfig,
    arithmetic: Arithmetic,
    further_texts: tuple[str, ...],
) -> str:
    """Return the digest of a text that has the same form in all versions, so that responses that
    were cached by an earlier one are found.
    """
    vocabulary = None if tokenizer is None else tokenizer.fingerprint
    unverified = ("unverified",) if options.unverified else ()
    device_type, dtype, bits = arithmetic
    bits = what_decides_bits(options) if bits is None else bits
    text = text_of(
        (
            *(RESULTS_VERSION, weights, vocabulary, options.chosen_precision.label),
            *(device_type, *further_texts, *unverified, *bits),
        )
    )
    # The dtype is the tuple's last item, and has no quotes: the first version hashed torch's own.
    return hashlib.sha256(f"{text[:-1]}, {dtype})".encode()).hexdigest()
