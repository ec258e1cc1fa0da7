"""The decoder of a model of `transformers`: its modules, with weights and attention of the engine.

Shapes: T tokens of any number of sequences in a row, H hidden size, Hq query heads, Hk key heads, D
elements of a head, V vocabulary, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.decoder import (
    Attend,
    Decoder,
    LayerBatch,
    StageWeights,
    StateGroup,
    TableRows,
)
from flexgen_helm.models.decoder_config import DecoderConfig
from flexgen_helm.models.routing import RoutedTokens, RowExperts, run_together, wait_for_experts
from flexgen_helm.models.transformers_backend.batch_invariance import BatchInvariant
from flexgen_helm.models.transformers_backend.config import LayerKind, Shapes, TransformersConfig
from flexgen_helm.models.transformers_backend.hidden_rows import HiddenRows
from flexgen_helm.models.transformers_backend.interfaces import AttentionCall, ExpertsCall
from flexgen_helm.models.transformers_backend.layer_arguments import LayerArguments
from flexgen_helm.models.transformers_backend.layered_model import LayeredModel
from flexgen_helm.models.transformers_backend.recurrent import MixerRunner
from flexgen_helm.models.transformers_backend.rms_norms import rms_norm_of


@dataclass(frozen=True)
class _ModuleTensor:
    """A tensor that a module uses in its own code: all but tables and the matrices of products.

    name: within the stage.
    tensors: the module's parameters or buffers, by their names in it; leaf: the tensor's.
    zeros: what is there while the stage has no weights.
    """

    name: str
    tensors: dict[str, Any]
    leaf: str
    zeros: Tensor


class TransformersDecoder:
    """The modules of one model, or of a pipeline rank's part of it; used by one thread. See
    `Decoder`.
    """

    def __init__(
        self, config: TransformersConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        modules = config.modules
        self.config, self.dtype, self._modules = config, dtype, modules
        self._model = LayeredModel(
            modules.text, device, any(config.layer_states), modules.own_attention
        )
        self._weights: StageWeights | None = None
        self._state_groups: Callable[[], Iterable[StateGroup]] | None = None
        # of layers that name no other
        self.attention = AttentionConfig(config.head_dim**-0.5, config.attn_softcap)
        self._rows = HiddenRows(config)
        self._table = self._model.base.get_input_embeddings()
        self._layer_inputs = self._model.layer_input_table
        for table in (self._table, self._layer_inputs):
            if table is not None:  # it means an id, and is given numbers of the batch's rows
                table.padding_idx = None
        self._model.model.get_output_embeddings().forward = partial(self._linear, "lm")
        self._device = device
        # Entered while modules run, so that a token's values do not depend on its batch.
        self._functions: AbstractContextManager[Any] = (
            BatchInvariant() if device.type == "cpu" else nullcontext()
        )
        self._no_values = torch.zeros((), device=device, dtype=dtype)
        # What the code outside the layers uses is there from the beginning, in zeros: which
        # arguments layers get does not depend on its values.
        self._outside = {
            stage: self._tensors_of(self._model.model, shapes)
            for stage, shapes in (("embed", modules.embed), ("head", modules.head))
        }
        self._inside = [
            self._tensors_of(module, modules.kind(layer).resident)
            for layer, module in enumerate(self._model.layers)
        ]
        for layer, module in enumerate(self._model.layers):
            self._replace_products(module, modules.kind(layer))
        for module in (self._model.model, *self._model.layers):
            for part in module.modules():
                if (norm := rms_norm_of(part)) is not None:
                    part.forward = norm
        self._model.call_directly()

    def _replace_products(self, layer: nn.Module, kind: LayerKind) -> None:
        """Let a layer's linear modules multiply with the engine's weights."""
        parts, runner = dict(layer.named_modules()), None
        if kind.mixer is not None:
            runner = MixerRunner(kind.mixer, parts[kind.mixer.path])
            parts[kind.mixer.path].forward = partial(self._mix, runner)
        for name, _ in kind.matrices:
            path = name.removesuffix(".weight")
            parts[path].forward = partial(self._linear, path)
            if runner is not None and path in (*runner.mixer.inputs, runner.mixer.output):
                parts[path].forward = partial(runner.linear, path, product=self._linear)

    def rotary(self, positions: Tensor) -> list[LayerArguments]:
        """What each layer is passed besides the hidden states, for tokens at absolute positions
        [T].
        """
        hidden = torch.zeros(
            (1, len(positions), self.config.hidden_size), device=self._device, dtype=self.dtype
        )
        return self._model.before({"inputs_embeds": hidden, "position_ids": positions[None]})[1]

    def embed(self, weights: StageWeights, token_ids: TableRows, positions: TableRows) -> Tensor:
        """token_ids and positions [T] -> what layers are given (`HiddenRows`), [T, hidden
        elements]."""
        with self._stage(weights, self._outside["embed"]), self._functions:
            # A table consists of the rows that are looked up, in their order: a class of its own
            # may scale them.
            self._table._parameters["weight"] = weights.lookup("tokens", token_ids)
            if self._layer_inputs is not None:
                known_ids = token_ids.below(self._modules.layer_input_rows)
                self._layer_inputs._parameters["weight"] = weights.lookup("layer_inputs", known_ids)
            rows = torch.arange(len(token_ids.on_device), device=self._device)[None]
            hidden, layers = self._model.before(
                {"input_ids": rows, "position_ids": positions.on_device[None]}
            )
            for table in (self._table, self._layer_inputs):
                if table is not None:
                    table._parameters["weight"] = None
            return self._rows.new(hidden, layers)

    def layer(
        self, weights: StageWeights, layer: int, batches: Iterable[LayerBatch]
    ) -> Generator[Tensor, None, None]:
        """Decoder layer number `layer`: of each batch hidden rows -> the same (`Decoder.layer`)."""
        layer += self.config.layers_before
        kind = self._modules.kind(layer)
        with self._stage(weights, self._inside[layer]), self._model.bound(None, None):
            runs = (partial(self._layer, kind, layer, batch) for batch in batches)
            yield from (
                run_together(runs, weights.use_experts)
                if kind.num_experts
                else (run() for run in runs)
            )

    def _layer(self, kind: LayerKind, layer: int, batch: LayerBatch) -> Tensor:
        hidden = batch.take_hidden()
        arguments = self._rows.arguments(hidden, layer, batch.rotary[layer])
        self._bind(kind, batch.attend)
        with self._functions:
            out = self._model.layer(layer, self._rows.hidden(hidden), arguments)
            return self._rows.after(hidden, layer, out, arguments)

    def _bind(self, kind: LayerKind, attend: Attend) -> None:
        """Let modules attend to what a batch sees."""
        bindings, self._state_groups = self._model.bindings, attend.state_groups
        bindings.attend = partial(self._attend, attend)
        bindings.run_experts = partial(self._run_experts, kind, attend)

    def head(self, weights: StageWeights, hidden: Tensor) -> Tensor:
        """What layers returned of the positions to score [T, hidden elements] -> logits [T, V] in
        float32.
        """
        positions = torch.zeros((1, len(hidden)), dtype=torch.long, device=self._device)
        with self._stage(weights, self._outside["head"]), self._functions:
            return self._model.after(self._rows.hidden(hidden), positions).squeeze(0).float()

    def _tensors_of(self, module: nn.Module, shapes: Shapes) -> list[_ModuleTensor]:
        """Return where a stage's tensors belong, and put zeros there."""
        module_tensors = []
        for name, shape in shapes:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            tensors: dict[str, Any] = (
                owner._parameters if leaf in owner._parameters else owner._buffers
            )
            tensors[leaf] = self._no_values.expand(shape)
            module_tensors.append(_ModuleTensor(name, tensors, leaf, tensors[leaf]))
        return module_tensors

    @contextmanager
    def _stage(
        self, weights: StageWeights, module_tensors: Sequence[_ModuleTensor]
    ) -> Iterator[None]:
        """Give modules the tensors of a stage."""
        self._weights = weights
        try:
            for entry in module_tensors:
                tensor = weights.vector(entry.name)
                assert tensor is not None, entry.name
                entry.tensors[entry.leaf] = tensor.view(entry.zeros.shape)
            yield
        finally:
            self._weights = None
            for entry in module_tensors:
                entry.tensors[entry.leaf] = entry.zeros

    def _linear(self, path: str, x: Tensor) -> Tensor:
        assert self._weights is not None
        y = self._weights.linear(path, x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)

    def _mix(
        self, runner: MixerRunner, *positional: Any, **named: Any
    ) -> Tensor | tuple[Tensor | None, ...]:
        assert self._state_groups is not None
        return runner.forward(self._state_groups(), self._linear, positional, named)

    def _attend(self, attend: Attend, call: AttentionCall) -> Tensor:
        """Attention with the heads of the cache: those of a layer with fewer or smaller ones are
        padded with zeros.
        """
        config, (heads, dim), value_dim = self.config, call.q.shape[1:], call.v.shape[2]
        key_heads = call.k.shape[1]
        added_keys = config.num_kv_heads - key_heads
        added_queries = heads // key_heads * added_keys
        q, k, v, sinks = call.q, call.k, call.v, call.sinks
        if added_keys or dim < config.head_dim:
            q, k = (
                F.pad(part, (0, config.head_dim - dim, 0, added))
                for part, added in ((q, added_queries), (k, added_keys))
            )
        if added_keys or value_dim < config.head_dim:
            v = F.pad(v, (0, config.head_dim - value_dim, 0, added_keys))
        if sinks is not None and added_keys:
            sinks = F.pad(sinks, (0, added_queries))
        return attend(q, k, v, AttentionConfig(float(call.scale), call.softcap), sinks)[
            :, :heads, :value_dim
        ]

    def _run_experts(self, kind: LayerKind, attend: Attend, call: ExpertsCall) -> Tensor:
        """Each token x [T, H] through its experts."""
        assert self._weights is not None
        tokens = RoutedTokens(
            call.x, call.selected, call.weights, kind.num_experts, partial(self._experts, call),
            self._weights.holds_experts, call.weighs_input,
        )  # fmt: skip
        self._functions.__exit__(None, None, None)  # PyTorch has one stack of them for all batches
        try:
            return wait_for_experts(tokens)
        finally:
            self._functions.__enter__()
            self._bind(kind, attend)  # other batches have run meanwhile

    def _experts(self, call: ExpertsCall, experts: RowExperts, x: Tensor) -> Tensor:
        """Rows x [rows, H] through their experts."""
        module, weights = call.module, self._weights
        assert weights is not None

        def linear(entry: str, x: Tensor) -> Tensor:
            y = weights.expert_linear(experts, f"{call.path}.{{}}.{entry}", x)
            return y + getattr(module, f"{entry}_bias")[experts.numbers] if module.has_bias else y

        with self._functions:
            inner = linear("gate_up_proj" if module.has_gate else "up_proj", x)
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            y = linear("down_proj", inner)
            return module.post_expert_norm(y) if module.has_post_expert_norm else y


LayerDecoder = Decoder | TransformersDecoder


def decoder_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LayerDecoder:
    """Return what computes a model of either kind of record in `dtype`."""
    if isinstance(config, TransformersConfig):
        return TransformersDecoder(config, device, dtype)
    assert isinstance(config, DecoderConfig)
    return Decoder(config, device, dtype)
