"""Every entry of `config.json`, changed, removed, or of another model: the numbers of
`transformers`, or a refusal.

An entry that `transformers` applies and the engine ignores, or the other way round, gives wrong
numbers without a word.
The weights have biases and a head for every architecture, so that an entry that turns them on finds
them.
"""

import json
import re
from functools import cache

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.folder import CONFIG, SINGLE, read_config
from flexgen_helm.errors import FlexgenError, UnsupportedArchitectureError
from flexgen_helm.models.architectures import ARCHITECTURES, architecture_of_config
from tests.helpers.parity import TOLERANCE
from tests.helpers.paths import DATA
from tests.helpers.shares import share
from tests.helpers.tiny_models import gemma3_with_images

PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [30, 2],
    [5, 9, 31, 7, 7, 7, 1, 2, 3],
]
TABLES = yaml.safe_load((DATA / "config_entries.yaml").read_text())
SIZES, CLASSES, ENTRIES, KIND = map(TABLES.get, ("sizes", "classes", "entries", "kinds"))
FULL, SLIDING = "full_attention", "sliding_attention"


def with_factors(kind, pairs):
    """The parameters of a kind, with a factor for each pair of elements where it has some."""
    if kind.strip() not in ("longrope", "su"):
        return KIND[kind]
    return {
        **KIND[kind],
        "short_factor": [1 + i / 4 for i in range(pairs)],
        "long_factor": [4.0 + i for i in range(pairs)],
    }


def ropes(name, base):
    """Changes of a configuration that write a rotation in the ways of both versions of
    `transformers`.
    """
    head = base.get("head_dim") or base["hidden_size"] // base["num_attention_heads"]
    without, beside = (
        {"rope_parameters": REMOVED},
        {"rope_theta": 50.0, "rope_local_base_freq": 9.0},
    )
    for kind in KIND:
        named = {"rope_type": kind.strip()}
        for part in (None, 0.5):
            pairs = (
                head
                if part is None and name != "GPTNeoXForCausalLM"
                else int(head * (part or 0.25))
            ) // 2
            rope, inside = (
                with_factors(kind, pairs),
                {} if part is None else {"partial_rotary_factor": part},
            )
            yield {"rope_parameters": {**named, "rope_theta": 50.0, **rope, **inside}}
            yield {**without, "rope_theta": 50.0, "rope_scaling": {**named, **rope, **inside}}
            yield {
                **without,
                "rope_theta": 50.0,
                "rope_scaling": {"type": kind.strip(), **rope},
                **inside,
            }
        rope = {
            **named,
            **with_factors(kind, (head if name != "GPTNeoXForCausalLM" else head // 4) // 2),
        }
        yield {"rope_scaling": rope}
        yield {
            "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": 9.0}}
        }
        yield {"rope_parameters": {FULL: rope}, **beside}
        yield {"rope_parameters": {SLIDING: rope}, **beside}
        yield {
            "rope_parameters": {"rope_theta": 50.0, **rope},
            **dict(
                original_max_position_embeddings=30, attention_factor=0.5, beta_fast=3.0, factor=7.0
            ),
        }
        yield {
            "rope_scaling": {"rope_theta": 50.0, **rope},
            "rope_parameters": {"rope_theta": 9.0, **DEFAULT},
        }
    yield {**without, "rope_theta": 333.0}
    yield {**without, "rope_theta": 333.0, "rotary_emb_base": 50, "rotary_pct": 0.5}
    yield {**without, "rotary_emb_base": 50, "partial_rotary_factor": 0.5}


DEFAULT = {"rope_type": "default"}
REMOVED = object()


def variations(key, value):
    """Other values of an entry, of all types that it may have."""
    yield REMOVED
    yield None
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, value * 2)
    elif (
        isinstance(value, float) and "drop" not in key and "coef" not in key and "noise" not in key
    ):
        yield from (value * 1.7, int(value) + 1)
    elif isinstance(value, str) and value in ACT2FN:
        yield from sorted(ACT2FN.keys())
    elif isinstance(value, list):
        yield from (value[::-1], value[:-1])


def changes(name):
    """All changes of the configuration of a class."""
    base, foreign = configuration(name), {}
    for relative in CLASSES:
        foreign |= configuration(relative)
    for key, value in base.items():
        if key not in TABLES["ignored"]:
            yield from ({key: changed} for changed in variations(key, value))
    for key, value in foreign.items():
        if key not in TABLES["ignored"] and key not in base:
            yield {key: value}
            yield from (
                {key: changed} for changed in variations(key, value) if changed is not REMOVED
            )
    for key, values in ENTRIES.items():
        yield from ({key: value} for value in values)
    if "rope_parameters" in base:
        yield from ropes(name, base)


@cache
def configuration(name):
    kind, sizes = CLASSES[name]
    content = getattr(transformers, kind)(**{**SIZES, **sizes}).to_dict()
    return json.loads(json.dumps({**content, "architectures": [name]}))


def save(name, folder):
    """Save a random model of a class, with biases of every matrix, whether it has them or not."""
    kind, sizes = CLASSES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, kind)(**{**SIZES, **sizes})).half()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    for key in list(tensors):
        bias = key.removesuffix("weight") + "bias"
        if key.endswith("_proj.weight") and bias not in tensors:
            tensors[bias] = (torch.randn(len(tensors[key])) * 0.2).half()
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def write_config(name, folder, changed):
    content = {**configuration(name), **changed}
    content = {key: value for key, value in content.items() if value is not REMOVED}
    (folder / CONFIG).write_text(json.dumps(content))


def outcome(name, folder, changed):
    """The largest difference of a log-probability, or who refuses the configuration, and how."""
    write_config(name, folder, changed)
    cls = getattr(transformers, name)
    try:
        with torch.no_grad():
            model = cls.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            expected = [
                torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1) for prompt in PROMPTS
            ]
    except Exception as error:
        return f"transformers: {type(error).__name__}"
    asked = [
        GenerationRequest(prompt_token_ids=prompt, max_tokens=0, echo_logprobs=True)
        for prompt in PROMPTS
    ]
    try:
        with Engine.from_pretrained(folder, unverified=True) as engine:
            results = engine.run(asked)
    except FlexgenError as error:
        return f"refused: {error}"
    assert all(result.error is None for result in results)
    return max(
        abs(score - logprobs[i, prompt[i + 1]].item())
        for prompt, logprobs, result in zip(PROMPTS, expected, results, strict=True)
        for i, score in enumerate(result.prompt_logprobs[1:])
    )


@pytest.fixture(autouse=True)
def biases_of_other_configurations(monkeypatch):
    """The files have the tensors of all configurations; else what one leaves unread is refused."""
    for module in ("safetensors_checkpoint", "state_dict_checkpoint"):
        monkeypatch.setattr(f"flexgen_helm.checkpoint.{module}.check_unread", lambda *_: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @cache
    def folder(name):
        path = tmp_path_factory.mktemp(name)
        save(name, path)
        return path

    transformers.logging.set_verbosity_error()
    yield folder
    transformers.logging.set_verbosity_warning()


ROTARY = (
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma3ForCausalLM",
)
LONGROPE = dict(rope_type="longrope", rope_theta=50.0, original_max_position_embeddings=20)
# What releases of the engine once got wrong; the whole matrix is below.
FOUND = [
    *((name, {"partial_rotary_factor": 0.5}) for name in ROTARY),
    *(
        (name, {"rope_parameters": REMOVED, "rope_theta": 50.0, "partial_rotary_factor": 0.5})
        for name in ROTARY
    ),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 3.0, "rope_theta": 9.0}}),
    (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", **KIND["yarn"]}, "beta_fast": 3.0, "factor": 7.0},
    ),
    ("LlamaForCausalLM", {"rope_scaling": KIND["llama3"], "original_max_position_embeddings": 30}),
    ("GPTNeoXForCausalLM", {"rope_parameters": REMOVED, "rope_theta": 333.0}),
    (
        "GPTNeoXForCausalLM",
        {"rope_parameters": REMOVED, "rope_theta": 77.0, "rotary_emb_base": 333},
    ),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {FULL: {"rope_type": "default"}}, "rope_theta": 50.0},
    ),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {SLIDING: {"rope_type": "default"}}, "rope_theta": 50.0},
    ),
    ("MistralForCausalLM", {"layer_types": [FULL, SLIDING]}),
    ("MistralForCausalLM", {"attention_bias": True}),
    ("Phi3ForCausalLM", {"mlp_bias": True}),
    ("Qwen2ForCausalLM", {"attention_bias": True}),
    ("Qwen3MoeForCausalLM", {"head_dim": REMOVED}),
    ("GPT2LMHeadModel", {"num_attention_heads": 8}),
    ("BloomForCausalLM", {"num_attention_heads": 8, "num_hidden_layers": 1}),
]


@pytest.mark.parametrize(("name", "changed"), FOUND)
def test_an_entry_means_what_it_means_to_transformers(name, changed, folders):
    found = outcome(name, folders(name), changed)
    assert not isinstance(found, str), found
    assert found < TOLERANCE


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (
            "LlamaForCausalLM",
            {"model_type": "mistral"},
            "LlamaForCausalLM with the model_type 'mistral'",
        ),
        ("LlamaForCausalLM", {"is_causal": False}, "llama with is_causal false"),
        ("GPT2LMHeadModel", {"is_causal": False}, "gpt2 with is_causal false"),
        (
            "BloomForCausalLM",
            {"per_layer_config": {"0": {"n_head": 2}}},
            "bloom with per_layer_config",
        ),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": {FULL: {"rope_type": "default"}}},
            "by kind of layer (full_attention)",
        ),
        ("Qwen2ForCausalLM", {"rope_parameters": {"rope_type": "mrope"}}, "rope type 'mrope'"),
        (
            "Olmo2ForCausalLM",
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 3.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "rope type 'linear' with the partial_rotary_factor 0.5",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
            "Phi-3 with the rope type 'linear'",
        ),
        ("GPTNeoXForCausalLM", {"head_dim": 12}, "head_dim of its own"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
            "not by kind of layer",
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": REMOVED, "rope_scaling": {"type": "linear", "factor": 3.0}},
            "by type instead of rope_type",
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 3.0, "truncate": False}},
            "truncate",
        ),
    ],
)
def test_what_no_record_has_is_refused_by_name(name, changed, message, folders):
    write_config(name, folders(name), changed)
    with pytest.raises(UnsupportedArchitectureError, match=re.escape(message)):
        read_config(folders(name))


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("LlamaForCausalLM", {"factor": 5.0}),
        ("Phi3ForCausalLM", {"attention_factor": 0.6, "factor": 2.0}),
        ("Gemma3ForCausalLM", {}),
        ("GPTNeoXForCausalLM", {}),
    ],
)
def test_longrope_is_served_up_to_the_original_context(name, attention, folders):
    """Beyond it every token has other keys, those of shorter texts beside included; such a text is
    refused alone.
    """
    pairs = 2 if name == "GPTNeoXForCausalLM" else 6
    factors = {
        "short_factor": [1 + i / 4 for i in range(pairs)],
        "long_factor": [4.0 + i for i in range(pairs)],
    }
    rope = {**LONGROPE, **factors, **attention}
    changed = {"rope_parameters": {FULL: rope} if name == "Gemma3ForCausalLM" else rope}
    if name == "Phi3ForCausalLM":  # whose default stands beside the parameters
        changed["original_max_position_embeddings"] = 20
    found = outcome(name, folders(name), changed)
    assert not isinstance(found, str), found
    assert found < TOLERANCE
    asked = [
        GenerationRequest(prompt_token_ids=[5] * length, max_tokens=1) for length in (21, 20, 3)
    ]
    with Engine.from_pretrained(folders(name)) as engine:
        assert engine.model_config.max_positions == 20
        results = engine.run(asked)
    assert [result.error is None for result in results] == [False, True, True]
    assert "window of 20" in str(results[0].error)


@pytest.mark.parametrize(("whole", "text"), [(True, False), (False, True)])
def test_the_head_of_a_model_of_several_parts_is_tied_as_the_whole_says(whole, text):
    config = gemma3_with_images()
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = whole, text
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    content = {**config.to_dict(), "architectures": ["Gemma3ForConditionalGeneration"]}
    assert architecture_of_config(content).read_config(content).tied_head == is_tied == whole


def test_every_record_is_tried():
    assert set(CLASSES) == {architecture.hf_names[0] for architecture in ARCHITECTURES.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_entry_gives_the_numbers_of_transformers_or_a_refusal(name, folders):
    wrong = []
    for changed in share(changes(name), 12):
        found = outcome(name, folders(name), changed)
        if not isinstance(found, str) and not found < TOLERANCE:
            wrong.append((changed, found))
    assert not wrong, "\n".join(f"{changed}: {found:.2g}" for changed, found in wrong)
