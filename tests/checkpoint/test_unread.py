"""Tensors that nothing reads are known to change no number, named, or refused; so are adapters."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from flexgen_helm import progress
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError
from tests.helpers.backend_models import saved
from tests.helpers.model_folders import edit_weights

LAYER = "model.layers.1."
BY_MODULES = "OlmoForCausalLM"


@pytest.fixture(params=["llama", BY_MODULES])
def folder(request, tiny, tmp_path):
    """A model that runs by equations, and one by modules of `transformers`."""
    if request.param == BY_MODULES:
        saved(request.param, tmp_path / "source")
        return tmp_path / "source"
    return shutil.copytree(tiny(request.param).path, tmp_path / "source")


@pytest.mark.parametrize(
    "name",
    ["self_attn.q_proj.bias", "self_attn.q_proj.lora_B.default.weight", "mlp.down_proj.scale"],
)
def test_what_would_change_a_number_is_refused_by_name(folder, name):
    edit_weights(folder, lambda tensors: tensors.update({LAYER + name: torch.ones(48)}))
    with pytest.raises(CheckpointError, match=f"{LAYER}{name} would change what is computed"):
        open_checkpoint(folder)


def test_what_changes_no_number_is_passed_over_and_another_models_tensors_are_named(folder):
    more = {
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4),
        f"{LAYER}self_attn.o_proj.bias": torch.zeros(48),
        "vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.ones(8, 8),
        "v_head.summary.weight": torch.ones(1, 48),
    }
    edit_weights(folder, lambda tensors: tensors.update(more))
    events = []
    with progress.observed_by(events.append):
        open_checkpoint(folder)
    assert any(
        "v_head.summary, vision_tower.encoder" in getattr(event, "text", "") for event in events
    )


@pytest.mark.parametrize(
    "wrapper, old, new",
    [
        ("_orig_mod.", "", "_orig_mod."),  # torch.compile of the whole model, and of each layer
        ("_orig_mod.", "layers.1.", "layers.1._orig_mod."),
        ("module.", "", "module."),
        ("_fsdp_wrapped_module.", "layers.0.", "layers.0._fsdp_wrapped_module."),
        ("policy.", "", "policy."),
    ],
)
def test_the_part_of_names_that_a_wrapper_left_is_named(folder, wrapper, old, new):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    edit_weights(folder, rename)
    assert any(wrapper in name for name in load_file(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match=f"save the model again without '{wrapper}'"):
        open_checkpoint(folder)


def test_an_adapter_beside_a_base_or_alone_is_refused(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in (None, "model.safetensors", "config.json"):
        if name:
            (folder / name).unlink()
        with pytest.raises(CheckpointError, match="adapter_config.json describes an adapter"):
            open_checkpoint(folder)
