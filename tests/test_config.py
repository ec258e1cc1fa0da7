"""One record of options, three surfaces: Python keywords, flags of the command line, arguments of a
deployment.
"""

from __future__ import annotations

import inspect
import json
import math

import pytest

from flexgen_helm import Engine, MemoryLimits, Policy
from flexgen_helm.config import OPTIONS, EngineConfig
from flexgen_helm.errors import UsageError
from flexgen_helm.planner.schedules import SCHEDULES
from flexgen_helm.plugin.model_names import ARGUMENTS, find_model
from flexgen_helm.quant.precisions import PRECISIONS

# What users write today; a name that is missing here is new, a name that is missing there breaks
# them.
KEYWORDS = {
    "revision", "precision", "limits", "policy", "schedule", "offload_dir", "device", "overlap",
    "cpu_attention", "weights", "seed", "link_gb_s", "disk_gb_s", "pipeline_layers", "max_latency",
    "apply_chat_template", "chat_template_kwargs",
    "system_prompt", "thinking_budget", "unverified", "batch_invariant", "generation_config",
}  # fmt: skip
FLAGS = {
    "--precision", "--policy", "--schedule", "--gpu-memory", "--cpu-memory", "--disk",
    "--offload-dir", "--device", "--link", "--disk-rates", "--pipeline-layers", "--no-overlap",
    "--no-cpu-attention", "--dummy-weights", "--max-latency", "--chat-template",
    "--chat-template-kwargs", "--system-prompt", "--thinking-budget", "--unverified",
    "--batch-invariant", "--generation-config",
}  # fmt: skip


def test_all_surfaces_have_the_options_of_the_record():
    assert set(OPTIONS) == KEYWORDS
    parameters = inspect.signature(Engine.from_pretrained).parameters
    assert list(parameters) == ["name_or_path", *OPTIONS]
    for name, spec in OPTIONS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameters[name].default, parameters[name].annotation) == (spec.default, spec.type)
        assert f"\n{name}: {spec.metadata['help']}" in Engine.from_pretrained.__doc__
    assert ("path", *OPTIONS) == ARGUMENTS
    assert {flag.name for spec in OPTIONS.values() for flag in spec.metadata["flags"]} == FLAGS


def test_every_default_is_its_own_parsed_value():
    config = EngineConfig()
    assert all(getattr(config, name) == spec.default for name, spec in OPTIONS.items())
    assert EngineConfig(**dict.fromkeys(OPTIONS)) == config  # null in YAML means the default
    assert (
        EngineConfig(**{name: value for name, value in vars(config).items() if value is not None})
        == config
    )


@pytest.mark.parametrize(
    "options, same",
    [
        ({"policy": "1x2,0,100,0,100,0,100"}, {"policy": Policy(1, 2)}),
        ({"limits": {"gpu": "1GiB", "cpu": None}}, {"limits": MemoryLimits(gpu=1 << 30)}),
        ({"link_gb_s": [12, 8.5], "device": "sim", "limits": {"gpu": 5}},
         {"link_gb_s": "12,8.5", "device": "sim", "limits": MemoryLimits(gpu=5)}),
        ({"max_latency": "3", "seed": "7"}, {"max_latency": 3.0, "seed": 7}),
    ],
)  # fmt: skip
def test_text_yaml_and_python_values_make_equal_records(options, same):
    assert EngineConfig(**options) == EngineConfig(**same)
    assert hash(EngineConfig(**options)) == hash(EngineConfig(**same))


def test_a_precision_may_be_a_record_of_formats():
    assert EngineConfig(precision=PRECISIONS["4bit"]).precision is PRECISIONS["4bit"]


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"precision": "3bit"},
            "precision '3bit' is not available.*take one of fp16, fp16-s, 8bit",
        ),
        ({"policy": "4x1,50,50"}, "not of the form"),
        ({"policy": 4}, "not of the form"),
        ({"precision": 4}, "precision 4 is not available"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "without messages, add_gen"),
        (
            {"schedule": "spiral"},
            f"take {', '.join(('auto', *SCHEDULES)[:-1])} or {list(SCHEDULES)[-1]}",
        ),
        ({"limits": MemoryLimits(cpu=-1)}, "the limit of the cpu tier, -1, is no size"),
        ({"limits": {"cpu": True}}, "the limit of the cpu tier, True, is no size"),
        ({"limits": 5}, "limits 5 must be sizes"),
        ({"device": "tpu"}, "take auto, cpu"),
        ({"device": "sim"}, "--gpu-memory"),
        ({"link_gb_s": (1.0, 1.0)}, "add --device sim"),
        ({"link_gb_s": "1,2,3"}, "two rates in GB/s, in and out"),
        ({"disk_gb_s": (1.0, 1.0)}, "add --device sim or leave --disk-rates out"),
        ({"disk_gb_s": "1"}, "two rates in GB/s, of reads and writes"),
        ({"overlap": 1}, "overlap 1 must be true or false"),
        ({"weights": "random"}, "take pretrained or dummy"),
        ({"seed": 1.5}, "seed 1.5 must be an integer"),
        ({"max_latency": "soon"}, "max_latency 'soon' must be a number of seconds"),
        ({"max_latency": 0}, "seconds, more than 0"),
        ({"max_latency": math.inf}, "seconds, more than 0"),
        ({"max_latency": True}, "seconds, more than 0"),
        ({"offload_dir": ""}, "offload_dir '' must be the path of a folder"),
        ({"revision": 123456}, "revision 123456 must be a text"),
        ({"system_prompt": " "}, "a text that is not empty"),
        ({"thinking_budget": -1}, "must be an integer, 0 or more"),
        ({"max_latency": 1, "policy": Policy(1, 1)}, "leave it or the policy out"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_in_a_sentence(options, says):
    with pytest.raises(UsageError, match=says):
        EngineConfig(**options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="kv_dtype"):
        Engine.from_pretrained("opt-125m", weights="dummy", kv_dtype="fp16")
    with pytest.raises(
        UsageError,
        match=("unknown argument 'kv_dtype'; known are path, revision, precision, policy"),
    ):
        find_model("flexgen/opt-125m", {"kv_dtype": "fp16"})


def test_a_name_of_the_users_own_file_brings_its_options(tiny, tmp_path, monkeypatch):
    file = tmp_path / "models.yaml"
    entries = {
        "mine": {"path": str(tiny("llama").path), "precision": "4bit", "offload_dir": str(tmp_path)}
    }
    file.write_text(json.dumps(entries))
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(file))
    for options, precision in [
        ({}, "4bit"),
        ({"precision": "fp16"}, "fp16"),
        ({"precision": None}, "4bit"),
    ]:
        with Engine.from_pretrained("mine", **options) as engine:
            assert (engine.name, engine.precision) == ("mine", precision)
