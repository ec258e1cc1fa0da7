"""Apply a model's generation settings to logits, by the processors that `generate` of transformers
makes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.checkpoint.generation_config import SAMPLED, GenerationSettings
from flexgen_helm.errors import CheckpointError
from flexgen_helm.scheduling.sampling_params import SamplingParams

# Logits divided by it are still finite in float32, and leave the most probable token alone.
_LEAST_TEMPERATURE = 1e-30


class LogitsProcessors:
    """What `generate` does to the logits of one sequence before it takes a token."""

    def __init__(
        self,
        settings: GenerationSettings,
        eos_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Try the settings once. Raises `CheckpointError` if transformers does not take them.

        eos_ids: tokens that end a completion.
        """
        # Imported late: transformers takes seconds, and most folders have no such setting.
        from transformers import GenerationConfig, GenerationMixin, PretrainedConfig

        model: Any = GenerationMixin()
        model.config = PretrainedConfig()
        self._make, self._device = model._get_logits_processor, device
        self._warps = any(name in settings.applied for name in SAMPLED)
        applied = dict(settings.applied)
        if "min_new_tokens" in applied:  # as in `generate`, it takes precedence
            applied.pop("min_length", None)
        self._config: Any = GenerationConfig()
        for name, value in applied.items():
            setattr(self._config, name, value)
        self._config._eos_token_tensor = (
            torch.tensor(sorted(eos_ids), device=device) if eos_ids else None
        )
        try:
            for temperature in (0.0, 1.0):
                self(
                    torch.zeros(1, vocab_size, device=device),
                    [SamplingParams(temperature, 1.0, 0, None, (0, 0))],
                )
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointError(
                f"transformers cannot apply the generation settings of {settings.path}: {error}; "
                "--generation-config ignore leaves them out"
            ) from error

    def __call__(
        self, logits: Tensor, sampling: Sequence[SamplingParams]
    ) -> tuple[Tensor, list[SamplingParams]]:
        """Return new logits [R, V], and how to draw from each row; a row does not depend on the
        others.
        """
        rows, left = [], []
        for row, params in zip(logits.split(1), sampling):
            if params.forced is None:
                row, params = self._process(row, params)
            rows.append(row)
            left.append(params)
        return torch.cat(rows), left

    def _process(self, row: Tensor, params: SamplingParams) -> tuple[Tensor, SamplingParams]:
        config, warps = self._config, self._warps and params.temperature > 0.0
        config.do_sample = warps
        if warps:
            # The order is that of transformers: temperature, top_k, top_p, and the rest.
            config.temperature = max(params.temperature, _LEAST_TEMPERATURE)
            config.top_p = params.top_p
            params = replace(params, temperature=1.0, top_p=1.0)
        tokens = torch.tensor([[*params.prompt, *params.drawn]], device=self._device)
        length = len(params.prompt)
        processors = self._make(config, length, tokens[:, :length], device=self._device)
        return processors(tokens, row), params
