"""Changes to modules of `transformers`, so that a layer is one call of attention and of experts.

Attention is over latents instead of expanded keys, and over all keys; experts are named for each
token.

Shapes: T tokens, Hq query heads, Dv elements of a head's value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexgen_helm.models.transformers_backend.interfaces import Bindings, ExpertsCall


def adapt(module: Any) -> None:
    """Change what a module of one of these kinds does; leave all other modules.

    The context of a model with indexers ends where they would leave keys out (`read_config`).
    """
    # `indexer` is None where a layer reuses an earlier layer's selection.
    if "indexer" in {*module._modules, *module.__dict__}:
        module._modules.pop("indexer", None)
        module.__dict__["indexer"] = _select_all
    if hasattr(module, "expand_kv") and module.kv_b_proj.bias is None:
        module.__dict__["flexgen_helm_latents"] = Latents(module)
    # Llama 4 computes its experts without `transformers`' experts interface.
    if type(module).__name__ == "Llama4TextMoe":
        _let_llama4_select(module)


class Latents:
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
