"""What a pass asks of the host: one synchronization a batch beside those of copies, no pageable
copy, few kernels.

`test_engine.py` counts the same for precisions and placements, whose values it compares.
"""

from collections import Counter

import pytest
import torch

from flexgen_helm import GenerationRequest
from flexgen_helm.quant.precisions import PRECISIONS
from tests.cuda.counts import check, counted
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import PLACEMENTS, assert_close, requests, run
from tests.helpers.backend_models import saved
from tests.helpers.layers import replace_layers
from tests.helpers.tiny_models import VARIANTS


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "variant, capability",
    [("llama", (7, 5)), ("opt", (8, 0)), ("bloom", (7, 5)), ("gemma2", (8, 0))],
)
def test_a_batch_waits_once(tiny, monkeypatch, variant, capability):
    """Scored, drawn by nucleus and without, several completions over a shared prompt."""
    asked = requests(4, shared=20, temperature=0.8, top_p=0.9) + requests(3, temperature=1.0)
    with cuda_in_host_memory() as device, counted(device) as counts:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        results, _ = run(tiny(variant).path, asked, torch.float16)
        monkeypatch.undo()
    device.check()
    check(counts)
    assert_close(tiny(variant), results, torch.float16)


@pytest.mark.fast(2)
@pytest.mark.parametrize("placement", ["resident", "disk", "experts on disk"])
def test_a_layer_with_experts_waits_once_more(tiny, tmp_path, placement):
    """For the router's choice, which the host must know."""
    settings = dict(precision="fp16", cpu_attention=False, offload_dir=tmp_path)
    if (policy := {**PLACEMENTS, "experts on disk": "3x2,60,0,0,100,0,100"}[placement]) is not None:
        settings |= dict(policy=policy, schedule="zigzag")
    with cuda_in_host_memory() as device, counted(device) as counts:
        results, _ = run(tiny("mixtral").path, requests(4, new=3), torch.float16, **settings)
    device.check()
    layers = tiny("mixtral").reference.config.num_hidden_layers
    assert len(counts.waits) <= counts.batches * (1 + layers), Counter(counts.waits)
    assert {line.split(":")[0] for line in counts.waits} <= {
        "engine/executor.py",
        "models/routing.py",
    }, counts.waits
    assert not counts.pageable
    assert_close(tiny("mixtral"), results, torch.float16)


OUR_4BIT = PRECISIONS["4bit"]  # not with the small groups of the other tests
# Launches of a decode layer. Packed weights are dequantized by one kernel each (6 of OPT, 7 of
# Llama) before they are multiplied.
# By modules like Llama's, a layer has the norms of our records.
LAUNCHES = [
    ("opt", "fp16", 14), ("llama", "fp16", 24), ("opt", "4bit", 14), ("llama", "4bit", 24),
    ("opt", "4bit-weights", 14 + 6), ("llama", "4bit-weights", 24 + 7), ("SeedOssForCausalLM", "fp16", 28),
]  # fmt: skip
# Launches of a pass besides its layers: embedding, masks, sums that find what is not finite, and
# head.
OTHERS = 52


@pytest.mark.fast(4)
@pytest.mark.parametrize(("name", "precision", "launches"), LAUNCHES)
def test_launches_of_a_decode_step(tiny, tmp_path, monkeypatch, name, precision, launches):
    """One block of sequences. In 4 bits a step completes no group of the cache, as nearly all steps
    of large ones.
    """
    monkeypatch.setitem(PRECISIONS, "4bit", OUR_4BIT)
    if precision == "4bit-weights":  # no copies of them
        monkeypatch.setattr("flexgen_helm.planner.weight_placement.COPIES_SHARE", 0)
    path = tiny(name).path if name in VARIANTS else saved(name, tmp_path) and tmp_path
    with cuda_in_host_memory() as device, counted(device) as counts:
        run(path, requests(5, new=6, tokens=60), torch.float16, precision=precision)
    check(counts)
    assert min(counts.layers) == launches
    if name in VARIANTS and precision != "4bit-weights":
        assert min(counts.beside) <= OTHERS


# Of a decode layer with a 4-bit cache that has quantized groups, and in a step that completes one.
WITH_GROUPS, COMPLETING = 38, 133


def test_launches_of_a_decode_step_behind_quantized_groups(tiny):
    """Answers to a prompt of 40 tokens, of which every 16th completes a group."""
    asked = [GenerationRequest(prompt_token_ids=[*range(5, 45)], max_tokens=24, ignore_eos=True)]
    with cuda_in_host_memory() as device, counted(device) as counts:
        run(tiny("llama").path, asked, torch.float16, precision="4bit")
    check(counts)
    layers = tiny("llama").reference.config.num_hidden_layers
    steps = [counts.layers[i : i + layers] for i in range(0, len(counts.layers), layers)]
    # The step of token 40 comes first; tokens 47 and 63 are the last ones of their groups.
    expected = [COMPLETING if (40 + step) % 16 == 15 else WITH_GROUPS for step in range(23)]
    assert steps == [[launches] * layers for launches in expected]


def test_a_wait_in_a_layer_would_be_counted(tiny, monkeypatch):
    """The inverse: one `item()` in each layer."""

    def waiting(compute, _, batches):
        hidden = compute()
        hidden[0].sum().item()
        return hidden

    replace_layers(monkeypatch, waiting)
    with cuda_in_host_memory() as device, counted(device) as counts:
        run(tiny("opt").path, requests(2, new=2), torch.float16)
    with pytest.raises(AssertionError):
        check(counts)
