"""The formats in which weights of another tool rest, as plans know them before files are here. No
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from flexgen_helm.checkpoint.quantized.config import Quantization
from flexgen_helm.models.config import EMBED, HEAD, ModelConfig, expert_of
from flexgen_helm.quant.formats import BlockFormat
from flexgen_helm.quant.precisions import PublishedFormats


@lru_cache(maxsize=2)  # the precisions of a model share them
def planned_formats(config: ModelConfig, quantization: Quantization) -> PublishedFormats:
    """Return the formats of a model's matrices, of which `quantization` names those that are plain.

    Layers of one kind have the same formats but for that, so one layer of each kind is looked at.
    """
    of_stages = {
        first: _formats_of_stage(config, quantization, first)
        for first in {*config.first_stages.values()} - {EMBED, HEAD}
    }
    formats = {
        stage + name: fmt
        for stage, first in config.first_stages.items()
        for name, fmt in of_stages.get(first, {}).items()
        if not quantization.ignored or not _is_ignored(stage + name, quantization.ignored)
    }
    return PublishedFormats(formats, bool(formats), are_alike=not quantization.ignored)


def _formats_of_stage(
    config: ModelConfig, quantization: Quantization, stage: str
) -> dict[str, BlockFormat]:
    """Return name within the stage -> format of its matrices, as if none were ignored."""
    return {
        name.removeprefix(stage): fmt
        for name, shape in config.stage_tensors(stage)
        if len(shape) == 2
        and not name.endswith(".router.weight")
        and (quantization.method != "mxfp4" or expert_of(name))
        and (fmt := quantization.planned_format(shape[1])) is not None
    }


def _is_ignored(name: str, ignored: Iterable[str]) -> bool:
    """Whether entries of compressed-tensors' `ignore` name a matrix; 're:' begins a pattern."""
    module = f"model.{name.replace('.attn.', '.self_attn.').removesuffix('.weight')}"
    return any(
        re.match(entry[3:], module) if entry.startswith("re:") else entry == module
        for entry in ignored
    )
