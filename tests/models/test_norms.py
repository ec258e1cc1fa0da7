"""Root-mean-square norms: the native one, and those of `transformers` that it stands in for."""

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from flexgen_helm.kernels.layer_rows import rms_norm
from flexgen_helm.models.transformers_backend.rms_norms import rms_norm_of

SIZE, EPS = 48, 1e-5


def random_rows(seed, *shape, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_one_is_added_before_the_weight_is_rounded():
    # lost if it is added to 1 in 16 bits
    weight = torch.full((SIZE,), 2.0**-9, dtype=torch.bfloat16)
    x = random_rows(0, 1, SIZE, scale=100).to(torch.bfloat16)
    rows = x.double()
    exact = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + 1)
    found = rms_norm(x, weight, EPS, plus_one=True).double()
    torch.testing.assert_close(found, exact.to(torch.bfloat16).double(), rtol=0, atol=0)
    assert not torch.equal(rms_norm(x, weight + 1.0, EPS, plus_one=False).double(), found)


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma3RMSNorm, Qwen3NextRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_transformers_are_recognized(norm, dtype):
    module = norm(SIZE, eps=EPS).to(dtype)
    module.weight = nn.Parameter(random_rows(0, SIZE).to(dtype))
    x = random_rows(1, 1, 5, SIZE).to(dtype)
    found = rms_norm_of(module)
    assert found is not None
    torch.testing.assert_close(
        found(x), module(x), rtol=2e-6 if dtype == torch.float32 else 2**-9, atol=1e-6
    )


def test_weights_that_stay_in_float32_do_so():
    module = LlamaRMSNorm(SIZE, eps=EPS)
    x, found = random_rows(1, 1, 5, SIZE).bfloat16(), rms_norm_of(module)
    assert found is not None
    assert torch.equal(found(x), module(x))


class _ScaledInput(LlamaRMSNorm):
    """Differs only where `eps` matters."""

    def forward(self, hidden_states):
        return super().forward(hidden_states * (1 + 1e-3))


class _Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(SIZE),
        nn.Linear(SIZE, SIZE),
        CohereLayerNorm(SIZE),
        Llama4TextL2Norm(),
        Qwen3NextRMSNormGated(SIZE),
        _ScaledInput(SIZE, eps=EPS),
        _Doubled(SIZE, eps=EPS),
    ],
    ids=lambda module: type(module).__name__,
)
def test_further_modules_stay_as_they_are(module):
    assert rms_norm_of(module) is None
