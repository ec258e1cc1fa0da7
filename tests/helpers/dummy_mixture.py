"""A mixture of many experts in 4 bits, of any size, written as fast as the disk takes it.

    python -m tests.helpers.dummy_mixture FOLDER GB

FOLDER gets `config.json`, for `--dummy-weights --precision 4bit-weights`, and `offload`, for `--offload-dir`: with the
weight file of every expert. An expert is drawn from stripes that were quantized once, so its values are those of
random weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.models.config import tensor_shapes
from flexgen_helm.offload.matrices import MatrixLoader
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import PRECISIONS
from tests.helpers.offload import tiers_of

PRECISION = PRECISIONS["4bit-weights"]
# Those of Qwen3-235B-A22B, but for the number of experts and the vocabulary.
SHAPES = dict(hidden_size=4096, moe_intermediate_size=1536, num_attention_heads=64, num_key_value_heads=4,
              head_dim=128, num_experts=256, num_experts_per_tok=8, vocab_size=32000)  # fmt: skip
_TILE_STRIPES = 16
_GENERATOR = torch.Generator()


def write_config(folder: Path, layers: int, **shapes: int) -> None:
    """Write the folder of a Qwen3-MoE without weights."""
    config: dict[str, Any] = {
        **SHAPES, **shapes, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": layers, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    config["intermediate_size"] = config["moe_intermediate_size"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


class _Repeated(MatrixLoader):
    """Draws the stripes of packed matrices from a few that were quantized, the same in every process."""

    def _tiles(self, name: str) -> Iterator[torch.Tensor]:
        fmt = self.format_of(name)
        assert fmt is not None
        (stripes, _), width = self._storage(name)[0], self._checkpoint.shapes[name][1]
        known = self._quantized(fmt, width)
        for first in range(0, stripes, _TILE_STRIPES):
            drawn = torch.randint(len(known), (min(_TILE_STRIPES, stripes - first),), generator=_GENERATOR)
            yield known[drawn].flatten()

    def _quantized(self, fmt: GroupFormat, width: int) -> torch.Tensor:
        known = self.__dict__.setdefault("_known", {})
        if width not in known:
            known[width] = quantize(0.02 * torch.randn(32 * fmt.stripe_rows, width, generator=_GENERATOR), fmt)
        return known[width]


def write_mixture(folder: Path, layers: int, **shapes: int) -> int:
    """Write a model of so many layers; return the bytes of its experts."""
    _GENERATOR.manual_seed(0)
    write_config(folder, layers, **shapes)
    checkpoint = open_checkpoint(folder, weights="dummy")
    (folder / "offload").mkdir(exist_ok=True)
    tiers = tiers_of(folder / "offload")
    loader, total = _Repeated(checkpoint, tiers, PRECISION, torch.float32), 0
    try:
        for name, shape in tensor_shapes(checkpoint.config).items():
            if ".experts." in name and len(shape) == 2:
                loader.to_disk(name)
                total += loader.num_bytes(name)
    finally:
        loader.close()
        tiers.close()
    return total


def main(folder: str, gigabytes: str) -> None:
    values = SHAPES["num_experts"] * 3 * SHAPES["hidden_size"] * SHAPES["moe_intermediate_size"]
    layers = max(1, round(float(gigabytes) * 1e9 / (values * 4.5 / 8)))
    print(f"{write_mixture(Path(folder), layers) / 1e9:.2f} GB of experts in {layers} layers")


if __name__ == "__main__":
    main(*sys.argv[1:])
