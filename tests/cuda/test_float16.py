"""bfloat16 checkpoints on a GPU without bfloat16 products: float16 where it has the values, and no
silent overflow.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flexgen_helm import Engine, Policy
from flexgen_helm.errors import NumericalError
from flexgen_helm.progress import Message, observed_by
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import LIMITS, assert_close, requests
from tests.helpers.tiny_models import TinyModel

T4, A100 = (7, 5), (8, 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU in host memory of a capability, with its rates by dtype: before Ampere, bfloat16 is
    emulated.
    """

    def of(capability):
        rates = {
            torch.float16: 8.0,
            torch.bfloat16: 8.0 if capability >= A100 else 0.5,
            torch.float32: 1.0,
        }
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(
            "flexgen_helm.kernels.products.matmul_flops", lambda device, dtype: rates[dtype]
        )

    with cuda_in_host_memory() as device:
        yield of
    device.check()


def in_bfloat16(model, folder, change=lambda name, tensor: tensor):
    """Save the model's weights in bfloat16, each changed; the reference has the same values in
    float32.
    """
    shutil.copytree(model.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"})
    )
    for file in folder.glob("*.safetensors"):
        tensors = {
            name: change(name, tensor.float()).bfloat16()
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return TinyModel(
        folder,
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval(),
    )


def answered(model, asked=None, **settings):
    """Return results, the record, and warnings."""
    events = []
    with (
        observed_by(events.append),
        Engine.from_pretrained(
            model.path, device="cuda", **{"limits": LIMITS, **settings}
        ) as engine,
    ):
        results = engine.run(asked or requests(4, new=4))
        record = engine.last_run
    warnings = [event.text for event in events if isinstance(event, Message) and event.is_warning]
    return results, record["hardware"], warnings


@pytest.mark.parametrize(
    "variant, name, reason",
    [("llama", "float16", "float16 has the values")]
    + [(variant, "float32", f"{variant} exceed float16") for variant in ("gemma2", "gemma3")],
)
def test_a_t4_computes_bfloat16_weights_in_float16_unless_they_overflow(
    tiny, tmp_path, gpu, variant, name, reason
):
    model = in_bfloat16(tiny(variant), tmp_path / "bf16")
    gpu(T4)
    results, hardware, warnings = answered(model)
    assert (
        hardware["compute_dtype"] == name
        and reason in hardware["compute_dtype_reason"]
        and not warnings
    )
    assert_close(model, results, getattr(torch, name))


@pytest.mark.parametrize(
    "placement, change, reason",
    [
        (
            "resident",
            lambda name, x: x * 1e6 if "down_proj" in name else x,
            "too large for float16",
        ),
        (
            "thirds",
            lambda name, x: x * 1e-6 if "down_proj" in name else x,
            "of its norm in float16",
        ),
    ],
)
def test_weights_that_float16_has_not_are_multiplied_in_float32(
    tiny, tmp_path, gpu, change, reason, placement
):
    """Found while the weights are read; the engine starts again, and says so."""
    model = in_bfloat16(tiny("llama"), tmp_path / "bf16", change)
    gpu(T4)
    settings = (
        {}
        if placement == "resident"
        else dict(policy=Policy(3, 2, *(0.3,) * 6), offload_dir=tmp_path)
    )
    results, hardware, warnings = answered(model, **settings)
    assert hardware["compute_dtype"] == "float32" and reason in hardware["compute_dtype_reason"]
    assert len(warnings) == 1 and "down" in warnings[0] and reason in warnings[0]
    assert all(result.error is None for result in results)


@pytest.mark.parametrize("variant", ["opt", "olmo2"])
def test_an_overflow_of_hidden_states_is_no_score(tiny, tmp_path, gpu, variant):
    """Weights that float16 has, whose products it has not: each request fails by name, and none
    gets a number.
    """

    def large(name, x):
        return (
            x * 3e4
            if x.ndim == 2 and any(part in name for part in ("down_proj", "fc2", "4h_to_h"))
            else x
        )

    model = in_bfloat16(tiny(variant), tmp_path / "bf16", large)
    reference = model.reference(torch.tensor([[3, 4, 5, 6]]), output_hidden_states=True)
    assert reference.logits.isfinite().all(), "float32 and bfloat16 do not overflow"
    gpu(T4)
    results, hardware, _ = answered(model)
    assert hardware["compute_dtype"] == "float16"
    overflowed = [result for result in results if result.error is not None]
    assert all(isinstance(result.error, NumericalError) for result in overflowed)
    assert overflowed and all(
        "compute capability 8.0" in str(result.error) for result in overflowed
    )
    for result in results:
        if result.error is None:  # the norm after the blocks holds all states down
            tokens = [*result.prompt_token_ids, *result.completions[0].token_ids]
            scores = [*result.prompt_logprobs[1:], *result.completions[0].logprobs]
            exact = model.logprobs(tokens)
            assert (
                max(abs(s - exact[i, t].item()) for i, (s, t) in enumerate(zip(scores, tokens[1:])))
                < 0.5
            )
