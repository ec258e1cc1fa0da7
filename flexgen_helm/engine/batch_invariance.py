"""Prove that answers have the same bits alone and in company, where `--batch-invariant` promises
it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from flexgen_helm.engine.loop_attention import has_packed_steps
from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.sampler import log_normalizers
from flexgen_helm.engine.small_model import (
    SEEDS,
    is_proving,
    opened_engine,
    small_model,
    trial_requests,
)
from flexgen_helm.errors import UsageError
from flexgen_helm.kernels.attention import can_attend_caches
from flexgen_helm.kernels.vector_products import multiplies_as_stored
from flexgen_helm.progress import ProgressPhase, report

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Logits of rows that are added up alone and together.
_TRIAL_LOGITS = 1 << 23


def require_batch_invariance(model: OpenedModel, engine_class: type[Engine]) -> None:
    """Compute requests to a small model of the same kind alone and together, and compare bits.

    Raises `UsageError` where they differ, or where it is known that bits follow the batch.
    """
    cache_format, checkpoint, why = model.precision.cache, model.checkpoint, ""
    if model.device.type != "cpu" or model.is_simulated:
        why = "products of a GPU follow the number of rows; take --device cpu"
    elif cache_format is not None and not has_packed_steps(cache_format):
        why = (
            f"attention to the KV cache of {model.precision.name} follows the batch; take 4bit, "
            "8bit or fp16"
        )
    elif not can_attend_caches(model.device, torch.float32) or not multiplies_as_stored(
        torch.float16
    ):
        why = "compiled loops do not work here, and PyTorch's sums follow the batch"
    elif not _sums_alike(checkpoint.config.vocab_size, torch.get_num_threads()):
        why = "PyTorch's sums over the vocabulary follow the batch"
    elif checkpoint.config_content is not None and not is_proving.get():
        report(ProgressPhase("prove", model.name))
        requests = trial_requests(SEEDS[0])
        with small_model(checkpoint.config_content, checkpoint.config, SEEDS[0]) as (_, opened):
            options = replace(opened.options, batch_invariant=True)
            with opened_engine(engine_class, replace(opened, options=options)) as engine:
                company = engine.run(requests)
                alone = [engine.run([request])[0] for request in requests]
        together = [(result.prompt_logprobs, result.completions) for result in company]
        if together != [(result.prompt_logprobs, result.completions) for result in alone]:
            why = (
                f"a small model of its class, {checkpoint.config.class_name}, has other bits alone "
                "than in company"
            )
    if why:
        raise UsageError(f"--batch-invariant does not hold for {model.name}: {why}")


@cache
def _sums_alike(vocab_size: int, num_threads: int) -> bool:
    """Return whether rows of this vocabulary have the same log-sum-exp alone and together.

    num_threads: that PyTorch computes with now.
    """
    rows = torch.randn(
        (_TRIAL_LOGITS // vocab_size, vocab_size), generator=torch.Generator().manual_seed(0)
    )
    return torch.equal(
        log_normalizers(rows), torch.cat([log_normalizers(row) for row in rows.split(1)])
    )
