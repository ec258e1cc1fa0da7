"""What `generation_config.json` says beside stop tokens: applied as `generate` does, or refused by
name.
"""

import inspect
import json
import math
import shutil
from itertools import takewhile

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.folder import TOKENIZER_FILES
from flexgen_helm.checkpoint.generation_config import (
    ALWAYS,
    IRRELEVANT,
    REFUSED,
    SAMPLED,
    read_generation_settings,
)
from flexgen_helm.errors import CheckpointError
from tests.helpers.generation_settings import GREEDY
from tests.helpers.parity import prompts

ENDS = [*range(0, 320, 32)]  # many, so that answers end
KNOWN = {*ALWAYS, *SAMPLED, *REFUSED, *(name for names in IRRELEVANT.values() for name in names)}


@pytest.fixture
def folder_with(tiny, tmp_path):
    """Make a copy of a tiny model with these settings in one of its files."""

    def make(settings, name="generation_config.json"):
        copy = tmp_path / "model"
        shutil.copytree(tiny("llama").path, copy, dirs_exist_ok=True)
        path = copy / name
        known = json.loads(path.read_text()) if name == "config.json" else {}
        (copy / "generation_config.json").unlink(missing_ok=True)
        path.write_text(json.dumps({**known, "eos_token_id": ENDS, **settings}))
        return copy

    return make


def requests(count=5, **settings):
    """Prompts of different lengths, two of them with a shared beginning."""
    ids = prompts(count, 30)
    ids += [ids[-1][:12] + [3, 4], ids[0][:1]]
    return [GenerationRequest(prompt_token_ids=prompt, max_tokens=12, **settings) for prompt in ids]


def generate(model, request):
    """The tokens that `generate` of transformers returns in float32."""
    ids = torch.tensor([request.prompt_token_ids])
    drawn = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, pad_token_id=0
    )
    tokens = drawn[0, ids.shape[1] :].tolist()
    return [*takewhile(lambda token: token not in ENDS, tokens)]


@pytest.mark.parametrize(
    "settings, name",
    [*((settings, "generation_config.json") for settings in GREEDY), (GREEDY[0], "config.json")],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_greedy_tokens_equal_those_of_generate(folder_with, settings, name):
    from transformers import AutoModelForCausalLM

    folder, asked = folder_with(settings, name), requests()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with Engine.from_pretrained(folder, device="cpu", precision="fp16") as engine:
        engine.share_every_beginning()
        results = engine.run(asked)
        assert engine.last_run["generation_config"]["applied"] == settings
    with Engine.from_pretrained(folder, device="cpu", generation_config="ignore") as engine:
        plain = engine.run(asked)
        assert engine.last_run["generation_config"] == {"applied": {}, "ignored": settings}
    for request, result in zip(asked, results, strict=True):
        assert result.error is None and [*result.completions[0].token_ids] == generate(
            model, request
        )
    changed = [
        result.completions[0].token_ids != one.completions[0].token_ids
        for result, one in zip(results, plain)
    ]
    assert any(changed)
    for result, one in zip(results, plain):  # log-probabilities stay those of the model
        first, same = result.completions[0], one.completions[0]
        if first.token_ids and first.token_ids[:1] == same.token_ids[:1]:
            assert math.isclose(first.logprobs[0], same.logprobs[0], abs_tol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 2}], ids=str)
def test_answers_end_without_tokenizer_files_too(folder_with, settings):
    from transformers import AutoModelForCausalLM

    folder, asked = folder_with(settings), requests()
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with Engine.from_pretrained(folder, device="cpu") as engine:
        assert engine.tokenizer is None
        answers = [result.completions[0] for result in engine.run(asked)]
        fingerprint = engine.fingerprint
    assert [[*answer.token_ids] for answer in answers] == [
        generate(model, request) for request in asked
    ]
    assert "endoftext" in {answer.finish_reason for answer in answers}
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ENDS[:1], **settings})
    )
    with Engine.from_pretrained(folder, device="cpu") as engine:
        assert engine.fingerprint != fingerprint


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3},
        {"min_p": 0.3},
        {"typical_p": 0.3},
        {"epsilon_cutoff": 0.05},
        {"eta_cutoff": 0.1},
        {"top_h": 0.4},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_sampled_tokens_are_those_that_generate_may_draw(folder_with, settings):
    from transformers import AutoModelForCausalLM

    folder = folder_with({**settings, "repetition_penalty": 1.3})
    asked = requests(2, temperature=0.9, top_p=0.95, n=200, ignore_eos=True)
    asked = [GenerationRequest(**{**vars(request), "max_tokens": 1}) for request in asked]
    with Engine.from_pretrained(folder, device="cpu") as engine:
        results = engine.run(asked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, result in zip(asked, results, strict=True):
        ids = torch.tensor([request.prompt_token_ids])
        scores = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=True,
            temperature=0.9, top_p=0.95, top_k=settings.get("top_k", 0), output_scores=True,
            return_dict_in_generate=True, pad_token_id=0,
        ).scores[0][0]  # fmt: skip
        expected = torch.softmax(scores, -1)
        drawn = [completion.token_ids[0] for completion in result.completions]
        counts = torch.bincount(torch.tensor(drawn), minlength=len(expected))
        assert set(drawn) <= set(expected.nonzero()[:, 0].tolist())
        deviation = (200 * expected * (1 - expected)).sqrt()
        assert bool(((counts - 200 * expected).abs() <= 4.5 * deviation + 1).all())


REFUSED_VALUES = {"num_beams": 4, "watermarking_config": {"bias": 2.0}, "penalty_alpha": 0.6, "guidance_scale": 1.5,
                  "cache_implementation": "quantized", "is_assistant": True, "token_healing": True}  # fmt: skip


def test_what_is_not_applied_is_refused_by_name(folder_with):
    for name in (*REFUSED, "setting_of_tomorrow"):
        folder = folder_with({name: REFUSED_VALUES.get(name, [3])})
        message = rf"generation_config.json sets {name} to .*--generation-config ignore"
        with pytest.raises(CheckpointError, match=message):
            Engine.from_pretrained(folder, device="cpu")
        assert name in read_generation_settings(folder, "ignore").ignored


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": -2.0}, {"sequence_bias": [[[99999], 1.0]]}, {"top_k": "x"}]
)
def test_values_that_transformers_refuses_are_refused_before_the_weights(folder_with, settings):
    with pytest.raises(
        CheckpointError, match=(r"cannot apply the generation settings of .*generation_config.json")
    ):
        Engine.from_pretrained(folder_with(settings), device="cpu")


def test_every_entry_of_transformers_is_classified(folder_with):
    from transformers import GenerationConfig

    entries = {name for name in vars(GenerationConfig()) if name != "_original_object_hash"}
    assert entries | GenerationConfig._get_default_generation_params().keys() <= KNOWN
    read = inspect.getsource(GenerationConfig.__init__)
    assert {name for name in KNOWN if f'"{name}"' in read} >= entries
    assert len(KNOWN) == len(ALWAYS) + len(SAMPLED) + len(REFUSED) + sum(
        map(len, IRRELEVANT.values())
    )


def test_applied_settings_are_part_of_the_fingerprint(folder_with):
    from flexgen_helm.config import EngineConfig
    from flexgen_helm.engine.fingerprint import quick_engine_fingerprint

    digests = []
    for settings, choice in [({}, "auto"), ({"top_k": 5}, "auto"), ({"top_k": 6}, "auto")]:
        config = EngineConfig(device="cpu", generation_config=choice)
        folder = folder_with(settings)
        digests.append(quick_engine_fingerprint(folder, config))
        with Engine.from_config(folder, config) as engine:
            assert engine.fingerprint == digests[-1]
    assert len(set(digests)) == 3
