"""The decoder of a model: the one place that knows both kinds of record."""

from __future__ import annotations

import torch

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.decoder import Decoder, LayerDecoder
from flexgen_helm.models.decoder_config import DecoderConfig
from flexgen_helm.models.transformers_backend.config import TransformersConfig
from flexgen_helm.models.transformers_backend.decoder import TransformersDecoder


def decoder_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LayerDecoder:
    """Return what computes a model in `dtype`."""
    if isinstance(config, TransformersConfig):
        return TransformersDecoder(config, device, dtype)
    assert isinstance(config, DecoderConfig)
    return Decoder(config, device, dtype)
