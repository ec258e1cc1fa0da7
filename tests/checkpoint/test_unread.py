"""Tensors that nothing reads are known to change no number, named, or refused; so are adapters."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_helm import progress
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError
from tests.helpers.backend_models import saved

LAYER = "model.layers.1."
BY_MODULES = "OlmoForCausalLM"


@pytest.fixture(params=["llama", BY_MODULES])
def edited(request, tiny, tmp_path):
    """A copy of a model that has more tensors: one that runs by equations, one by modules of `transformers`."""

    def copy(more, rename=lambda name: name):
        source = tmp_path / "source"
        if request.param == BY_MODULES:
            saved(request.param, source)
        else:
            shutil.copytree(tiny(request.param).path, source)
        tensors = load_file(source / "model.safetensors")
        tensors = {rename(name): tensor for name, tensor in (tensors | more).items()}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        return source

    return copy


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_proj.bias",
        "self_attn.q_proj.lora_B.default.weight",
        "mlp.down_proj.scale",
    ],
)
def test_what_would_change_a_number_is_refused_by_name(edited, name):
    folder = edited({LAYER + name: torch.ones(48)})
    with pytest.raises(CheckpointError, match=f"{LAYER}{name} would change what is computed"):
        open_checkpoint(folder)


def test_what_changes_no_number_is_passed_over_and_another_models_tensors_are_named(edited):
    folder = edited(
        {
            f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4),
            f"{LAYER}self_attn.o_proj.bias": torch.zeros(48),
            "vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.ones(8, 8),
            "v_head.summary.weight": torch.ones(1, 48),
        }
    )
    events = []
    with progress.observed_by(events.append):
        open_checkpoint(folder)
    texts = [event.text for event in events if isinstance(event, progress.Message)]
    assert any("v_head.summary, vision_tower.encoder" in text for text in texts)


@pytest.mark.parametrize(
    ("wrapper", "old", "new"),
    [
        ("_orig_mod.", "", "_orig_mod."),  # torch.compile of the whole model, and of each layer
        ("_orig_mod.", "layers.1.", "layers.1._orig_mod."),
        ("module.", "", "module."),
        ("_fsdp_wrapped_module.", "layers.0.", "layers.0._fsdp_wrapped_module."),
        ("policy.", "", "policy."),
    ],
)
def test_the_part_of_names_that_a_wrapper_left_is_named(edited, wrapper, old, new):
    folder = edited({}, lambda name: name.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=f"save the model again without '{wrapper}'"):
        open_checkpoint(folder)


def test_an_adapter_beside_a_base_or_alone_is_refused(edited, tmp_path):
    folder = edited({})
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "adapter_config.json", tmp_path / "alone")
    for path in (folder, tmp_path / "alone"):
        with pytest.raises(CheckpointError, match="adapter_config.json describes an adapter"):
            open_checkpoint(path)
