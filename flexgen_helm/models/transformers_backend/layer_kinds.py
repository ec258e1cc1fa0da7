"""Describe a traced layer: its matrices, the tensors beside them, its experts, and its states."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.transformers_backend.config import (
    ExpertTensors,
    LayerKind,
    Mixer,
    Shapes,
)
from flexgen_helm.models.transformers_backend.interfaces import ExpertsCall
from flexgen_helm.models.transformers_backend.trace import LayerTrace


def is_linear(module: nn.Module) -> bool:
    """Whether a module does what `nn.Linear` does, whatever its class adds."""
    return isinstance(module, nn.Linear) and _multiplies(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _multiplies(linear_class: type[nn.Linear]) -> bool:
    """Whether a class multiplies by its weight and adds its bias, tried where it has a forward pass
    of its own.
    """
    if linear_class.forward is nn.Linear.forward:
        return True
    with (
        suppress(Exception),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
    ):  # whatever it is made with, or needs to run
        x, trial = torch.randn(4, 2), linear_class(2, 3)
        return torch.allclose(
            trial(x), nn.functional.linear(x, trial.weight, trial.bias), atol=1e-6
        )
    return False


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module itself and the buffers that checkpoints have, such as
    biases of routers.
    """
    buffers = {
        name: buffer for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }  # fmt: skip
    return {**dict(module.named_parameters(recurse=False)), **buffers}


# What modules of experts may have, and `TransformersDecoder` reads.
_EXPERT_TENSORS = {
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
}
_EXPERT_SETTINGS = {
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_concatenated",
    "is_transposed",
    "training",
}


def kept_in_float32(model: Any) -> re.Pattern[str]:
    """Return what finds the names of tensors that `transformers` keeps in float32 in any model of
    16 bits.
    """
    names = sorted(model._keep_in_fp32_modules_strict or ())
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")


def layer_kind(
    layer: nn.Module, trace: LayerTrace, name: str, in_float32: re.Pattern[str]
) -> LayerKind:
    """Describe a traced layer: its matrices, the tensors that stay beside them, its experts, and
    its states.

    name: of the model's class.
    in_float32: finds the names of tensors that are kept in float32.
    """
    modules = dict(layer.named_modules())
    linears = [path for path in trace.order if is_linear(modules[path])]
    once = [path for path in linears if linears.count(path) == 1]
    mixer = _mixer(trace, once, name)
    streamed = [
        path
        for path in once
        if not in_float32.search(f"{path}.weight")
        and (
            mixer is None
            or not path.startswith(f"{mixer.path}.")
            or path in (*mixer.inputs, mixer.output)
        )
    ]
    experts = tuple(_expert_tensors(path, call, name) for path, call in trace.experts.items())
    matrices: Shapes = tuple(
        (f"{path}.weight", tuple(modules[path].weight.shape)) for path in streamed
    )
    taken = {f"{path}.weight" for path in streamed}
    taken |= {f"{stack.path}.{entry}" for stack in experts for entry, _ in stack.matrices}
    resident: Shapes = tuple(
        (path, tuple(tensor.shape))
        for owner, module in modules.items()
        for leaf, tensor in own_tensors(module).items()
        if (path := f"{owner}.{leaf}" if owner else leaf) not in taken
    )
    call = next(iter(trace.experts.values()), None)
    return LayerKind(
        matrices,
        resident,
        experts,
        num_experts=0 if call is None else call.module.num_experts,
        per_token=0 if call is None else call.selected.shape[1],
        float32=tuple(path for path, _ in resident if in_float32.search(path)),
        mixer=mixer,
        attends=bool(trace.attention_calls),
    )


def _mixer(trace: LayerTrace, linears: list[str], name: str) -> Mixer | None:
    """Return the module of a layer that keeps a state. linears: those that are called once."""
    if not trace.mixers:
        return None
    if len(trace.mixers) > 1:
        raise UnsupportedArchitectureError(
            f"{name} has layers in which several modules keep a state"
        )
    (path,) = trace.mixers
    mixer_input, returned = trace.inputs[path], trace.outputs[path]
    returned = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(returned, Tensor) or returned.shape[:-1] != mixer_input.shape[:-1]:
        raise UnsupportedArchitectureError(
            f"{name} has states in a module that returns more than hidden states"
        )
    inside = [linear for linear in linears if linear.startswith(f"{path}.")]
    inputs = tuple(linear for linear in inside if trace.inputs[linear] is mixer_input)
    output = next((linear for linear in inside if trace.outputs[linear] is returned), "")
    width = sum(trace.outputs[linear].shape[-1] for linear in inputs) or mixer_input.shape[-1]
    return Mixer(path, tuple(trace.states), inputs, output, width, trace.one_by_one)


def _expert_tensors(path: str, call: ExpertsCall, name: str) -> ExpertTensors:
    module = call.module
    if not f".{path}".endswith(".experts"):
        raise UnsupportedArchitectureError(
            f"the experts of {name} are in a module {path}, not experts"
        )
    tensors = dict(module.named_parameters(recurse=False))
    settings = {
        entry
        for entry, value in module.__dict__.items()
        if entry.startswith(("has_", "is_")) and value
    }
    if unknown := (settings - _EXPERT_SETTINGS) | (tensors.keys() - _EXPERT_TENSORS):
        raise UnsupportedArchitectureError(
            f"the experts of {name} have {min(unknown)}, of which nothing is known here"
        )
    transposed = bool(module.is_transposed)
    shapes = {entry: tensor.shape for entry, tensor in tensors.items() if tensor.dim() == 3}
    matrices = tuple(
        (entry, (columns, rows) if transposed else (rows, columns))
        for entry, (_, rows, columns) in shapes.items()
    )
    return ExpertTensors(path, matrices, transposed)
