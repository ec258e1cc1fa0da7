"""What a traced layer is made of: its matrices, what rests beside them, experts, and the module that keeps a state."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.config import ExpertTensors, LayerKind, Mixer, Shapes
from flexgen_helm.models.transformers_backend.interfaces import ExpertsCall
from flexgen_helm.models.transformers_backend.layered_model import own_tensors
from flexgen_helm.models.transformers_backend.trace import LayerTrace

# What modules of experts may have, and `TransformersDecoder` reads.
_EXPERT_TENSORS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
_EXPERT_SETTINGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_concatenated", "is_transposed", "training"}


def kept_in_float32(model: Any) -> re.Pattern[str]:
    """Return what finds the names of tensors that `transformers` keeps in float32 in any model of 16 bits."""
    names = sorted(model._keep_in_fp32_modules_strict or ())
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")


def layer_kind(layer: nn.Module, trace: LayerTrace, name: str, in_float32: re.Pattern[str]) -> LayerKind:
    mixer = _mixer(trace, name)
    streamed = [
        path
        for path in trace.linears
        if trace.linears.count(path) == 1
        and not in_float32.search(f"{path}.weight")
        and (mixer is None or not path.startswith(f"{mixer.path}.") or path in (*mixer.inputs, mixer.output))
    ]
    modules = dict(layer.named_modules())
    experts = tuple(_expert_tensors(path, call, name) for path, call in trace.experts.items())
    stacked = {f"{own.path}.{entry}" for own in experts for entry, _ in own.matrices}
    matrices: Shapes = tuple((f"{path}.weight", tuple(modules[path].weight.shape)) for path in streamed)
    taken = {f"{path}.weight" for path in streamed} | stacked
    others: Shapes = tuple(
        (path, tuple(tensor.shape))
        for owner, module in modules.items()
        for path, tensor in ((f"{owner}.{own}" if owner else own, t) for own, t in own_tensors(module).items())
        if path not in taken
    )
    calls = list(trace.experts.values())
    count = calls[0].module.num_experts if calls else 0
    per_token = calls[0].selected.shape[1] if calls else 0
    kept = tuple(path for path, _ in others if in_float32.search(path))
    router, norm = _router(trace, [own.path for own in experts])
    return LayerKind(matrices, others, experts, count, per_token, kept, router, norm, mixer, bool(trace.calls))


def _mixer(trace: LayerTrace, name: str) -> Mixer | None:
    """Return the module of a layer that keeps a state."""
    if not trace.mixers:
        return None
    if len(trace.mixers) > 1:
        raise UnsupportedArchitectureError(f"{name} has layers in which several modules keep a state")
    (path,) = trace.mixers
    given, returned = trace.inputs[path], trace.outputs[path]
    returned = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(returned, Tensor) or returned.shape[:-1] != given.shape[:-1]:
        raise UnsupportedArchitectureError(f"{name} has states in a module that returns more than hidden states")
    own = [other for other in trace.linears if other.startswith(f"{path}.") and trace.linears.count(other) == 1]
    inputs = tuple(other for other in own if trace.inputs[other] is given)
    output = next((other for other in own if trace.outputs[other] is returned), "")
    width = sum(trace.outputs[other].shape[-1] for other in inputs) or given.shape[-1]
    return Mixer(path, tuple(trace.states), inputs, output, width, trace.one_by_one)


def _router(trace: LayerTrace, experts: list[str]) -> tuple[str, str]:
    """Return the module around the experts, and the one whose result it is given.

    "" twice if they are not found, or if the module computes more than a selection before, such as a shared expert.
    """
    if len(experts) != 1:
        return "", ""
    block = experts[0].rpartition(".")[0]
    given = trace.inputs.get(block)
    norm = next((path for path, returned in trace.outputs.items() if returned is given), "")
    num_linears = sum(path.startswith(f"{block}.") for path in trace.before_experts)
    return (block, norm) if block and norm and given is not None and num_linears < 2 else ("", "")


def _expert_tensors(path: str, call: ExpertsCall, name: str) -> ExpertTensors:
    module = call.module
    if not f".{path}".endswith(".experts"):
        raise UnsupportedArchitectureError(f"the experts of {name} are in a module {path}, not experts")
    settings = {own for own, value in module.__dict__.items() if own.startswith(("has_", "is_")) and value}
    tensors = {own for own, _ in module.named_parameters(recurse=False)}
    if unknown := (settings - _EXPERT_SETTINGS) | (tensors - _EXPERT_TENSORS):
        raise UnsupportedArchitectureError(f"the experts of {name} have {min(unknown)}, of which nothing is known here")
    stacked = {entry: weight.shape for entry, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    matrices = tuple(
        (entry, (shape[2], shape[1]) if module.is_transposed else (shape[1], shape[2]))
        for entry, shape in stacked.items()
    )
    return ExpertTensors(path, matrices, bool(module.is_transposed))
