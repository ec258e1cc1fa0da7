"""A causal model of `transformers` whose layers are called one at a time.

    forward of the model     code before the layers | layer 0 | layer 1 | … | code after them
    here                     `before`               | `layer(0)`, `layer(1)`, … | `after`

The model is built without weights. In its list of layers stand-ins take the place of the layers: they record what the
model passes to each of them, and return the hidden states that they are told. So everything around the layers is the
model's own code: embeddings, positions, final norm, scaling and caps of logits.

Attention and experts go through the interfaces of `transformers`, to functions that the caller of a layer binds.
"""

from __future__ import annotations

import json
import re
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from flexgen_helm.concurrency import import_lock
from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.config import Window

OWN_ATTENTION = "computes attention in its own code, not through transformers' attention interface"
# Layers, experts and heads of a model at most.
MAX_MODULES = 4096
# Name by which `transformers` knows our attention, masks and experts.
IMPLEMENTATION = "flexgen_helm"
# Buffers up to this size have values; larger ones, such as masks, are not used.
_MAX_BUFFER_ELEMENTS = 1 << 21
# Whether masks that models make are looked at: once for each model, with one sequence.
checks_masks: ContextVar[bool] = ContextVar("checks_masks", default=False)
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


@dataclass(frozen=True)
class Mask:
    """Stands for an attention mask: causal, over a window; None for all earlier positions.

    is_causal: False for any other mask.
    """

    window: Window | None = None
    is_causal: bool = True

    def __getitem__(self, rows: Any) -> Mask:
        """Return what is meant for some of the queries (Gemma 4 takes all of them so)."""
        return self


@dataclass
class AttentionCall:
    """What a module asks of attention: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv].

    scale: factor on scores. softcap: scores become cap tanh(score / cap). sinks: [Hq], logits that take a share of the
    softmax and have no value.
    key: k as the module has it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    key: Tensor | None = None


@dataclass
class ExpertsCall:
    """What a module asks of its experts: each token x [T, H] through K of them -> [T, H].

    selected, weights: [T, K].
    weighs_input: the weights multiply what experts are given, not what they return (Llama 4).
    """

    module: Any
    x: Tensor
    selected: Tensor
    weights: Tensor
    weighs_input: bool = False


@dataclass
class LayerArguments:
    """What the model passes to a layer besides the hidden states."""

    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def layer_input(self) -> Tensor:
        """The input that a table has for this layer and each token, [1, T, P]: the only tensor of this kind."""
        return next(value for value in (*self.positional, *self.named.values()) if _is_layer_input(value))

    def with_layer_input(self, own: Tensor) -> LayerArguments:
        """Return the same with another input of the layer."""
        positional = tuple(own if _is_layer_input(value) else value for value in self.positional)
        named = {name: own if _is_layer_input(value) else value for name, value in self.named.items()}
        return LayerArguments(positional, named)

    @property
    def shared_keys(self) -> UserDict[str, tuple[Tensor, Tensor]]:
        """Keys and values that layers leave to later ones; empty where they do not."""
        return next((value for value in self.named.values() if isinstance(value, UserDict)), UserDict())

    def with_past(self, past: PastOfTokens) -> LayerArguments:
        """Return the same with another stand-in for the cache, where a layer is given one."""
        if "past_key_values" not in self.named:
            return self
        return LayerArguments(self.positional, {**self.named, "past_key_values": past})

    def with_shared_keys(self, shared: Mapping[str, tuple[Tensor, Tensor]]) -> LayerArguments:
        """Return the same with keys and values of the layers before."""
        named = {
            name: type(value)(shared) if isinstance(value, UserDict) else value for name, value in self.named.items()
        }
        return LayerArguments(self.positional, named)


@dataclass
class Bindings:
    """What modules call while a layer runs."""

    attend: Callable[[AttentionCall], Tensor] | None = None
    run_experts: Callable[[ExpertsCall], Tensor] | None = None


class LayeredModel:
    """One causal model of `transformers` without weights.

    model: the causal model.
    layers: its decoder layers, which are not reachable from `model` any more.
    layers_path: name of their list in the model's state dict.
    has_states: layers keep states; they are passed a mask.
    """

    def __init__(self, config_text: str, device: torch.device | str, has_states: bool = False) -> None:
        """config_text: content of `config.json`.

        device: of buffers; 'meta' for a model that only shapes pass.

        Raises `UnsupportedArchitectureError` for what `transformers` does not know, or does not run this way.
        """
        self.bindings, self.has_states = Bindings(), has_states
        self.model = empty_model(config_text, has_buffers=str(device) != "meta")
        self.layers_path, found = _find_layers(self.model)
        self.layers: list[Any] = list(found)
        self._states = [_StandInState(is_last=index == len(found) - 1) for index in range(len(found))]
        for index, state in enumerate(self._states):
            found[index] = _StandIn(self.layers[index], state)
        # Descendants of RoBERTa count positions from behind that of the padding token.
        embeddings = getattr(self.base, "embeddings", None)
        self._first_position = 0
        if embeddings is not None and hasattr(embeddings, "create_position_ids_from_input_ids"):
            self._first_position = int(embeddings.padding_idx) + 1
        if self.layer_input_table is not None:
            # Token ids that the table lacks are row 0. Rows that were looked up are numbered anew, and all are there.
            self.base.config.vocab_size_per_layer_input = torch.iinfo(torch.long).max
        for module in (self.model, *self.layers):
            for part in module.modules():
                part.__dict__["flexgen_helm_bindings"] = self.bindings
                for name, buffer in part._buffers.items():
                    if buffer is not None and buffer.device.type != "meta":
                        part._buffers[name] = buffer.to(device)

    @property
    def base(self) -> Any:
        """The model without its language-model head."""
        return self.model.base_model

    @property
    def layer_input_table(self) -> Any:
        """The embedding of the inputs that layers have of their own; None in most models."""
        return getattr(self.base, "embed_tokens_per_layer", None)

    def before(self, arguments: Mapping[str, Tensor]) -> tuple[Tensor, list[LayerArguments]]:
        """Run the code before the layers -> hidden [1, T, H], and what each layer is passed.

        arguments: `input_ids` or `inputs_embeds`, and `position_ids`, each [1, T]. With embeddings alone, the inputs
            of layers that a table has are meaningless.
        """
        for state in self._states:
            state.recorded = state.result = None
        positions = arguments["position_ids"] + self._first_position
        with suppress(_AllRecordedError):
            try:
                self._run_base(arguments, positions)
            except ValueError as error:  # it unpacks what its layers return, and none of them has run yet
                expected = _UNPACKED.search(str(error))
                if expected is None or any(state.num_returned for state in self._states):
                    raise
                for state in self._states:
                    state.num_returned = int(expected[1])
                self._run_base(arguments, positions)
        recorded = [state.recorded for state in self._states]
        past = PastOfTokens(arguments["position_ids"])
        recorded = [own if own is None else own.with_past(past) for own in recorded]
        hidden = self._states[0].hidden
        if hidden is None or any(own is None for own in recorded):
            raise UnsupportedArchitectureError(f"{_name(self.model)} does not call its layers one after the other")
        for state in self._states:
            state.hidden = None
        return hidden, [own for own in recorded if own is not None]

    def _run_base(self, arguments: Mapping[str, Tensor], positions: Tensor) -> None:
        unmasked = _unmasked(positions)
        with self._known(unmasked["attention_mask"]):
            self.base(**{**self._with_layer_inputs(arguments), "position_ids": positions}, **unmasked)

    def layer(self, index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Run one layer, hidden [1, T, H] -> [1, T, H]; of S streams [S, 1, T, H]."""
        out = self.layers[index](hidden, *arguments.positional, **arguments.named)
        self._states[index].num_returned = len(out) if isinstance(out, tuple) else 0
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def after(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run the code after the layers -> logits [1, N, V].

        hidden: [1, N, H], or [S, 1, N, H] of S streams.
        positions: [1, N], of any value.
        """
        for state in self._states:
            state.recorded, state.result = None, hidden
        arguments = {"inputs_embeds": hidden if hidden.dim() == 3 else hidden[0], "position_ids": positions}
        unmasked = _unmasked(positions)
        try:
            with self._known(unmasked["attention_mask"]):
                logits: Tensor = self.model(**self._with_layer_inputs(arguments), **unmasked).logits
        finally:
            for state in self._states:
                state.result = state.hidden = state.recorded = None
        return logits

    def _known(self, mask: Tensor | None) -> AbstractContextManager[Any]:
        """Spare a wait for the device: modules with states are passed a mask unless all of it is ones."""
        return _KnownMask(mask) if self.has_states else nullcontext()

    def _with_layer_inputs(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add zeros for the inputs that layers have of their own, which models cannot find without token ids."""
        table, embeds = self.layer_input_table, arguments.get("inputs_embeds")
        if table is None or embeds is None:
            return dict(arguments)
        inputs = embeds.new_zeros((*embeds.shape[:2], len(self.layers), table.embedding_dim // len(self.layers)))
        return {**arguments, "per_layer_inputs": inputs}

    @contextmanager
    def bound(
        self, attend: Callable[[AttentionCall], Tensor], run_experts: Callable[[ExpertsCall], Tensor]
    ) -> Iterator[None]:
        """Let modules call these functions."""
        self.bindings.attend, self.bindings.run_experts = attend, run_experts
        try:
            yield
        finally:
            self.bindings.attend = self.bindings.run_experts = None


def _is_layer_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


class PastOfTokens:
    """Stands for the cache of layers: each token has as many before it as its position says.

    Keys and values go to the engine by attention, so they are returned as they are.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return the number of tokens before, which models add to 0 … T - 1 to have positions [T]."""
        positions = self._positions[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, keys: Tensor, values: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its layers ask their cache for {name}")


class _KnownMask(TorchFunctionMode):
    """Answers whether all of a mask is ones, which it is, without a wait for the device."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self._mask, self._compared = mask, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.all and self._compared is not None and args[0] is self._compared:
            return torch.tensor(True)
        out = func(*args, **(kwargs or {}))
        if func in (Tensor.__eq__, Tensor.eq, torch.eq) and args[0] is self._mask:
            self._compared = out
        return out


def _unmasked(positions: Tensor) -> dict[str, Any]:
    """Say that no token is padding: without a mask, models read the positions, for which the host waits.

    Masks on the meta device have no values, and models with recurrent layers read them.
    """
    mask = None if positions.device.type == "meta" else torch.ones_like(positions, dtype=torch.bool)
    return {"attention_mask": mask, "use_cache": False}


_UNPACKED = re.compile(r"not enough values to unpack \(expected (\d+)")


class _AllRecordedError(Exception):
    """The last stand-in has recorded its arguments: what follows the layers is not wanted."""


@dataclass
class _StandInState:
    """What a stand-in was given, and what it returns.

    hidden, recorded: hidden states and other arguments of its last call.
    result: hidden states that it returns; None while arguments are recorded.
    num_returned: values of the tuple that it returns, hidden states first; 0 for hidden states alone.
    """

    is_last: bool
    num_returned: int = 0
    hidden: Tensor | None = None
    recorded: LayerArguments | None = None
    result: Tensor | None = None


class _StandIn(nn.Module):
    """Takes a layer's place in the model. It has the layer's attributes, which models ask for."""

    def __init__(self, layer: nn.Module, state: _StandInState) -> None:
        super().__init__()
        self.__dict__["_layer"], self.__dict__["_state"] = layer, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        state = self._state
        if positional:
            hidden, positional = positional[0], positional[1:]
        else:
            hidden = named.pop("hidden_states")
        if state.result is not None:
            hidden = state.result
        else:
            state.hidden, state.recorded = hidden, LayerArguments(positional, named)
            if state.is_last:
                raise _AllRecordedError
        return (hidden, *[None] * (state.num_returned - 1)) if state.num_returned else hidden


class _NoLargeTensors(TorchFunctionMode):
    """Makes large tensors on the meta device: weights, which come from elsewhere, and masks, which nobody uses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and kwargs.get("device") is None:
            sizes = args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else args
            count = 1
            for size in sizes if isinstance(sizes, (tuple, list, torch.Size)) else ():
                count *= int(size) if isinstance(size, int) else 1
            if count > _MAX_BUFFER_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def empty_model(config_text: str, *, has_buffers: bool = False) -> Any:
    """Build the causal model of a configuration without weights.

    has_buffers: buffers that are not too large have their values; else all tensors are on the meta device.
    """
    content = _checked(json.loads(config_text))
    with import_lock("transformers"):
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
    _register()
    name = next(iter(content.pop("architectures", None) or ()), "")
    cls: Any = getattr(transformers, name, None)
    is_causal = cls is not None and name.endswith(("ForCausalLM", "LMHeadModel"))
    model_type = content.pop("model_type", None) or getattr(getattr(cls, "config_class", None), "model_type", "")
    whole = AutoConfig.for_model(model_type, **content)
    config = whole.get_text_config()
    config._attn_implementation = IMPLEMENTATION
    config.use_cache = False
    if not is_causal:  # the language model of one of several parts
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UnsupportedArchitectureError(f"{name} has a language model that transformers does not have alone")
        config.tie_word_embeddings = whole.tie_word_embeddings
        cls = AutoModelForCausalLM._model_mapping[type(config)]
    try:
        with _NoLargeTensors() if has_buffers else torch.device("meta"), no_init_weights(), _meta_parameters():
            model = cls._from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.float32)
    except (KeyError, ValueError) as error:  # it chooses among implementations that it knows by name
        if getattr(cls, "_supports_attention_backend", False):
            raise
        raise UnsupportedArchitectureError(f"{cls.__name__} {OWN_ATTENTION}") from error
    model.set_experts_implementation(IMPLEMENTATION)
    for module in model.modules():
        if type(module).__name__ in _EXPERTS_OF_THEIR_OWN:
            _EXPERTS_OF_THEIR_OWN[type(module).__name__](module)
    return model.eval()


def _checked(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that describe the model, without those that choose code or storage.

    Raises `ValueError` for numbers of layers or experts that no model has: modules of each would be made.
    """
    for name, value in content.items():
        is_count = name in ("n_layer", "n_layers", "num_layers") or name.startswith("num_") or "experts" in name
        if is_count and isinstance(value, int) and value > MAX_MODULES:
            raise ValueError(f"{name} is {value}; at most {MAX_MODULES:,} can be read")
    from transformers import PretrainedConfig

    content = PretrainedConfig._decode_special_floats(content)  # infinity is no JSON
    ignored = {"auto_map", "quantization_config"}
    return {name: value for name, value in content.items() if name not in ignored and not name.startswith("_")}


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Move every parameter that this thread makes to the meta device as soon as it is registered."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module itself and the buffers that checkpoints have, such as biases of routers."""
    buffers = {
        name: buffer for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }  # fmt: skip
    return {**dict(module.named_parameters(recurse=False)), **buffers}


def _find_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Find the list of decoder layers, by its length; of several the outermost."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise UnsupportedArchitectureError(f"{_name(model)} has no list of {count} layers")
    return min(lists, key=lambda item: item[0].count("."))


def _name(model: Any) -> str:
    return type(model).__name__


# ---- what `transformers` calls ----


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a module of `transformers`; query [1, Hq, T, D] -> [1, T, Hq, Dv]."""
    bindings: Bindings = module.__dict__["flexgen_helm_bindings"]
    assert bindings.attend is not None
    mask = attention_mask if isinstance(attention_mask, Mask) else Mask(is_causal=attention_mask is None)
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        mask = Mask(is_causal=False)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = bindings.attend(AttentionCall(q, k, v, mask, scale, softcap, s_aux, key))
    return out.contiguous().unsqueeze(0), None


def _mask(*, mask_function: Any = None, local_size: int | None = None, q_length: int = 0, **others: Any) -> Mask:
    """Say which mask is meant. No mask is made: every prompt of a batch has its own."""
    windows = [None] if local_size is None else [Window(local_size), Window(local_size, is_chunked=True)]
    if mask_function is None or not checks_masks.get():
        return Mask(windows[0])
    fitting = (window for window in windows if _is_causal_window(mask_function, window))
    return next((Mask(window) for window in fitting), Mask(is_causal=False))


def _is_causal_window(mask_function: Any, window: Window | None) -> bool:
    """Whether a mask function is that of causal attention over a window, tried at some positions around its edge."""
    reach = 64 if window is None else window.tokens
    zero = torch.tensor(0)
    for query in {1, 5, reach - 1, reach, reach + 1, reach + 3, 2 * reach + 1}:
        for key in {0, 1, query - reach - 1, query - reach, query - reach + 1, query - 1, query, query + 1}:
            if query < 0 or key < 0:
                continue
            expected = key <= query and (window is None or key >= window.oldest(query))
            if bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key))) != expected:
                return False
    return True


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    bindings: Bindings = module.__dict__["flexgen_helm_bindings"]
    assert bindings.run_experts is not None
    return bindings.run_experts(ExpertsCall(module, hidden_states, top_k_index, top_k_weights))


def _let_llama4_select(block: Any) -> None:
    """Let a Llama 4 block name the experts of each token; its own code passes every token through all of them."""
    experts = block.experts
    experts.is_transposed, experts.has_gate, experts.has_bias, experts.has_post_expert_norm = True, True, False, False

    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * experts.act_fn(gate)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        bindings: Bindings = block.__dict__["flexgen_helm_bindings"]
        assert bindings.run_experts is not None
        x = hidden_states.reshape(-1, block.hidden_dim)
        scores, logits = block.router(x)
        selected = logits.topk(block.top_k, dim=1).indices
        call = ExpertsCall(experts, x, selected, scores.gather(1, selected), weighs_input=True)
        routed = bindings.run_experts(call)
        return block.shared_expert(x) + routed, logits

    experts._apply_gate, block.forward = apply_gate, forward


# Classes that compute experts outside of `transformers`' experts interface.
_EXPERTS_OF_THEIR_OWN: Mapping[str, Callable[[Any], None]] = {"Llama4TextMoe": _let_llama4_select}
