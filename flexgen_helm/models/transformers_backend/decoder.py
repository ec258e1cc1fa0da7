"""The decoder of a model of `transformers`: its modules, with weights and attention of the engine.

Shapes: T tokens of any number of sequences one after the other, H hidden size, Hq query heads, Hk key heads, D elements
of a head, V vocabulary, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.decoder import Attend, StageWeights, StateGroup, TableRows
from flexgen_helm.models.routing import Routing
from flexgen_helm.models.transformers_backend.config import LayerKind, TransformersConfig, expert_name
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall, ExpertsCall
from flexgen_helm.models.transformers_backend.layered_model import LayerArguments, LayeredModel
from flexgen_helm.models.transformers_backend.norms import rms_norm_of
from flexgen_helm.models.transformers_backend.recurrent import MixerRunner
from flexgen_helm.models.transformers_backend.token_state import TokenState


@dataclass(frozen=True)
class _OwnTensor:
    """A tensor that a module uses by itself, and its place: all but tables and the matrices of products.

    place: the module's parameters or buffers.
    zeros: what is there while the stage has no weights.
    """

    name: str
    shape: tuple[int, ...]
    place: dict[str, Any]
    leaf: str
    zeros: Tensor


class TransformersDecoder:
    """The modules of one model, or of a pipeline rank's part of it; used by one thread. See `LayerDecoder`."""

    def __init__(self, config: TransformersConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.dtype, self._modules = config, dtype, config.modules
        self._model = LayeredModel(config.modules.text, device, has_states=any(config.layer_states))
        self._weights: StageWeights | None = None
        self._state_groups: Callable[[], Iterable[StateGroup]] | None = None
        self._attention: dict[tuple[float, float | None], AttentionConfig] = {}
        self._state = TokenState(config)
        self._table, self._layer_inputs = self._model.base.get_input_embeddings(), self._model.layer_input_table
        head = self._model.model.get_output_embeddings()
        head.forward = partial(self._linear, "lm")
        self._device = device
        self._no_values = torch.zeros((), device=device, dtype=dtype)
        # What the code outside the layers uses is there from the beginning, in zeros: which arguments layers get does
        # not depend on its values.
        self._outside = {
            stage: self._tensors_of(self._model.model, others)
            for stage, others in (("embed", config.modules.embed), ("head", config.modules.head))
        }
        self._inside = [
            self._tensors_of(module, config.modules.kind(layer).others)
            for layer, module in enumerate(self._model.layers)
        ]
        self._paths: dict[int, str] = {}  # of modules within their layer
        for layer, module in enumerate(self._model.layers):
            modules = dict(module.named_modules())
            self._paths |= {id(part): path for path, part in modules.items()}
            kind = self._modules.kind(layer)
            runner = None
            if kind.mixer is not None:
                runner = MixerRunner(kind.mixer, modules[kind.mixer.path])
                modules[kind.mixer.path].forward = partial(self._mix, runner)
            for name, _ in kind.matrices:
                path = name.removesuffix(".weight")
                modules[path].forward = partial(self._linear, path)
                if runner is not None and path in (*runner.mixer.inputs, runner.mixer.output):
                    modules[path].forward = partial(self._linear_of_mixer, runner, path)
        for module in (self._model.model, *self._model.layers):
            for part in module.modules():
                if (norm := rms_norm_of(part)) is not None:
                    part.forward = norm
        self._model.call_directly()

    @property
    def attention(self) -> AttentionConfig:
        """What most layers use; each names its own."""
        return self._attention_of(self.config.head_dim**-0.5, self.config.attn_softcap)

    def rotary(self, positions: Tensor) -> list[LayerArguments]:
        """What each layer is passed besides the hidden states, for tokens at absolute positions [T]."""
        hidden = torch.zeros((1, len(positions), self.config.hidden_size), device=self._device, dtype=self.dtype)
        return self._model.before({"inputs_embeds": hidden, "position_ids": positions[None]})[1]

    def embed(self, weights: StageWeights, token_ids: TableRows, positions: TableRows) -> Tensor:
        """token_ids and positions [T] -> what layers are given (`TokenState`), [T, state size]."""
        with self._stage(weights, self._outside["embed"]):
            # A table consists of the rows that are looked up, in their order: a class of its own may scale them.
            self._table._parameters["weight"] = weights.lookup("tokens", token_ids)
            if self._layer_inputs is not None:
                known = token_ids.below(self._modules.layer_input_rows)
                self._layer_inputs._parameters["weight"] = weights.lookup("layer_inputs", known)
            rows = torch.arange(len(token_ids.on_device), device=self._device)[None]
            hidden, layers = self._model.before({"input_ids": rows, "position_ids": positions.on_device[None]})
            for table in (self._table, self._layer_inputs):
                if table is not None:
                    table._parameters["weight"] = None
            return self._state.new(hidden, layers)

    def layer(
        self, weights: StageWeights, layer: int, hidden: Tensor, rotary: Sequence[LayerArguments], attend: Attend
    ) -> Tensor:
        """Decoder layer number `layer`: hidden [T, state size] -> the same."""
        layer += self.config.layers_before
        kind, arguments = self._modules.kind(layer), self._state.arguments(hidden, layer, rotary[layer])
        with (
            self._stage(weights, self._inside[layer]),
            self._model.bound(partial(self._attend, attend), partial(self._run_experts, kind)),
        ):
            self._state_groups = attend.state_groups
            out = self._model.layer(layer, self._state.hidden(hidden), arguments)
            return self._state.after(hidden, layer, out, arguments)

    def head(self, weights: StageWeights, hidden: Tensor) -> Tensor:
        """What layers returned [T, state size], of the positions to score -> logits [T, V] in float32."""
        positions = torch.zeros((1, len(hidden)), dtype=torch.long, device=self._device)
        with self._stage(weights, self._outside["head"]):
            return self._model.after(self._state.hidden(hidden), positions).squeeze(0).float()

    def likely_experts(self, weights: StageWeights, layer: int, hidden: Tensor) -> Tensor | None:
        """Guess which experts a layer will select (`Decoder.likely_experts`); None where its router is unknown."""
        layer += self.config.layers_before
        kind, modules = self._modules.kind(layer), self._model.layers[layer]
        if not kind.router:
            return None
        x = self._state.hidden(hidden)
        with (
            self._stage(weights, self._inside[layer]),
            self._model.bound(_attend_to_nothing, _end_with_selection),
        ):
            try:
                modules.get_submodule(kind.router)(modules.get_submodule(kind.router_norm)(x))
            except _SelectionError as end:
                return Routing(end.call.selected, end.call.weights, kind.num_experts).largest_weights()
        return None

    def _tensors_of(self, module: nn.Module, others: Sequence[tuple[str, tuple[int, ...]]]) -> list[_OwnTensor]:
        """Find where a stage's tensors belong, and put zeros there."""
        found = []
        for name, shape in others:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            place: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            own = _OwnTensor(name, shape, place, leaf, self._no_values.expand(shape))
            place[leaf] = own.zeros
            found.append(own)
        return found

    @contextmanager
    def _stage(self, weights: StageWeights, tensors: Sequence[_OwnTensor]) -> Iterator[None]:
        """Give modules the tensors of a stage."""
        self._weights = weights
        try:
            for own in tensors:
                tensor = weights.vector(own.name)
                assert tensor is not None, own.name
                own.place[own.leaf] = tensor.view(own.shape)
            yield
        finally:
            self._weights = None
            for own in tensors:
                own.place[own.leaf] = own.zeros

    def _linear(self, path: str, x: Tensor) -> Tensor:
        assert self._weights is not None
        y = self._weights.linear(path, x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)

    def _linear_of_mixer(self, runner: MixerRunner, path: str, x: Tensor) -> Tensor:
        return runner.linear(path, x, self._linear)

    def _mix(self, runner: MixerRunner, *positional: Any, **named: Any) -> Tensor:
        assert self._state_groups is not None
        return runner.forward(self._state_groups(), self._linear, positional, named)

    def _attend(self, attend: Attend, call: AttentionCall) -> Tensor:
        """Attention with the heads of the cache: those of a layer with fewer or smaller ones are padded with zeros."""
        config, heads = self.config, call.q.shape[1]
        key_heads, value_dim = call.k.shape[1], call.v.shape[2]
        q, k, v = (_wider(part, config.head_dim) for part in (call.q, call.k, call.v))
        if key_heads < config.num_kv_heads:
            group = heads // key_heads
            q = _more_heads(q, group * config.num_kv_heads)
            k, v = _more_heads(k, config.num_kv_heads), _more_heads(v, config.num_kv_heads)
        sinks = call.sinks
        if sinks is not None and len(sinks) < q.shape[1]:
            sinks = F.pad(sinks, (0, q.shape[1] - len(sinks)))
        own = self._attention_of(call.scale, call.softcap)
        return attend(q, k, v, own, sinks)[:, :heads, :value_dim]

    def _attention_of(self, scale: float, softcap: float | None) -> AttentionConfig:
        key = float(scale), softcap
        if key not in self._attention:
            self._attention[key] = AttentionConfig(*key)
        return self._attention[key]

    def _run_experts(self, kind: LayerKind, call: ExpertsCall) -> Tensor:
        """Each token x [T, H] through its experts."""
        assert self._weights is not None
        path = self._paths[id(call.module)]
        return Routing(call.selected, call.weights, kind.num_experts).apply(
            call.x, self._weights.use_experts, partial(self._expert, call.module, path), call.weighs_input
        )

    def _expert(self, module: Any, path: str, expert: int, x: Tensor) -> Tensor:
        first = "gate_up_proj" if module.has_gate else "up_proj"
        inner = self._expert_linear(module, path, expert, first, x)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        y = self._expert_linear(module, path, expert, "down_proj", inner)
        return module.post_expert_norm(y) if module.has_post_expert_norm else y

    def _expert_linear(self, module: Any, path: str, expert: int, entry: str, x: Tensor) -> Tensor:
        assert self._weights is not None
        y = self._weights.linear(expert_name(path, expert, entry).removesuffix(".weight"), x)
        return y + getattr(module, f"{entry}_bias")[expert] if module.has_bias else y


class _SelectionError(Exception):
    """Experts are selected: what they would compute is not wanted."""

    def __init__(self, call: ExpertsCall) -> None:
        super().__init__()
        self.call = call


def _end_with_selection(call: ExpertsCall) -> Tensor:
    raise _SelectionError(call)


def _attend_to_nothing(call: AttentionCall) -> Tensor:
    raise AssertionError("a router attends to nothing")


def _wider(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _more_heads(x: Tensor, heads: int) -> Tensor:
    return F.pad(x, (0, 0, 0, heads - x.shape[1]))
