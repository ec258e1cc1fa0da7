"""A tiny random model of every causal class of transformers, from its default config with smaller
sizes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import yaml

from flexgen_helm.models.transformers_backend.classes import UNLISTED_CLASSES
from tests.helpers.paths import DATA

_DATA = yaml.safe_load((DATA / "tiny_causal_classes.yaml").read_text())

# Of these a default config makes no model: it lacks entries that only published configs have, or a
# library.
UNBUILT = {
    "Gemma3nForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "Qwen4ExpForCausalLM",
}


def causal_classes() -> list[str]:
    """The names of all causal classes of transformers that can be built here."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted((set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) | UNLISTED_CLASSES) - UNBUILT)


def tiny_config(name: str) -> Any:
    """A config of the class `name` with small sizes, in its parts too."""
    import transformers

    return _shrink(
        getattr(transformers, name).config_class, deepcopy(_DATA["changes"].get(name, {}))
    )


def _shrink(config_class: Any, changes: dict[str, Any]) -> Any:
    default = config_class()
    entries = default.to_dict()
    sizes = {
        key: size
        for key, size in {**_DATA["sizes"], **changes}.items()
        if (key in entries or key in changes)
    }
    sizes = {key: size for key, size in sizes.items() if size is not None}
    if "layer_types" in entries and "layer_types" not in changes and entries["layer_types"]:
        count = next(
            (sizes[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in sizes),
            2,
        )
        sizes["layer_types"] = entries["layer_types"][-count:]
    parts = {key: getattr(default, key, None) for key in config_class.sub_configs or {}}
    parts = {key: _shrink(type(part), {}) for key, part in parts.items() if part is not None}
    return config_class(
        **{**sizes, **parts, **{key: value for key, value in changes.items() if value is not None}}
    )
