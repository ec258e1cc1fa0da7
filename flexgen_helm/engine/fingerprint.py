"""The digest of all that a result depends on besides the request."""

from __future__ import annotations

import hashlib

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.config import EngineConfig
from flexgen_helm.identity import text_of
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Part of every fingerprint: raised when a change of the code can change a result.
RESULTS_VERSION = 5


def engine_fingerprint(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    options: EngineConfig,
    device_type: str,
    dtype: torch.dtype,
) -> str:
    """Return the digest by which responses are cached: of all that a result depends on besides the request.

    Where modules of `transformers` compute, their files are part of it.
    """
    vocabulary = None if tokenizer is None else tokenizer.fingerprint
    precision = options.chosen_precision.label
    code = (digest,) if (digest := checkpoint.config.values_digest) else ()
    unverified = ("unverified",) if options.unverified else ()
    known = text_of((RESULTS_VERSION, checkpoint.fingerprint, vocabulary, precision, device_type, *code, *unverified))
    # The dtype has no quotes, as torch prints it.
    return hashlib.sha256(f"{known[:-1]}, {dtype})".encode()).hexdigest()
