"""A mixture's layer against one token at a time in float64, and the order in which experts are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.decoder import Decoder, StageWeights
from tests.helpers.planning_problems import config

HIDDEN, INNER = 8, 5


class Weights(StageWeights):
    """Random weights in float64, and what the layer asks of them."""

    repeatable = True

    def __init__(self, experts: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

        self.matrices = {"mlp.router": random(experts, HIDDEN)}
        for expert in range(experts):
            for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                self.matrices[f"mlp.experts.{expert}.{name}"] = random(*shape)
        self.asked: list[list[int]] = []
        self.products: list[str] = []

    def use_experts(self, experts: Sequence[int]) -> None:
        assert not self.products[1:], "asked before the first product with an expert"
        self.asked.append(list(experts))

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.products.append(name)
        return x @ self.matrices[name].T

    def vector(self, name: str) -> torch.Tensor | None:
        return torch.ones(HIDDEN, dtype=torch.float64)

    def lookup(self, name: str, rows: object) -> torch.Tensor:
        raise AssertionError


def one_token(weights: Weights, moe: MoEConfig, x: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
    shares = torch.softmax((weights.matrices["mlp.router"] @ x).float(), 0)
    chosen = sorted(range(moe.count), key=lambda expert: -float(shares[expert]))[: moe.per_token]
    total = sum(float(shares[expert]) for expert in chosen) if moe.normalize else 1.0
    out = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert in chosen:
        gate, up, down = (weights.matrices[f"mlp.experts.{expert}.{name}"] for name in ("gate", "up", "down"))
        out += float(shares[expert]) / total * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    return out, set(chosen)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12), per_token=st.integers(1, 4), tokens=st.integers(1, 20), normalize=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_tokens_sorted_by_expert_give_what_each_token_gives_alone(count, per_token, tokens, normalize, seed):
    moe = MoEConfig(count, min(count, per_token), INNER, normalize)
    decoder = Decoder(config("qwen3-30b-a3b"), torch.device("cpu"), torch.float64)
    weights = Weights(count, seed)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out = decoder._moe(weights, moe, x.clone())
    expected, used = zip(*(one_token(weights, moe, row) for row in x))
    assert torch.allclose(out, torch.stack(expected), atol=1e-5)
    experts = sorted(set().union(*used))
    assert weights.asked == [experts]
    names = ("gate", "up", "down")
    assert weights.products == ["mlp.router", *(f"mlp.experts.{e}.{name}" for e in experts for name in names)]
