"""Every feature of a family is switched on in its tiny model, and matters: without it the numbers change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint import folder, safetensors_checkpoint
from flexgen_helm.models.config import ModelConfig, tensor_shapes
from tests.helpers.parity import TOLERANCE, prompts
from tests.helpers.tiny_models import VARIANTS


def without(**changes):
    """A change of the spec; `rope_…` and `experts_…` reach into those records."""

    def change(model_config: ModelConfig) -> ModelConfig:
        for name, value in changes.items():
            owner, _, field = name.partition("__")
            if field:
                value = replace(getattr(model_config, owner), **{field: value})
            model_config = replace(model_config, **{owner: value})
        return model_config

    return change


FEATURES = [
    ("llama3-rope", without(rope__kind="default")),
    ("llama-linear-rope", without(rope__factor=1.0)),
    ("llama-yarn-rope", without(rope__kind="linear")),
    ("llama-yarn-rope", without(rope__magnitude=1.0)),
    ("qwen3-yarn-rope", without(rope__beta_slow=1.0)),
    ("mistral", without(windows=())),
    ("qwen2-windows", without(windows=())),
    ("qwen3", without(qk_norm=False)),
    ("mixtral", without(windows=())),
    ("mixtral", without(experts__per_token=1)),
    ("qwen3-moe", without(experts__normalize=False)),
    ("qwen3-moe-raw-weights", without(experts__normalize=True)),
    ("qwen3-moe-raw-weights", without(windows=())),
    ("gemma2", without(attn_softcap=None)),
    ("gemma2", without(final_softcap=None)),
    ("gemma2", without(windows=())),
    ("gemma2", without(embed_scale=1.0)),
    ("gemma2", without(norm_plus_one=False)),
    ("gemma2", without(attn_scale=None)),
    ("gemma2", without(residual="pre_norm")),
    ("gemma3", without(local_rope=None)),
    ("gemma3", without(qk_norm=False)),
    ("gemma3", without(rope__factor=1.0)),
    ("gemma3-with-images", without(local_rope=None)),
    ("phi3", without(windows=())),
    ("phi3-longrope", without(rope__magnitude=1.0)),
    ("phi3-longrope", without(rope__kind="default")),
    ("gpt2-untied", without(attn_scale=None)),
    ("pythia", without(residual="pre_norm")),
    ("pythia", without(rope__dim=None)),
    ("gpt-neox-one-after-the-other", without(residual="parallel")),
    ("bloom", without(embed_norm=False)),
    ("opt-350m", without(residual="pre_norm")),
]


@pytest.mark.parametrize("variant, change", FEATURES)
def test_without_the_feature_the_numbers_change(tiny, monkeypatch, variant, change):
    """The guard's inverse: parity with `transformers` would notice each of these."""
    model, honest = tiny(variant), folder.read_config

    def changed(path):
        family, model_config, config = honest(path)
        return family, change(model_config), config

    monkeypatch.setattr(safetensors_checkpoint, "read_config", changed)
    prompt = prompts(1, 1, seed=3)[0] + prompts(1, 1, seed=4)[0] * 3 + [5, 9, 77, 200, 31, 8, 60, 44, 5, 9, 100, 12] * 4
    request = GenerationRequest(prompt_token_ids=prompt, max_tokens=0, echo_logprobs=True)
    with Engine.from_pretrained(model.path) as engine:
        result = engine.run([request])[0]
    reference = model.logprobs(prompt)
    expected = [reference[i, token].item() for i, token in enumerate(prompt[1:])]
    differences = [abs(a - b) for a, b in zip(result.prompt_logprobs[1:], expected)]
    assert max(differences) > 10 * TOLERANCE


def test_a_longer_distance_costs_score_only_with_alibi(tiny):
    """BLOOM's slopes cannot be left out of the record (it would need a table of positions); here they are flattened."""
    from flexgen_helm.models import decoder

    model = tiny("bloom")
    prompt = prompts(1, 60, seed=8)[0] + prompts(1, 60, seed=9)[0]
    request = GenerationRequest(prompt_token_ids=prompt, max_tokens=0, echo_logprobs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "alibi_slopes", lambda heads: torch.zeros(heads))
        with Engine.from_pretrained(model.path) as engine:
            flat = engine.run([request])[0].prompt_logprobs
    with Engine.from_pretrained(model.path) as engine:
        sloped = engine.run([request])[0].prompt_logprobs
    assert max(abs(a - b) for a, b in zip(flat[1:], sloped[1:])) > 10 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_transformers_counts_them(tiny, variant):
    model = tiny(variant)
    _, model_config, _ = folder.read_config(model.path)
    counted = sum(parameter.numel() for parameter in model.text_parameters())
    assert (
        model_config.num_parameters
        == counted
        == sum(torch.Size(s).numel() for s in tensor_shapes(model_config).values())
    )


@pytest.mark.parametrize("heads", [1, 2, 6, 16, 40, 71, 112])
def test_alibi_slopes_equal_transformers(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from flexgen_helm.models.decoder import alibi_slopes

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(heads), theirs, rtol=1e-6)


def test_the_readmes_table_of_models_is_what_the_tests_check(tiny):
    """Every family has a tiny model, and the table says what these switch on; `make model-table` rewrites it."""
    from tests.helpers.model_table import in_readme, specs_tested, table

    tested = specs_tested({variant: tiny(variant).path for variant in VARIANTS})
    written = in_readme().splitlines()
    assert [line.rsplit("|", 2)[0] for line in written] == [
        line.rsplit("|", 2)[0] for line in table({}, tested).splitlines()
    ]
    differences = [float(line.split("|")[-2]) for line in written[2:]]
    assert differences and max(differences) < TOLERANCE
