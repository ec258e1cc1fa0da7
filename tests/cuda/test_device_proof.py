"""A GPU with a fault: a model that differs there is refused, a kernel that differs is left out by
name.
"""

import json
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.engine.kernel_checks import compare_kernels
from flexgen_helm.errors import UnprovedModelError
from flexgen_helm.hardware.fast_paths import ATTENTION, TRITON, switched_off
from flexgen_helm.offload.copy_engine import CudaCopyEngine
from flexgen_helm.progress import Message, ProgressPhase, observed_by
from flexgen_helm.quant.block_formats import BLOCK_FORMATS
from flexgen_helm.quant.precisions import PRECISIONS, PublishedFormats
from tests.cuda import device as fake
from tests.cuda.engine_runs import LIMITS, requests
from tests.helpers import triton_stand_in


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home folder in which nothing is proved, and a process that leaves nothing out."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    switched_off.clear()
    yield tmp_path / "home"
    switched_off.clear()


def answer(path, **settings):
    """Answer on the device; return what was said, the tokens and scores of the results, and the
    record.
    """
    events = []
    with (
        fake.cuda_in_host_memory(is_proved=False) as device,
        observed_by(events.append),
        Engine.from_pretrained(path, device="cuda", limits=LIMITS, **settings) as engine,
    ):
        results = engine.run(requests())
    device.check()
    said = [event.text for event in events if isinstance(event, Message) and "slower" in event.text]
    proofs = [
        event for event in events if isinstance(event, ProgressPhase) and event.name == "prove"
    ]
    tokens = [[*result.prompt_token_ids, *result.completions[0].token_ids] for result in results]
    scores = [[*result.prompt_logprobs[1:], *result.completions[0].logprobs] for result in results]
    return said, len(proofs), (tokens, scores), engine.last_run


def error_of(path, tokens, scores, precision):
    """Largest difference of a score to the host's in the same precision."""
    asked = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in tokens
    ]
    with Engine.from_pretrained(path, device="cpu", precision=precision) as engine:
        known = [result.prompt_logprobs[1:] for result in engine.run(asked)]
    return max(
        abs(a - b) for row, exact in zip(scores, known) for a, b in zip(row, exact, strict=True)
    )


def spoil_triton(patch):
    honest = triton_stand_in.run

    def wrong(launch, packed, out, *rest):
        honest(launch, packed, out, *rest)
        out.mul_(1.01)

    patch.setattr(triton_stand_in, "run", wrong)


def spoil_attention(patch):
    def wrong(honest):
        def kernel(q, *rest, **named):
            out, *others = honest(q, *rest, **named)
            return out * 1.05, *others

        return kernel

    patch.setattr(fake, "KERNELS", {name: wrong(honest) for name, honest in fake.KERNELS.items()})


def break_attention(patch):
    def broken(*_, **__):
        raise RuntimeError("no such operator\nin this release")

    patch.setattr(fake, "KERNELS", dict.fromkeys(fake.KERNELS, broken))


FAULTS = {
    spoil_triton: (TRITON, "a dequantized matrix has wrong bits"),
    spoil_attention: (ATTENTION, "wrong by 0.05"),
    break_attention: (ATTENTION, "RuntimeError: no such operator"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_differs_is_left_out_by_name_and_numbers_are_right(tiny, monkeypatch, fault):
    name, reason = FAULTS[fault]
    fault(monkeypatch)
    said, _, (tokens, scores), record = answer(tiny("llama").path, precision="4bit-weights")
    (message,) = said
    assert name in message and reason in message
    assert list(record["hardware"]["switched_off"]) == [name] and record["proved"] is True
    assert error_of(tiny("llama").path, tokens, scores, "4bit-weights") < 5e-2


def test_published_types_of_a_model_are_compared_too(monkeypatch):
    spoil_triton(monkeypatch)
    published = PublishedFormats(
        MappingProxyType({"model.layers.0.mlp.up_proj.weight": BLOCK_FORMATS["Q4_K"]})
    )
    with fake.cuda_in_host_memory(is_proved=False):
        precision = replace(PRECISIONS["fp16"], published=published)
        compare_kernels(torch.device("cuda", 0), torch.float16, precision, 64)
    assert TRITON in switched_off


def test_a_device_without_a_fault_is_proved_once(tiny, home):
    for expected in (1, 0):
        said, proofs, _, record = answer(tiny("llama").path)
        assert proofs == expected and not said and record["proved"] is True
        assert record["hardware"]["switched_off"] == {}
    (known,) = json.loads((home / "proofs.json").read_text()).items()
    assert known[1]["difference"] < 1e-3


def test_copies_that_arrive_wrong_refuse_the_model(tiny, home, monkeypatch):
    copy = CudaCopyEngine._copy

    def wrong(self, source, target):
        copy(self, source, target)
        if target.is_cuda and target.dtype == torch.float16 and target.dim() == 2:
            target.mul_(1.1)
        return target

    monkeypatch.setattr(CudaCopyEngine, "_copy", wrong)
    with pytest.raises(
        UnprovedModelError,
        match=("on this GPU: .* differs from transformers.* --device cpu.*--unverified"),
    ):
        answer(tiny("llama").path)
    assert not (home / "proofs.json").exists()


def test_unverified_proves_nothing_and_says_so(tiny, home):
    _, proofs, _, record = answer(tiny("llama").path, unverified=True)
    assert proofs == 0 and record["proved"] is False and not (home / "proofs.json").exists()
