"""The functions that `transformers` calls for attention, masks and experts, and what they call.

They ask the bindings of the module that calls them, which the caller of a layer sets.

Shapes: T tokens, H hidden size, Hq query heads, Hk key heads, D and Dv elements of a head, K
    experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.config import Window

# Name by which `transformers` knows our attention, masks and experts.
IMPLEMENTATION = "flexgen_helm"
# Whether requests of modules are checked: in the trace of a model, of one sequence.
checks_requests: ContextVar[bool] = ContextVar("checks_requests", default=False)
# Tensors that modules may also pass to attention: sinks, and positions, by which queries and keys
# have been rotated already.
_TENSOR_OPTIONS = {"s_aux", "position_ids"}


@dataclass(frozen=True)
class Mask:
    """Stands for an attention mask.

    window: that a query sees; None for all earlier positions.
    is_causal: False for a mask that is neither causal nor over a causal window.
    shape: that the mask would have.
    """

    window: Window | None = None
    is_causal: bool = True
    shape: tuple[int, ...] = ()

    def size(self) -> tuple[int, ...]:
        return self.shape

    def __getitem__(self, rows: Any) -> Mask:
        """Return what is meant for some of the queries (Gemma 4 takes all of them so)."""
        return self


@dataclass
class AttentionCall:
    """What a module asks of attention: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv].

    scale: factor on scores.
    softcap: scores become cap tanh(score / cap).
    sinks: [Hq], logits that take a share of the softmax and have no value.
    key_object: the tensor object that the module passed, by which `read_config` sees that a later
        layer uses it again.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    key_object: Tensor | None = None


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

    @property
    def path(self) -> str:
        """Of the module within its layer."""
        path: str = self.module.__dict__["flexgen_helm_path"]
        return path


@dataclass
class Bindings:
    """What modules call while a layer runs."""

    attend: Callable[[AttentionCall], Tensor] | None = None
    run_experts: Callable[[ExpertsCall], Tensor] | None = None


def register_with_transformers() -> None:
    """Let `transformers` know our attention, masks and experts by `IMPLEMENTATION`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def is_plain(value: Any) -> bool:
    """Whether a value is None, a bool, a number or a text, which cannot depend on tokens."""
    return value is None or isinstance(value, (bool, int, float, str))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention of a module of `transformers`; query [1, Hq, T, D] -> [1, T, Hq, Dv]."""
    bindings: Bindings = module.__dict__["flexgen_helm_bindings"]
    assert bindings.attend is not None
    if checks_requests.get():
        unknown = [
            name
            for name, option in options.items()
            if not is_plain(option) and name not in _TENSOR_OPTIONS
        ]
        if unknown:
            raise UnsupportedArchitectureError(
                f"{type(module).__name__} passes {unknown[0]} to attention"
            )
    mask = attention_mask
    if not isinstance(mask, Mask):
        says_causal = (
            options.get("is_causal") is not False
            and getattr(module, "is_causal", True) is not False
        )
        mask = Mask(is_causal=mask is None and says_causal)
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    latents = module.__dict__.get("flexgen_helm_latents")  # `Latents` of module_adaptations
    if latents is not None:
        query = latents.queries(query)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    out = bindings.attend(
        AttentionCall(q, k, v, mask, scale, options.get("softcap"), options.get("s_aux"), key)
    )
    if latents is not None:
        out = latents.outputs(out)
    return out.contiguous().unsqueeze(0), None


def _mask(*, mask_function: Any = None, local_size: int | None = None, **sizes: Any) -> Mask:
    """Say which mask is meant. No mask is made: every prompt of a batch has its own."""
    windows: list[Window | None] = (
        [None] if local_size is None else [Window(local_size), Window(local_size, is_chunked=True)]
    )
    shape = sizes.get("batch_size", 1), 1, sizes.get("q_length", 0), sizes.get("kv_length", 0)
    if mask_function is None or not checks_requests.get():
        # Any will do: nothing but the trace reads the window of a mask.
        return Mask(windows[0], shape=shape)
    fitting = (window for window in windows if _is_causal_window(mask_function, window))
    return next((Mask(window, shape=shape) for window in fitting), Mask(is_causal=False))


def _is_causal_window(mask_function: Any, window: Window | None) -> bool:
    """Whether a mask function is that of causal attention over a window, tried at some positions
    around its edge.
    """
    reach = 64 if window is None else window.tokens
    zero = torch.tensor(0)
    return all(
        bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))
        == (key <= query and (window is None or key >= window.oldest(query)))
        for query in {1, 5, reach - 1, reach, reach + 1, reach + 3, 2 * reach + 1}
        for key in {
            0,
            1,
            query - reach - 1,
            query - reach,
            query - reach + 1,
            query - 1,
            query,
            query + 1,
        }
        if query >= 0 and key >= 0
    )


def _experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    bindings: Bindings = module.__dict__["flexgen_helm_bindings"]
    assert bindings.run_experts is not None
    return bindings.run_experts(ExpertsCall(module, hidden_states, top_k_index, top_k_weights))
