"""Causal classes of transformers that run by their own modules: tiny models, and how far the engine
is from them.

`python -m tests.helpers.backend_models` rewrites the table of
docs/explanation/transformers-backend.md.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from flexgen_helm import Engine, GenerationRequest, GenerationResult
from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.transformers_backend.classes import MULTI_PART_CLASSES
from flexgen_helm.models.transformers_backend.config import TransformersConfig
from tests.helpers.model_table import rewrite
from tests.helpers.parity import differences
from tests.helpers.paths import ROOT
from tests.helpers.tiny_causal_models import UNBUILT, causal_classes, tiny_config

PAGE = ROOT / "docs/explanation/transformers-backend.md"
BEGIN, END = "<!-- table: make model-table -->", "<!-- end of the table -->"
NATIVE = {name for architecture in ARCHITECTURES.values() for name in architecture.hf_names}
# Layers that keep a state, or call attention in another way than once with causal masks, by what
# the refusal says.
REFUSED = {
    "DbrxForCausalLM": "cannot run layer by layer",  # experts outside transformers' interface
    "DeepseekV4ForCausalLM": "passes its layers input_ids",
    "DiffLlamaForCausalLM": "call attention 2 times",
    "DogeForCausalLM": "cannot run layer by layer",  # masks that depend on values
    "DoryForCausalLM": "is no linear layer",
    "HrmTextForCausalLM": "has no list of",  # layers run several times
    "JetMoeForCausalLM": "cannot run layer by layer",  # experts of attention
    "LongcatFlashForCausalLM": "has no list of",  # two attentions in a layer
    "MllamaForCausalLM": "does not call its layers one after the other",
    "RecurrentGemmaForCausalLM": "keep states, or attend, in a way of their own",  # recurrent layers
    "XmodForCausalLM": "cannot run layer by layer",  # adapters that are chosen by language
    "ZayaForCausalLM": "states in a module that returns more|does not go on from the states",
}
# Classes that do not declare transformers' attention interface, and use it.
UNDECLARED = {
    "BailingHybridForCausalLM", "BambaForCausalLM", "BartForCausalLM", "BigBirdForCausalLM",
    "BigBirdPegasusForCausalLM", "BioGptForCausalLM", "BlenderbotForCausalLM",
    "BlenderbotSmallForCausalLM", "CodeGenForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM",
    "FalconMambaForCausalLM", "GPTJForCausalLM", "GPTNeoXJapaneseForCausalLM", "JambaForCausalLM",
    "KimiLinearForCausalLM", "LaraMiniForCausalLM", "MBartForCausalLM", "Mamba2ForCausalLM",
    "MambaForCausalLM", "MarianForCausalLM", "MegatronBertForCausalLM", "MvpForCausalLM",
    "NemotronHForCausalLM", "OlmoHybridForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "StableLmForCausalLM",
    "TrOCRForCausalLM", "WhisperForCausalLM", "XGLMForCausalLM",
}  # fmt: skip
# Models of several parts, whose language model is a class of its own in this list.
OTHERS = {
    "FuyuForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GotOcr2ForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
}  # fmt: skip


@cache
def supported() -> list[str]:
    """Classes that use transformers' attention interface and have no record of ours."""
    known = NATIVE | OTHERS
    return [
        name
        for name in causal_classes()
        if (_declares(name) or name in UNDECLARED) and name not in known
    ]


def without_interface() -> list[str]:
    """Classes that neither declare nor use it."""
    known = NATIVE | OTHERS | UNDECLARED
    return [name for name in causal_classes() if not _declares(name) and name not in known]


def _declares(name: str) -> bool:
    """Whether the module of a class says so: to import 177 of them takes 4 s of processor time."""
    module = transformers._class_to_module[name].replace(".", "/")
    text = Path(transformers.__path__[0], f"{module}.py").read_text(encoding="utf-8")
    return "_supports_attention_backend = True" in text


def tiny_model_config(name: str, **changes: Any) -> Any:
    """A tiny config of the class, of its text model if it is one of several parts and not itself
    listed so.
    """
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    return (
        config.get_text_config()
        if name in causal_classes() and name not in MULTI_PART_CLASSES
        else config
    )


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """Save a tiny random model, with changes of its config; return it in float32, with the same
    values.
    """
    torch.manual_seed(0)
    config = tiny_model_config(name, **changes)
    model = (
        getattr(transformers, name)._from_config(config, attn_implementation="eager").eval().float()
    )
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():  # as `random_reference` does
            if tensor.is_floating_point():
                if isinstance(tensor, torch.nn.Parameter) or tensor.dim() == 1:
                    tensor.normal_(0, 0.3)
                tensor.copy_(tensor.half().float())
    model.generation_config.forced_eos_token_id = None  # decoders of translators force the end
    copy.deepcopy(model).half().save_pretrained(folder)
    return model


def requests() -> list[GenerationRequest]:
    """Prompts of mixed lengths, of which two share a beginning; together more tokens than positions
    and vocabulary.

    Their ids are all over the vocabulary, with the last three, which have a meaning.
    """
    draw = random.Random(1)
    shared = [draw.randrange(3, 64) for _ in range(8)] + [63]
    beginnings = [(), (), (), shared, shared]
    prompts = [
        [*begin, *(draw.randrange(3, 64) for _ in range(length))]
        for begin, length in zip(beginnings, (1, 7, 50, 3, 4), strict=True)
    ]
    asked = {"max_tokens": 4, "echo_logprobs": True, "ignore_eos": True}
    return [GenerationRequest(prompt_token_ids=prompt, **asked) for prompt in prompts]


def off(model: Any, result: GenerationResult) -> float:
    """The largest difference of a log-probability, of the answers and the prompt if asked for, from
    the model's own.
    """

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(
                model(input_ids=torch.tensor([ids[:-1]])).logits[0].float(), -1
            )

    return torch.tensor([0.0, *differences(logprobs, result.prompt_token_ids, result)]).max().item()


def largest_difference(
    name: str, folder: Path, options: Mapping[str, Any], model: Any = None
) -> tuple[float, TransformersConfig]:
    """Answer the requests, in blocks of which one shares the prompts' common beginning; return the
    largest difference of a log-probability from the model's own forward pass.

    A greedy token that is not the largest counts with how far it is from that.

    model: what `saved` has saved in the folder; without it, that is done here.
    """
    model, asked, largest = model or saved(name, folder), requests(), 0.0
    with Engine.from_pretrained(folder, **options) as engine:
        config, results = engine.model_config, engine.run(asked)
        engine.share_every_beginning()
        results += engine.run(asked)
        workload = engine.last_run["workload"]
        assert workload["prompt_tokens_computed"] < workload["prompt_tokens"]
    for request, result in zip(2 * asked, results, strict=True):
        prompt, answer = list(request.prompt_token_ids), result.completions[0]
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([prompt + list(answer.token_ids)])).logits[0].float()
            )
        logprobs = torch.log_softmax(logits, -1)
        largest = max(largest, off(model, result))
        for row, token in zip(logprobs[len(prompt) - 1 :], answer.token_ids, strict=False):
            largest = max(largest, (row.max() - row[token]).item())
    return largest, config


def features(config: TransformersConfig) -> str:
    """What distinguishes the model for the engine."""
    found = []
    resident = [name for kind in config.modules.kinds for name, _ in kind.resident]
    if any(name.endswith("kv_b_proj.weight") for name in resident):
        found.append("latents")
    elif config.num_kv_heads < config.num_heads:
        found.append("grouped keys")
    if config.windows:
        kind = "chunks" if config.chunked else "windows"
        found.append(f"{kind} in some layers" if None in config.windows else f"sliding {kind}")
    if config.experts is not None:
        found.append("experts, dense layers between" if config.experts.dense_layers else "experts")
    if config.attn_softcap is not None:
        found.append("soft caps")
    if any(config.layer_states):
        found.append(
            "states in all layers" if all(config.layer_states) else "states in some layers"
        )
    if config.modules.streams > 1:
        found.append("streams")
    if config.modules.layer_input_size:
        found.append("inputs of layers")
    if config.modules.shared_keys:
        found.append("shared keys")
    if any(name.endswith("sinks") for name in resident):
        found.append("attention sinks")
    return ", ".join(found) or "none of these"


def table(measured: Iterable[tuple[str, str, float]]) -> str:
    """The page's table of classes, their features and differences: a row for classes with the same
    features.
    """
    rows: dict[str, list[tuple[str, float]]] = {}
    for name, shown, difference in measured:
        rows.setdefault(shown, []).append((name.removesuffix("ForCausalLM"), difference))
    lines = ["| features | classes | largest difference |", "|---|---|---|"]
    for shown, classes in sorted(rows.items()):
        lines.append(
            f"| {shown} | {', '.join(name for name, _ in classes)} | "
            f"{max(dict(classes).values()):.1e} |"
        )
    return "\n".join(lines)


def measure() -> Iterator[tuple[str, str, float]]:
    for name in supported():
        if name not in REFUSED:
            with tempfile.TemporaryDirectory() as folder:
                difference, config = largest_difference(name, Path(folder), {})
            yield name, features(config), difference


# Why the others do not run.
REASONS = {
    "two attentions in a layer": ["DiffLlama", "LongcatFlash"],
    "layers that run several times": ["HrmText"],
    "layers that a text leaves out": ["Mllama"],
    "states that are kept in a way of their own": ["RecurrentGemma", "Rwkv", "Zaya", "xLSTM"],
    "layers are given the embeddings again": ["Zamba", "Zamba2"],
    "experts outside transformers' interface": ["Dbrx", "JetMoe"],
    "experts chosen by token, and compressed keys": ["DeepseekV4"],
    "adapters chosen by language": ["Xmod"],
    "scores or masks of its own: biases by position, windows, hashes, lengths": [
        "CpmAnt", "Doge", "Git", "Inkling", "Inkling2", "Inkling2Loop", "OpenAIGPTLMHeadModel",
        "ReformerModelWithLMHead", "XLMWithLMHeadModel",
    ],
    "several predictions of a "
    "token at once": ["Musicgen", "MusicgenMelody", "ProphetNet", "XLNetLMHeadModel"],
    "a table of rotations among its weights": ["RoFormer"],
    "embeddings narrower than hidden states": ["RemBert"],
    "a head of several parts": ["Dory"],
    "several stacks of layers, over bytes and patches": ["Blt"],
    "not tried: its default "
    "configuration makes no model": sorted(name.removesuffix("ForCausalLM") for name in UNBUILT),
}  # fmt: skip


def refused_classes() -> set[str]:
    """The classes of `REASONS` that this release has, by their whole names."""
    short, known = (
        {name for names in REASONS.values() for name in names},
        {*causal_classes(), *UNBUILT},
    )
    return known & (short | {f"{name}ForCausalLM" for name in short})


def refusal_table() -> str:
    lines = ["| reason | classes |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {why} | {', '.join(names)} |" for why, names in REASONS.items())]
    )


if __name__ == "__main__":
    rewrite(
        PAGE,
        "<!-- refused: make model-table -->",
        "<!-- end of what is refused -->",
        refusal_table(),
    )
    rewrite(PAGE, BEGIN, END, table(measure()))
