"""Builds a causal model of `transformers` from its configuration, without weights."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from flexgen_helm.concurrency import import_lock
from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.classes import UNLISTED_CLASSES
from flexgen_helm.models.transformers_backend.interfaces import (
    IMPLEMENTATION,
    register_with_transformers,
)
from flexgen_helm.models.transformers_backend.module_adaptations import adapt

# Layers, experts and heads of a model at most.
MAX_MODULES = 4096
# Entries that choose code, storage, or what a model returns besides logits; training leaves some of
# them.
_WITHOUT_VALUES = re.compile(
    "auto_map|quantization_config|_.*|output_(attentions|hidden_states|router_logits)|(use_)?return_dict|torchscript|"
    "chunk_size_feed_forward"
)
# Entries that count modules.
_COUNT = re.compile(r"(?!.*(embed|size))(n_layers?$|num_|.*experts)")
# Buffers up to this size have values; larger ones, such as masks, are not used.
_MAX_BUFFER_ELEMENTS = 1 << 21
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


def empty_model(config_text: str, *, has_buffers: bool = False) -> Any:
    """Build the causal model of a configuration without weights.

    has_buffers: buffers that are not too large have their values; else all tensors are on the meta
        device.
    """
    cls, config = class_and_config(config_text)
    from transformers.initialization import no_init_weights

    register_with_transformers()
    config.use_cache = False
    with (
        _NoLargeTensors() if has_buffers else torch.device("meta"),
        no_init_weights(),
        _meta_parameters(),
    ):
        try:
            model = cls._from_config(
                config, attn_implementation=IMPLEMENTATION, dtype=torch.float32
            )
        except KeyError:  # it chooses among classes that it knows by name
            model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.config._attn_implementation = IMPLEMENTATION  # masks are ours in any case
    model.set_experts_implementation(IMPLEMENTATION)
    modules = [*model.modules()]
    if any("indexer" in module._modules for module in modules):  # `adapt` removes them
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = [*ignored, r"\.indexer\."]
    for module in modules:
        adapt(module)
    return model.eval()


def class_and_config(config_text: str) -> tuple[Any, Any]:
    """Return the causal class of a configuration and its own configuration: of several parts, the
    language model's.

    Raises `UnsupportedArchitectureError` for one without a causal class, and what a configuration
    class raises.
    """
    with import_lock("transformers"):
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig
    content = _checked(
        transformers.PretrainedConfig._decode_special_floats(json.loads(config_text))
    )
    name = next(iter(content.pop("architectures", None) or ()), "")
    cls: Any = getattr(transformers, name, None)
    is_causal = cls is not None and name.endswith(("ForCausalLM", "LMHeadModel"))
    model_type = content.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:  # the class says what it is (Kimi K2 is a DeepSeek V3)
        model_type = getattr(getattr(cls, "config_class", None), "model_type", model_type)
    whole = AutoConfig.for_model(model_type, **content)
    config = whole.get_text_config()
    if not is_causal:  # the language model of one of several parts
        listed = transformers.AutoModelForCausalLM._model_mapping
        unlisted = {
            known.config_class: known
            for name in UNLISTED_CLASSES
            if (known := getattr(transformers, name, None))
        }
        cls = listed[type(config)] if type(config) in listed else unlisted.get(type(config))
        if cls is None:
            raise UnsupportedArchitectureError(
                f"{name} has a language model that transformers does not have alone"
            )
        config.tie_word_embeddings = whole.tie_word_embeddings
    return cls, config


class _NoLargeTensors(TorchFunctionMode):
    """Makes large tensors on the meta device: weights, which come from elsewhere, and masks, which
    nobody uses.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and kwargs.get("device") is None:
            sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
            if prod(size for size in sizes if isinstance(size, int)) > _MAX_BUFFER_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _checked(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that describe the model and its parts, without those that choose code,
    storage or outputs.

    Raises `ValueError` for numbers of layers or experts that no model has: modules of each would be
    made.
    """
    checked = {}
    for name, value in content.items():
        if _COUNT.match(name) and isinstance(value, int) and value > MAX_MODULES:
            raise ValueError(f"{name} is {value}; at most {MAX_MODULES:,} can be read")
        if not _WITHOUT_VALUES.fullmatch(name):
            checked[name] = _checked(value) if isinstance(value, dict) else value
    return checked


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Move every parameter that this thread makes to the meta device as soon as it is
    registered.
    """
    thread = threading.get_ident()

    def to_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
