"""Every causal class of transformers that runs by its own modules gives the numbers of its own forward pass."""

from __future__ import annotations

import copy
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import ARCHITECTURES
from tests.helpers.offload import MIB
from tests.helpers.parity import TOLERANCE
from tests.helpers.tiny_causal_models import causal_classes, tiny_config

NATIVE = {name for architecture in ARCHITECTURES.values() for name in architecture.hf_names}
# Layers that keep a state, or call attention in another way than once with causal masks, by what the refusal says.
REFUSED = {
    "AXK2ForCausalLM": "cannot run layer by layer",  # sparse attention makes masks of its own
    "DbrxForCausalLM": "cannot run layer by layer",  # experts outside transformers' interface
    "DeepseekV32ForCausalLM": "cannot run layer by layer",  # sparse attention makes masks of its own
    "DeepseekV4ForCausalLM": "cannot run layer by layer",  # hidden states of several streams
    "DiffLlamaForCausalLM": "call attention 2 times",
    "DogeForCausalLM": "cannot run layer by layer",  # masks that depend on values
    "Dots3NoteForCausalLM": "cannot run layer by layer",  # sparse attention makes masks of its own
    "Gemma3nForCausalLM": "cannot run layer by layer",  # hidden states of several streams, embeddings of every layer
    "Gemma4ForCausalLM": "cannot run layer by layer",  # embeddings of every layer, layers that share a cache
    "GlmMoeDsaForCausalLM": "cannot run layer by layer",  # sparse attention makes masks of its own
    "HYV4ForCausalLM": "cannot run layer by layer",
    "HrmTextForCausalLM": "has no list of",  # layers run several times
    "JetMoeForCausalLM": "cannot run layer by layer",  # experts of attention
    "Lfm2MoeForCausalLM": "call attention 0 times",  # convolutions
    "Lfm3ForCausalLM": "call attention 0 times",
    "Llama4ForCausalLM": "cannot run layer by layer",  # masks of chunks
    "LongcatFlashForCausalLM": "has no list of",  # two attentions in a layer
    "MiniMaxForCausalLM": "call attention 0 times",  # linear attention
    "RecurrentGemmaForCausalLM": "call attention 0 times",  # recurrent layers
    "XmodForCausalLM": "cannot run layer by layer",  # adapters that are chosen by language
    "ZayaForCausalLM": "cannot run layer by layer",
}
# Models of several parts, whose language model is a class of its own in this list; one whose default config
# transformers does not read back; and one whose random model answers with the padding token, which moves positions.
OTHERS = {
    "FuyuForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GotOcr2ForConditionalGeneration", "GraniteMoeHybridForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration", "RobertaPreLayerNormForCausalLM",
}  # fmt: skip
FAST = (
    "CohereForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM", "NemotronForCausalLM",
    "RobertaForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
OFFLOADED = {
    "device": "sim",
    "limits": MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB),
    "policy": Policy(3, 2, 0.2, 0.4, 0.3, 0.4, 0.3, 0.4),
}


@cache
def supported() -> list[str]:
    """Classes that declare transformers' attention interface and have no record of ours."""
    return [
        name
        for name in causal_classes()
        if getattr(getattr(transformers, name), "_supports_attention_backend", False) and name not in NATIVE | OTHERS
    ]


def saved(name: str, folder: Path) -> Any:
    """Save a tiny random model; return it in float32, with the same values."""
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(tiny_config(name).get_text_config(), attn_implementation="eager")
    model.eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.normal_(0, 0.3).half().float())
    copy.deepcopy(model).half().save_pretrained(folder)
    return model


def requests() -> list[GenerationRequest]:
    """Prompts of mixed lengths, of which two share a beginning."""
    draw = random.Random(1)
    shared = [draw.randrange(3, 60) for _ in range(9)]
    beginnings = [(), (), (), shared, shared]
    prompts = [
        [*begin, *(draw.randrange(3, 60) for _ in range(length))]
        for begin, length in zip(beginnings, (1, 5, 12, 3, 4), strict=True)
    ]
    return [
        GenerationRequest(prompt_token_ids=own, max_tokens=4, echo_logprobs=True, ignore_eos=True) for own in prompts
    ]


def check(name: str, folder: Path) -> None:
    """Compare prompts' scores and greedy answers with the model's own forward pass, in memory and on three tiers."""
    model, asked = saved(name, folder), requests()
    for options in ({}, {**OFFLOADED, "offload_dir": folder / "tiers"}):
        with Engine.from_pretrained(folder, **options) as engine:
            assert engine.config.generic is not None
            results = engine.run(asked)
        for request, result in zip(asked, results, strict=True):
            assert result.error is None, result.error
            prompt, answer = list(request.prompt_token_ids), result.completions[0]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + list(answer.token_ids)])).logits[0].float()
            logprobs = torch.log_softmax(logits, -1)
            for place, score in enumerate(result.prompt_logprobs[1:]):
                assert abs(score - logprobs[place, prompt[place + 1]].item()) < TOLERANCE
            for step, (token, score) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
                row = logprobs[len(prompt) - 1 + step]
                assert abs(score - row[token].item()) < TOLERANCE and row.max() - row[token] < TOLERANCE
    with Engine.from_pretrained(folder, precision="4bit") as engine:  # the same numbers whatever is beside
        together = engine.run(asked)
        alone = [engine.run([request])[0] for request in asked]
    for one, other in zip(together, alone, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        pairs = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        assert all(abs(x - y) < TOLERANCE for x, y in pairs)


@pytest.mark.parametrize("name", FAST)
def test_it_equals_its_own_forward_pass(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in supported() if name not in FAST and name not in REFUSED])
def test_every_class_equals_its_own_forward_pass(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_listed_is_refused_by_name(name, tmp_path):
    """The list's inverse: a class that runs does not belong to it."""
    model = getattr(transformers, name)._from_config(tiny_config(name).get_text_config())
    model.half().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match=REFUSED[name]) as refused:
        Engine.from_pretrained(tmp_path)
    assert name in str(refused.value)


def test_a_class_with_attention_of_its_own_is_refused_by_name(tmp_path):
    transformers.MptForCausalLM._from_config(tiny_config("MptForCausalLM")).half().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match="MptForCausalLM computes attention in its own code"):
        Engine.from_pretrained(tmp_path)


def test_ninety_architectures_are_covered():
    assert len(set(supported()) - set(REFUSED)) + len(NATIVE & set(causal_classes())) >= 90
