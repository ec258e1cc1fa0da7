"""A model proves itself when it is opened: a small one of its kind equals `transformers`, or it is
refused by name.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.engine import proof, small_model
from flexgen_helm.errors import FlexgenError, UnprovedModelError
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.miniature import kind_text, layer_kinds, miniatures
from flexgen_helm.models.transformers_backend import interfaces
from flexgen_helm.models.transformers_backend.code_digest import code_digest
from flexgen_helm.models.transformers_backend.decoder import TransformersDecoder
from flexgen_helm.progress import ModelInUse, ProgressPhase, observed_by
from tests.helpers.backend_models import saved
from tests.helpers.proofs import (
    backend_content,
    backend_names,
    catalog_content,
    key_of,
    native_content,
)
from tests.helpers.tiny_models import VARIANTS

TESTED = proof.proved_table()["tested"]
of_tested_releases = pytest.mark.skipif(
    transformers.__version__ not in TESTED["transformers"]
    or torch.__version__.partition("+")[0] not in TESTED["torch"],
    reason="the table is of other releases",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder in which nothing is proved, and a table without kinds."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    table = {**proof.proved_table(), "digests": []}
    monkeypatch.setattr(proof, "proved_table", lambda: table)
    return tmp_path / "home"


def difference(content, seed=0):
    return small_model.difference_of_miniature(
        content, architecture_of_config(content).read_config(content), seed, Engine
    )


# ---- the table ----


def is_in_the_table(content):
    return key_of(content).digest in proof.proved_table()["digests"]


@of_tested_releases
def test_the_table_has_classes_of_transformers():
    """Some of them: `test_the_table_has_every_class` is slow."""
    names = (
        "GraniteMoeForCausalLM",
        "Qwen3_5ForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    )
    missing = [name for name in names if not is_in_the_table(backend_content(name))]
    assert not missing, "models/ or transformers has changed: make proofs"


@of_tested_releases
def test_the_table_has_the_records_and_the_catalog():
    missing = [variant for variant in VARIANTS if not is_in_the_table(native_content(variant))]
    names = [name for name, entry in CATALOG.items() if not entry.architecture.endswith("LM")]
    missing += [name for name in names if not is_in_the_table(catalog_content(name))]
    assert not missing, "models/ has changed: make proofs"


@of_tested_releases
@pytest.mark.slow
def test_the_table_has_every_class():
    assert [name for name in backend_names() if not is_in_the_table(backend_content(name))] == []


def test_the_releases_that_are_tested_are_those_of_the_lock_and_the_lower_bound():
    root = Path(proof.__file__).parents[2]
    locked = dict(
        line.split(" ;")[0].split("==")
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert (
        TESTED["transformers"][-1] == locked["transformers"]
        and TESTED["torch"][-1] == locked["torch"]
    )
    assert (
        f"transformers>={TESTED['transformers'][0].removesuffix('.0')},<6"
        in (root / "setup.cfg").read_text()
    )


# ---- what a small model is ----


@pytest.mark.parametrize(
    "name", ["qwen2.5-72b-instruct", "gpt-oss-120b", "gemma-3-27b-it", "opt-350m"]
)
def test_a_small_model_has_every_kind_of_layer(name):
    content = catalog_content(name)
    config = architecture_of_config(content).read_config(content)
    cls, small = next(miniatures(content, config))
    content = {**json.loads(small.to_json_string()), "architectures": [cls.__name__]}
    assert layer_kinds(architecture_of_config(content).read_config(content)) == layer_kinds(config)
    with torch.device("meta"):
        assert sum(x.numel() for x in cls._from_config(small).parameters()) < 1_000_000


def test_kinds_are_told_by_features_and_not_by_sizes():
    content = native_content("qwen2-windows")
    same = [
        {"hidden_size": 8192},
        {"rms_norm_eps": 3e-6},
        {"initializer_range": 1.0},
        {"eos_token_id": 7},
        {"vision_config": {"model_type": "siglip_vision_model", "hidden_act": "gelu"}},
    ]
    changed = [
        {"tie_word_embeddings": not content.get("tie_word_embeddings", False)},
        {"hidden_act": "relu"}, {"num_key_value_heads": content["num_attention_heads"]},
        {"use_sliding_window": False}, {"unknown": 2.5},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"architectures": ["LlamaForCausalLM"]},
        {"attn_config": {"clip_qkv": 8}}, {"attn_config": {"softmax_scale": 0.3}},
    ]  # fmt: skip
    assert all(kind_text({**content, **change}) == kind_text(content) for change in same)
    assert (
        len({kind_text({**content, **change}) for change in changed} | {kind_text(content)})
        == len(changed) + 1
    )


# ---- the comparison is not vacuous: each part that is taken away is seen, by a hundred times the
# tolerance ----


def without_states(monkeypatch):
    honest = TransformersDecoder._mix

    def from_nothing(self, *given, **named):
        groups = self._state_groups
        self._state_groups = lambda: (replace(group, states=None) for group in groups())
        return honest(self, *given, **named)

    monkeypatch.setattr(TransformersDecoder, "_mix", from_nothing)


def without_positions(monkeypatch):
    honest = TransformersDecoder.rotary
    monkeypatch.setattr(
        TransformersDecoder,
        "rotary",
        lambda self, positions: honest(self, torch.zeros_like(positions)),
    )


def without_router(monkeypatch):
    honest = TransformersDecoder._run_experts

    def next_experts(self, kind, attend, call):
        call.selected = (call.selected + 1) % kind.num_experts
        return honest(self, kind, attend, call)

    monkeypatch.setattr(TransformersDecoder, "_run_experts", next_experts)


def without_mask(monkeypatch):
    monkeypatch.setattr(interfaces, "_mask", lambda **given: interfaces.Mask())


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("take_away", "name"),
    [
        (without_states, "Qwen3_5ForCausalLM"),
        (without_states, "FalconH1ForCausalLM"),
        (without_positions, "SmolLM3ForCausalLM"),
        (without_router, "GraniteMoeForCausalLM"),
        (without_mask, "Starcoder2ForCausalLM"),
        (without_mask, "Llama4ForCausalLM"),
    ],
)
def test_a_part_that_is_missing_is_seen(take_away, name, monkeypatch):
    content = backend_content(name)
    assert difference(content) < proof.TOLERANCE
    take_away(monkeypatch)
    assert difference(content) > 100 * proof.TOLERANCE


@pytest.mark.parametrize(
    ("variant", "entry", "value"),
    [
        ("mistral", "sliding_window", None),
        ("llama3-rope", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("gemma2", "attn_logit_softcapping", None),
        ("qwen3-moe-raw-weights", "norm_topk_prob", True),
    ],
)
def test_an_entry_that_a_record_ignores_is_seen(variant, entry, value, monkeypatch):
    """The engine reads the configuration without an entry, with which transformers computes."""
    content = native_content(variant)
    architecture = architecture_of_config(content)
    config = architecture.read_config(content)
    ignoring = replace(
        architecture, read_config=lambda given: architecture.read_config({**given, entry: value})
    )
    monkeypatch.setattr(
        SafetensorsCheckpoint,
        "_read_config",
        lambda self, path: read_config(path, lambda given: ignoring),
    )
    assert small_model.difference_of_miniature(content, config, 0, Engine) > 100 * proof.TOLERANCE


# ---- when, how often, and what follows ----


def test_it_is_proved_once_and_remembered(home, tmp_path, monkeypatch):
    saved("SmolLM3ForCausalLM", tmp_path / "model")
    events, proofs, honest = [], [], small_model.difference_of_miniature

    def counted(*given):
        proofs.append(given[2])
        return honest(*given)

    monkeypatch.setattr(proof, "difference_of_miniature", counted)
    for _ in range(2):
        with observed_by(events.append), Engine.from_pretrained(tmp_path / "model") as engine:
            engine.run([GenerationRequest(prompt_token_ids=[5, 6], max_tokens=1)])
            assert engine.last_run["proved"] is True
    assert proofs == [0]
    assert [
        event.detail
        for event in events
        if isinstance(event, ProgressPhase) and event.name == "prove"
    ] == ["model"]
    assert {event.name for event in events if isinstance(event, ModelInUse)} == {"model"}, (
        "the small model is not shown"
    )
    (remembered,) = json.loads((home / "proofs.json").read_text()).values()
    assert (
        remembered["class"] == "SmolLM3ForCausalLM" and remembered["difference"] < proof.TOLERANCE
    )
    with Engine.from_pretrained(tmp_path / "model", unverified=True) as again:
        assert again.fingerprint != engine.fingerprint and again.identity.entries["proved"]


@pytest.mark.parametrize(
    ("differences", "passes"),
    [
        ([1e-6], True),
        ([0.5, 1e-6, 1e-6], True),
        ([0.5, 0.5, 1e-6], False),
        ([float("inf")] * 3, False),
    ],
)
def test_two_of_three_seeds_that_differ_refuse_it(home, tmp_path, monkeypatch, differences, passes):
    """One may differ: two experts that score alike change places."""
    saved("SmolLM3ForCausalLM", tmp_path / "model")
    monkeypatch.setattr(
        proof, "difference_of_miniature", lambda content, config, seed, *_: differences[seed]
    )
    if passes:
        Engine.from_pretrained(tmp_path / "model").close()
        return
    with pytest.raises(UnprovedModelError) as refused:
        Engine.from_pretrained(tmp_path / "model")
    message = str(refused.value)
    for part in (
        "SmolLM3ForCausalLM",
        transformers.__version__,
        torch.__version__.partition("+")[0],
        "--unverified",
    ):
        assert part in message
    assert "\n" not in message and f"transformers {TESTED['transformers'][-1]}" in message
    assert not (home / "proofs.json").exists()
    with Engine.from_pretrained(tmp_path / "model", unverified=True) as engine:
        engine.run([GenerationRequest(prompt_token_ids=[5, 6], max_tokens=1)])
        assert engine.last_run["proved"] is False


def test_a_home_that_cannot_be_written_keeps_nothing_and_stops_nothing(home, tmp_path):
    saved("SmolLM3ForCausalLM", tmp_path / "model")
    home.write_text("a file where the folder should be")
    Engine.from_pretrained(tmp_path / "model").close()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(28, "No space left on device"), FlexgenError),
        (
            RuntimeError("Error while serializing: I/O error: File too large (os error 27)"),
            FlexgenError,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), UnprovedModelError),
    ],
)
def test_an_error_of_the_system_is_none_of_the_model(home, tmp_path, monkeypatch, raised, expected):
    """A full disk is told with its folder, and without advice to compute what is not proved."""

    def fails(*given):
        raise raised

    saved("SmolLM3ForCausalLM", tmp_path / "model")
    monkeypatch.setattr(small_model, "random_reference", fails)
    with pytest.raises(expected) as caught:
        Engine.from_pretrained(tmp_path / "model")
    assert ("--unverified" in str(caught.value)) == (expected is UnprovedModelError)
    assert expected is UnprovedModelError or str(home) in str(caught.value)


def test_what_cannot_be_made_small_is_refused(home, tmp_path, monkeypatch):
    saved("SmolLM3ForCausalLM", tmp_path / "model")
    monkeypatch.setattr(small_model, "miniatures", lambda content, config: iter(()))
    with pytest.raises(UnprovedModelError, match="could not be compared .* no small configuration"):
        Engine.from_pretrained(tmp_path / "model")


def test_the_key_names_every_part_that_decides(monkeypatch):
    key = key_of(backend_content("SmolLM3ForCausalLM"))
    changed = [
        proof.ProofKey("Other", key.code, key.kind).digest,
        proof.ProofKey(key.class_name, "0", key.kind).digest,
        proof.ProofKey(key.class_name, key.code, "{}").digest,
        proof.ProofKey(key.class_name, key.code, key.kind, "a GPU").digest,
    ]
    before = key.digest
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    changed.append(key.digest)
    monkeypatch.undo()
    monkeypatch.setattr(proof, "own_digest", lambda package: "0")
    changed.append(key.digest)
    assert len({before, *changed}) == 7
    assert code_digest("SmolLM3ForCausalLM") != code_digest("CohereForCausalLM")
