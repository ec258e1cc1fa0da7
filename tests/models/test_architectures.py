"""Every feature of an architecture is on in a tiny model, and matters: without it the numbers
change.

`tests/engine/test_parity.py` compares all tiny models with `transformers`.
"""

import math
from dataclasses import MISSING, fields, is_dataclass, replace

import pytest

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint import folder, safetensors_checkpoint
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.config import tensor_shapes
from flexgen_helm.models.decoder_config import DecoderConfig
from tests.helpers.parity import TOLERANCE, prompts
from tests.helpers.tiny_models import VARIANTS

PROMPT = (
    prompts(1, 1, seed=3)[0]
    + prompts(1, 1, seed=4)[0] * 3
    + [5, 9, 77, 200, 31, 8, 60, 44, 5, 9, 100, 12] * 4
)


def switched_off(record):
    """The record with one field set to its default, for each that differs; with those of its own
    records.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is not MISSING and value != field.default:
            yield field.name, replace(record, **{field.name: field.default})
        if is_dataclass(value):
            for name, changed in switched_off(value):
                yield f"{field.name}.{name}", replace(record, **{field.name: changed})


def difference(monkeypatch, model, config):
    """Largest difference of a log-probability from `transformers` if the folder's record were
    `config`.

    Infinite if the checkpoint is refused, as it is if the record wants tensors that it lacks or
    stores in other shapes.
    """
    architecture, _, raw = folder.read_config(model.path)
    request = GenerationRequest(prompt_token_ids=PROMPT, max_tokens=0, echo_logprobs=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            safetensors_checkpoint, "read_config", lambda path: (architecture, config, raw)
        )
        try:
            with Engine.from_pretrained(model.path, unverified=True) as engine:
                scores = engine.run([request])[0].prompt_logprobs[1:]
        except (CheckpointError, KeyError):  # KeyError: the architecture has no name for the tensor
            return math.inf
    reference = model.logprobs(PROMPT)
    return max(
        abs(score - reference[i, token].item())
        for i, (score, token) in enumerate(zip(scores, PROMPT[1:]))
    )


def is_inseparable(config, name):
    """Whether a field cannot be switched off alone.

    LongRoPE has a factor for each pair of `dim`; its original context bounds the prompt and enters
    no equation. A head that the files have is used whatever `tied_head` says
    (`tests/checkpoint/test_parity.py`).
    """
    if name == "tied_head":
        return True
    kind = None if config.rope is None else config.rope.kind
    return kind == "factors" and name in ("rope.factors", "rope.dim", "rope.original_max_positions")


@pytest.mark.fast(12)
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_a_feature_the_numbers_change(tiny, monkeypatch, variant):
    """The inverse of the parity test: it would notice a feature that is ignored."""
    config = folder.read_config(tiny(variant).path)[1]
    assert difference(monkeypatch, tiny(variant), config) < TOLERANCE
    for name, changed in switched_off(config):
        if not is_inseparable(config, name):
            assert difference(monkeypatch, tiny(variant), changed) > 10 * TOLERANCE, (
                f"{variant} ignores {name}"
            )


@pytest.mark.parametrize(
    "variant, part, changes",
    [
        ("llama-yarn-rope", "rope", {"kind": "linear"}),
        ("mixtral", "experts", {"per_token": 1}),
        ("gpt-neox-one-after-the-other", None, {"residual": "parallel"}),
    ],
)
def test_with_another_feature_the_numbers_change(tiny, monkeypatch, variant, part, changes):
    config = folder.read_config(tiny(variant).path)[1]
    if part is not None:
        changes = {part: replace(getattr(config, part), **changes)}
    assert (
        10 * TOLERANCE
        < difference(monkeypatch, tiny(variant), replace(config, **changes))
        < math.inf
    )


def test_every_field_of_the_record_is_on_in_a_tiny_model(tiny):
    optional = {field.name for field in fields(DecoderConfig) if field.default is not MISSING}
    optional -= {"layers_before", "layers_after"}  # of a rank of a pipeline, never of a checkpoint
    optional -= {"chunked"}  # of models that run by the modules of transformers
    configs = [folder.read_config(tiny(variant).path)[1] for variant in VARIANTS]
    assert optional == {
        name for config in configs for name, _ in switched_off(config) if "." not in name
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_transformers_counts_them(tiny, variant):
    model = tiny(variant)
    _, config, _ = folder.read_config(model.path)
    counted = sum(parameter.numel() for parameter in model.text_parameters())
    assert (
        config.num_parameters
        == counted
        == sum(math.prod(shape) for shape in tensor_shapes(config).values())
    )


def test_the_table_of_models_is_what_the_tests_check(tiny):
    """Every architecture has a tiny model, and the table says what these switch on;
    `make model-table` rewrites it.
    """
    from tests.helpers.model_table import table, tested_configs, written_table

    tested = tested_configs(tiny(variant).path for variant in VARIANTS)
    written = written_table().splitlines()
    assert [line.rsplit("|", 2)[0] for line in written] == [
        line.rsplit("|", 2)[0] for line in table({}, tested).splitlines()
    ], "run `make model-table`"
    differences = [float(line.split("|")[-2]) for line in written[2:]]
    assert differences and max(differences) < TOLERANCE
