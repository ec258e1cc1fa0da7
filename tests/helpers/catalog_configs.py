"""Records of the catalog's models that run by transformers' modules, written so that reading them
needs no PyTorch.

`python -m tests.helpers.catalog_configs` rewrites flexgen_helm/checkpoint/catalog_traced.jsonl.
"""

import dataclasses
import json

from flexgen_helm.checkpoint import catalog
from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.models.architectures import ARCHITECTURES, architecture_of_config
from tests.helpers.paths import ROOT

FILE = ROOT / "flexgen_helm" / "checkpoint" / catalog.TRACED


def traced_entries():
    return [entry for entry in CATALOG.values() if entry.architecture not in ARCHITECTURES]


def trace(entry):
    """The record that transformers' own modules give, as JSON types."""
    content = {**entry.published, "architectures": [entry.architecture]}
    content.pop("quantization_config", None)  # how weights are stored is no part of the model
    config = architecture_of_config(content).read_config(content)
    record = json.loads(json.dumps(dataclasses.asdict(config)))
    return record


if __name__ == "__main__":
    lines = [json.dumps({"name": entry.name, "config": trace(entry)}) for entry in traced_entries()]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
