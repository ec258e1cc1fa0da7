"""Which kinds of models CI has proved, for `flexgen_helm/engine/proved.json`.

`python -m tests.helpers.proofs` proves all that are not in the table yet, with the release of
transformers that it finds, and adds them; `--anew` begins a new table. `make proofs` does so with
every release that tests run with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from flexgen_helm import Engine
from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.engine import proof, small_model
from flexgen_helm.models.architectures import ARCHITECTURES, architecture_of_config
from tests.helpers.backend_models import REFUSED, supported, tiny_model_config
from tests.helpers.tiny_models import VARIANTS


def content_of(config: Any, class_name: str) -> dict[str, Any]:
    """The `config.json` that transformers writes for a model of this class."""
    content: dict[str, Any] = json.loads(config.to_json_string())
    return {**content, "architectures": [class_name]}


def backend_content(name: str) -> dict[str, Any]:
    return content_of(tiny_model_config(name), name)


def backend_names() -> list[str]:
    return [name for name in supported() if name not in REFUSED]


def native_content(variant: str) -> dict[str, Any]:
    config = VARIANTS[variant]()
    class_name = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    return content_of(config, class_name)


def catalog_content(name: str) -> dict[str, Any]:
    entry = CATALOG[name]
    if entry.architecture not in ARCHITECTURES:
        return {**entry.published, "architectures": [entry.architecture]}
    architecture = ARCHITECTURES[entry.architecture]
    return {
        **entry.published,
        "architectures": [architecture.hf_names[0]],
        "model_type": architecture.name,
    }


def contents() -> Iterator[tuple[str, dict[str, Any]]]:
    """All that tests run, and the catalog."""
    for name in backend_names():
        yield name, backend_content(name)
    for variant in VARIANTS:
        yield variant, native_content(variant)
    for name in CATALOG:
        yield name, catalog_content(name)


def key_of(content: dict[str, Any]) -> proof.ProofKey:
    return proof.proof_key(content, architecture_of_config(content).read_config(content))


def main() -> None:
    table = json.loads(proof._TABLE.read_text(encoding="utf-8"))
    known = set() if "--anew" in sys.argv else set(table["digests"])
    tested = {
        name: [] if "--anew" in sys.argv else table["tested"][name]
        for name in ("transformers", "torch")
    }
    for name, content in contents():
        config = architecture_of_config(content).read_config(content)
        key = proof.proof_key(content, config)
        if key.digest in known:
            continue
        difference = small_model.difference_of_miniature(content, config, 0, Engine)
        if not difference < proof.TOLERANCE:
            sys.exit(
                f"{name} differs by {difference:.2g} with transformers {transformers.__version__}"
            )
        known.add(key.digest)
    releases = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
    }
    tested = {
        name: [*(old for old in tested[name] if old != release), release]
        for name, release in releases.items()
    }
    proof._TABLE.write_text(
        json.dumps({"tested": tested, "digests": sorted(known)}, indent=0) + "\n", encoding="utf-8"
    )
    print(f"{len(known)} kinds are proved, with transformers {', '.join(tested['transformers'])}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main()
