"""Modules that keep a state of each sequence: linear attention, Mamba, short convolutions.

Such a module must see each sequence alone. So it runs once for each prompt of a batch, and once for
all sequences that decode, with the states before. Its linear layers are used once for all tokens,
because their weights may be streamed:

    all tokens     linear layers of its input
    each group     the module, with what these gave; states before -> states behind
    all tokens     the linear layer of its output

What modules ask of a cache, and how states change, is `transformers`' own code
(`LinearAttentionLayer`). Some modules drop the states before when they are given several tokens
(Jamba): these are given the tokens one after the other.

Shapes: T tokens, t of them, B sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexgen_helm.models.decoder import StateGroup
from flexgen_helm.models.transformers_backend.config import Mixer, SequenceState
from flexgen_helm.models.transformers_backend.layer_arguments import CacheStandIn

# States that one module may have of each kind.
_MAX_STATES = 8


class StateCache(CacheStandIn):
    """Stands for the cache of one module that keeps states, for B sequences."""

    def __init__(self, positions: Tensor, on_state: Callable[[], None] = lambda: None) -> None:
        """on_state: called whenever a state is asked for."""
        from transformers.cache_utils import LinearAttentionLayer

        super().__init__(positions)
        self._layer: Any = LinearAttentionLayer(number_of_states=_MAX_STATES)
        self._on_state = on_state

    def begin(
        self, kept: Sequence[SequenceState], states: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        """Begin with these states, each [B, elements]; dtype: of convolutions' inputs."""
        layer = self._layer
        for state, flat in zip(kept, states):
            values = flat.reshape(len(flat), *state.shape)
            layer.has_previous_state[state.number] = True
            getattr(layer, f"is_{state.kind}_states_initialized")[state.number] = True
            if state.kind == "conv":
                layer.conv_kernel_size[state.number] = state.shape[-1]
                values = values.to(dtype)
            getattr(layer, f"{state.kind}_states")[state.number] = values.clone()

    def kept_states(self) -> list[tuple[SequenceState, Tensor]]:
        """Return the states that the module keeps, each [B, …]."""
        kinds: tuple[Literal["conv", "recurrent"], ...] = ("conv", "recurrent")
        return [
            (SequenceState(kind, number, tuple(values.shape[1:])), values)
            for kind in kinds
            for number, values in getattr(self._layer, f"{kind}_states").items()
            if values is not None
        ]

    def states(self) -> Tensor:
        """Return all states [B, elements] in float32."""
        return torch.cat([values.float().flatten(1) for _, values in self.kept_states()], 1)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self._previous(self._layer.conv_states, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self._previous(self._layer.recurrent_states, state_idx)

    def _previous(self, states: Any, number: int) -> Any:
        self._on_state()
        return states[number] if self._layer.has_previous_state[number] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> Any:
        self._on_state()
        return self._layer.update_conv_state(conv_states, state_idx, **named)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> Any:
        self._on_state()
        return self._layer.update_recurrent_state(recurrent_states, state_idx, **named)

    def get_linear_cache(self, layer_idx: int) -> Any:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # ---- as transformers 5.20 asks ----

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        self._on_state()
        return any(self._layer.has_previous_state.values())

    @property
    def layers(self) -> StateCache:
        return self

    def __getitem__(self, layer_idx: int) -> Any:
        return self._layer


class MixerRunner:
    """One module that keeps states, called with all tokens of a batch.

    module: the decoder calls `forward` of this object in place of the module's.
    """

    def __init__(self, mixer: Mixer, module: nn.Module) -> None:
        self.mixer = mixer
        self._forward: Callable[..., Any] = module.forward
        self._projected: dict[str, Tensor] = {}
        self._group: StateGroup | None = None

    def linear(self, path: str, x: Tensor, product: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Return what a linear layer gives for the group that runs; x for the module's output.

        Without a group it is `product`, which computes it for all tokens.
        """
        if self._group is None:
            return product(path, x)
        return x if path == self.mixer.output else _of_group(self._projected[path], self._group)

    def forward(
        self,
        groups: Iterable[StateGroup],
        product: Callable[[str, Tensor], Tensor],
        positional: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return what the module gives for hidden states [1, T, H].

        positional, named: what it was called with; the first tensor are the hidden states.
        """
        hidden = next(iter((*positional, *named.values())))
        self._projected = {path: product(path, hidden) for path in self.mixer.inputs}
        out: Tensor | None = None
        other_results: list[Any] = []  # of the module, such as the state
        try:
            for group in _token_by_token(groups) if self.mixer.one_by_one else groups:
                returned = self._run_group(group, hidden, positional, named)
                part, *other_results = returned if isinstance(returned, tuple) else (returned,)
                part = part.flatten(0, 1)
                if out is None:
                    out = part.new_empty((hidden.shape[1], part.shape[1]))
                out[group.tokens] = part
        finally:
            self._group, self._projected = None, {}
        assert out is not None
        out = product(self.mixer.output, out[None]) if self.mixer.output else out[None]
        return (out, *[None] * len(other_results)) if other_results else out

    def _run_group(
        self,
        group: StateGroup,
        hidden: Tensor,
        positional: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Any:
        """Return what the module gives for one group, and keep the group's states.

        The group is passed a cache, and its tokens' part of what belongs to tokens.
        """
        self._group = group
        cache = StateCache(torch.zeros((1, 1), dtype=torch.long, device=hidden.device))
        if group.states is not None:
            states = group.states.split(self.mixer.sizes, 1)
            cache.begin(self.mixer.states, states, hidden.dtype)

        def part_of(value: Any) -> Any:
            if isinstance(value, CacheStandIn):
                return cache
            is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == hidden.shape[:2]
            return _of_group(value, group) if is_of_tokens else value

        named_parts = {
            # a group has no padding, so nothing is masked
            name: None if name == "attention_mask" else part_of(value)
            for name, value in named.items()
        }
        returned = self._forward(*map(part_of, positional), **named_parts)
        group.keep(cache.states())
        return returned


def _token_by_token(groups: Iterable[StateGroup]) -> Iterator[StateGroup]:
    """Divide groups of several tokens that go on from a state into groups of a token each."""
    divided = []
    for group in groups:
        if group.states is None or group.one_each:
            yield group
        elif group.is_prefix:  # groups that come later go on from its state
            yield from _steps([group])
        else:
            divided.append(group)
    yield from _steps(divided)


def _steps(groups: Sequence[StateGroup]) -> Iterator[StateGroup]:
    """Yield a group for each step: a token of each sequence that still has one.

    States are updated in place, and handed to each sequence's `keep` at the end.
    """
    if not groups:
        return
    # The longest come first, so the sequences that have a token of a step are the first ones.
    groups = sorted(groups, key=lambda group: group.tokens.stop - group.tokens.start, reverse=True)
    tokens = [range(group.tokens.start, group.tokens.stop) for group in groups]
    states = torch.cat([group.states for group in groups if group.states is not None])
    for step in range(len(tokens[0])):
        rows = [row[step] for row in tokens if step < len(row)]
        step_states = states[: len(rows)]
        tokens_of_step = torch.tensor(rows, device=states.device)
        yield StateGroup(tokens_of_step, True, step_states, step_states.copy_)
    for index, group in enumerate(groups):
        group.keep(states[index : index + 1])


def _of_group(value: Tensor, group: StateGroup) -> Tensor:
    """Return the group's part of [1, T, …]: [1, t, …] of one sequence, or [B, 1, …]."""
    part = value[:, group.tokens]
    return part.transpose(0, 1) if group.one_each else part
