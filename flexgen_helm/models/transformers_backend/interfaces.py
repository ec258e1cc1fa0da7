"""What `transformers` calls for attention, masks, and experts, and what it is passed on as.

The functions here ask the bindings of the module that calls them, which the caller of a layer sets.

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
# Whether what models ask for is looked at closely: once for each model, with one sequence.
is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)
# Tensors that modules may pass to attention besides: sinks, and positions, which are in the rotated
# queries and keys.
_KNOWN = {"s_aux", "position_ids"}


@dataclass(frozen=True)
class Mask:
    """Stands for an attention mask: causal, over a window; None for all earlier positions.

    is_causal: False for any other mask.
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

    scale: factor on scores. softcap: scores become cap tanh(score / cap). sinks: [Hq], logits that
    take a share of the softmax and have no value.
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


def register() -> None:
    """Let `transformers` know our attention, masks and experts by `IMPLEMENTATION`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def is_plain(value: Any) -> bool:
    """Whether a value that is passed on can change nothing that depends on tokens: no tensor, and
    no object.
    """
    return value is None or isinstance(value, (bool, int, float, str))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention of a module of `transformers`; query [1, Hq, T, D] -> [1, T, Hq, Dv]."""
    bindings: Bindings = module.__dict__["flexgen_helm_bindings"]
    assert bindings.attend is not None
    if is_traced.get():
        unknown = [
            name for name, option in options.items() if not is_plain(option) and name not in _KNOWN
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
    latents: _Latents | None = module.__dict__.get("flexgen_helm_latents")
    if latents is not None:
        query = latents.queries(query)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    out = bindings.attend(
        AttentionCall(q, k, v, mask, scale, options.get("softcap"), options.get("s_aux"), key)
    )
    if latents is not None:
        out = latents.outputs(out)
    return out.contiguous().unsqueeze(0), None


class _Latents:
    """Attention over latents, of which the keys and values of all heads are products (DeepSeek-V2,
    section 2.1.2).

    The score of a head is q·(U c) = (Uᵀ q)·c, and its output Σ p (V c) = V (Σ p c), with p the
    softmax of scores. So U and V are applied to queries and to outputs, and the cache has one head:
    the latent c and the rotated elements.

    attention: a module of `transformers` that expands latents by its method `expand_kv`.
    """

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        attention.expand_kv = lambda latent, rotated: (torch.cat((latent, rotated), dim=-1), latent)

    def queries(self, q: Tensor) -> Tensor:
        """q [1, Hq, T, plain + rotated] -> [1, Hq, T, rank + rotated]."""
        up, _ = self._factors()
        plain, rotated = q.split([up.shape[1], q.shape[-1] - up.shape[1]], dim=-1)
        return torch.cat((torch.matmul(plain, up), rotated), dim=-1)

    def outputs(self, out: Tensor) -> Tensor:
        """Latents [T, Hq, rank] -> values [T, Hq, Dv]."""
        _, up = self._factors()
        return torch.matmul(out.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return U [Hq, plain elements of a key, rank] and V [Hq, Dv, rank]."""
        attention = self._attention
        sizes = attention.qk_nope_head_dim, attention.v_head_dim
        u, v = attention.kv_b_proj.weight.view(-1, sum(sizes), attention.kv_lora_rank).split(
            sizes, dim=1
        )
        return u, v


def _mask(*, mask_function: Any = None, local_size: int | None = None, **sizes: Any) -> Mask:
    """Say which mask is meant. No mask is made: every prompt of a batch has its own."""
    windows = (
        [None] if local_size is None else [Window(local_size), Window(local_size, is_chunked=True)]
    )
    shape = sizes.get("batch_size", 1), 1, sizes.get("q_length", 0), sizes.get("kv_length", 0)
    if mask_function is None or not is_traced.get():
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


def _let_llama4_select(block: Any) -> None:
    """Let a Llama 4 block name the experts of each token; its own code passes every token through
    all of them.
    """
    experts = block.experts
    experts.is_transposed = True
    experts.has_gate = True
    experts.has_bias = False
    experts.has_post_expert_norm = False

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


def _select_all(*positional: Any, **named: Any) -> None:
    """Stand for an indexer, which selects all keys as long as there are no more than
    `index_topk`.
    """


def adapt(module: Any) -> None:
    """Let a module attend to latents instead of expanding them, and to all keys, and name the
    experts that it selects.

    The context of a model with indexers ends where they would leave keys out (`read_config`).
    """
    # `indexer` is None where a layer reuses an earlier layer's selection.
    if "indexer" in {*module._modules, *module.__dict__}:
        module._modules.pop("indexer", None)
        module.__dict__["indexer"] = _select_all
    if hasattr(module, "expand_kv") and module.kv_b_proj.bias is None:
        module.__dict__["flexgen_helm_latents"] = _Latents(module)
    # Llama 4 computes its experts without `transformers`' experts interface.
    if type(module).__name__ == "Llama4TextMoe":
        _let_llama4_select(module)
