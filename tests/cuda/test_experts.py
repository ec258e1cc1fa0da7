"""Launches of experts that rest on the device: what is no product takes one for all experts of a
layer.
"""

import pytest
import torch

from flexgen_helm import GenerationRequest
from flexgen_helm.models import routing
from flexgen_helm.models.routing import RoutedTokens
from flexgen_helm.offload.weights import TieredWeights
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import PLACEMENTS, assert_close, run
from tests.helpers.backend_models import saved
from tests.helpers.tiny_models import TinyModel, config_like_llama, save_random

EXPERTS = dict(num_experts_per_tok=4)


def gpt_oss(folder):
    """By modules: biases, and matrices that the state dict has transposed."""
    return saved("GptOssForCausalLM", folder, num_local_experts=128, **EXPERTS)


def qwen3_moe(folder):
    """By equations."""
    sizes = dict(
        num_experts=128, moe_intermediate_size=24, norm_topk_prob=True, head_dim=16, **EXPERTS
    )
    return save_random(folder, config_like_llama("Qwen3MoeConfig", **sizes), seed=0)


# Launches of a layer's mixture, (for each expert, besides): by products with stacks of matrices, as
# a GPU of compute capability 9 multiplies in bfloat16; with all experts at once; one after the
# other.
LAUNCHES = {
    gpt_oss: {"stacks": (0, 42), "at once": (2, 38), "one by one": (14, 13)},
    qwen3_moe: {"stacks": (0, 38), "at once": (3, 31), "one by one": (9, 13)},
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("way", ["stacks", "at once", "one by one"])
@pytest.mark.parametrize("build", LAUNCHES)
def test_launches_of_a_mixture(tmp_path, monkeypatch, build, way):
    """Of a prompt, and of decode steps."""
    model, honest, counted = TinyModel(tmp_path, build(tmp_path)), routing.through_experts, []
    dtype = torch.float32
    if way == "one by one":
        monkeypatch.setattr(TieredWeights, "holds_experts", lambda *_: False)
    vocabulary = model.reference.config.vocab_size - 4
    prompt = [(7 * i * i + 3) % vocabulary for i in range(50)]
    with cuda_in_host_memory() as device, monkeypatch.context() as patch:
        if way == "stacks":
            dtype = torch.bfloat16
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

        def counting(batches, announce):
            used = []
            before = sum(device.kernels.values())
            out = honest(batches, lambda numbers, _: used.extend(numbers))
            counted.append((len(used), sum(device.kernels.values()) - before))
            return out

        patch.setattr(routing, "through_experts", counting)
        asked = [
            GenerationRequest(
                prompt_token_ids=prompt, max_tokens=3, echo_logprobs=True, ignore_eos=True
            )
        ]
        results, _ = run(tmp_path, asked, dtype, precision="fp16")
    device.check()
    assert_close(model, results, dtype)
    of_expert, beside = LAUNCHES[build][way]
    assert len({used for used, _ in counted}) > 1
    assert [launches for _, launches in counted] == [
        of_expert * used + beside for used, _ in counted
    ]


@pytest.mark.parametrize(
    "dtype, capability, settings",
    [
        (torch.bfloat16, (8, 9), {}),  # PyTorch would loop there, and wait
        (torch.float16, (9, 0), {}),
        (torch.bfloat16, (9, 0), dict(policy=PLACEMENTS["thirds"], schedule="zigzag")),
    ],
)
def test_no_stacks_where_one_kernel_does_not_take_them(
    tmp_path, monkeypatch, dtype, capability, settings
):
    """An inverse of the above; offloaded experts lie in slots."""
    qwen3_moe(tmp_path)
    with cuda_in_host_memory() as device, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.nn.functional, "grouped_mm", None)
        asked = [GenerationRequest(prompt_token_ids=[*range(3, 40)], max_tokens=2)]
        run(tmp_path, asked, dtype, precision="fp16", **settings)
    device.check()


def sums(at_once, rows=4096, is_reversed=False):
    """Results of 40 tokens in float16 by experts that scale; reversed: the experts are numbered
    from the last.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn((40, 8), generator=random).half()
    selected = torch.rand((40, 16), generator=random).topk(5).indices
    factors = 1 + torch.rand(16, generator=random).half()
    if is_reversed:
        selected, factors = 15 - selected, factors.flip(0)

    def experts(experts, x):
        return torch.cat(
            [
                part * factors[number]
                for number, part in zip(experts.sizes, x.split([*experts.sizes.values()]))
            ]
        )

    weights = torch.rand((40, 5), generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_EXPERT_ROWS", rows)
        return routing.through_experts(
            [RoutedTokens(x, selected, weights, 16, experts, at_once)], lambda *_: None
        )[0]


@pytest.mark.parametrize("rows", [4096, 17, 3, 1])
def test_sums_of_a_token_are_in_the_order_of_expert_numbers(rows):
    """However the sorted rows are divided."""
    assert torch.equal(sums(True, rows), sums(False))
    assert not torch.equal(sums(True, rows), sums(True, rows, is_reversed=True))
