"""Architectures: how a configuration becomes a `ModelConfig`, and how tensors are named. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import gemma, gpt, llama
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.transformers_backend.classes import MULTI_PART_CLASSES, UNLISTED_CLASSES

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        gpt.BLOOM, gemma.GEMMA2, gemma.GEMMA3, gpt.GPT2, gpt.GPT_NEO, gpt.GPT_NEOX, llama.LLAMA,
        llama.MISTRAL, llama.MIXTRAL, gpt.MPT, llama.OLMO2, gpt.OPT, llama.PHI3, llama.QWEN2,
        llama.QWEN3, llama.QWEN3_MOE,
    )
}  # fmt: skip


def architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    """Find the architecture of a `config.json`: a record of ours, else one that runs by
    transformers' modules.

    Raises `UnsupportedArchitectureError` where neither is, and if class and `model_type` are of two
    of them:
    which of them `transformers` takes depends on how it is called.
    """
    names, kind = _class_names(config), config.get("model_type")
    for architecture in ARCHITECTURES.values():
        is_named = any(_same(name, known) for name in names for known in architecture.hf_names)
        if (
            is_named
            and kind != architecture.name
            and isinstance(kind, str)
            and kind in ARCHITECTURES
        ):
            raise UnsupportedArchitectureError(
                f"{', '.join(map(str, names))} with the model_type {kind!r} is not supported; they "
                "are two models"
            )
        if is_named or (not names and kind == architecture.name):
            return architecture
    return architecture_by_modules(config)


def architecture_by_modules(config: Mapping[str, Any]) -> Architecture:
    """Find the architecture of a `config.json` that runs by transformers' modules, whether it has a
    record or not.

    Of a model that also sees or hears, it is that of its language model.

    Raises `UnsupportedArchitectureError`.
    """
    names = _class_names(config)
    if names and isinstance(names[0], str) and find_spec("transformers") is not None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        known = (
            MULTI_PART_CLASSES | UNLISTED_CLASSES | {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
        )
        if any(_same(names[0], name) for name in known):
            return Architecture(
                names[0], tuple(names), _read_by_modules, {}, overflows_float16=True
            )
    wanted = ", ".join(map(str, names)) or config.get("model_type") or "(none named)"
    raise UnsupportedArchitectureError(
        f"architecture {wanted} is not supported; transformers' decoders are, but for those that "
        "the page 'Models without a record of their own' lists"
    )


def _same(name: Any, known: str) -> bool:
    """Whether a class is named; PhiMoEForCausalLM and LLaMAForCausalLM are published with other
    capitals.
    """
    return isinstance(name, str) and name.lower() == known.lower()


def _class_names(config: Mapping[str, Any]) -> Sequence[Any]:
    names = config.get("architectures") or ()
    return names if isinstance(names, (list, tuple)) else (names,)


def overflows_float16(architecture: str) -> bool:
    """Whether hidden states of an architecture exceed float16; of those that nobody has looked at,
    it is assumed.
    """
    return architecture not in ARCHITECTURES or ARCHITECTURES[architecture].overflows_float16


def _read_by_modules(config: Mapping[str, Any]) -> ModelConfig:
    from flexgen_helm.models.transformers_backend.read_config import read_transformers_config

    return read_transformers_config(config)


def architecture_of_gguf(name: str) -> Architecture:
    """Find the architecture of a GGUF file by its `general.architecture`. Raises
    `UnsupportedArchitectureError`.
    """
    known = {gguf_name: a for a in ARCHITECTURES.values() for gguf_name in a.gguf_names}
    if name not in known:
        raise UnsupportedArchitectureError(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(known)}"
        )
    return known[name]
