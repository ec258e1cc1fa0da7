"""On a CUDA device: types and placements beside `transformers`, and delays, which change no bit.
`make gpu-check`.
"""

import time

import pytest
import torch
import transformers
from packaging.version import Version

from flexgen_helm.offload.copy_engine import CudaCopyEngine
from tests.cuda.engine_runs import DISK, HOST, LIMITS, THIRDS, assert_close, requests, run
from tests.helpers.backend_models import saved
from tests.helpers.layers import replace_layers
from tests.helpers.tiny_models import VARIANTS, TinyModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device (make gpu-check)"
    ),
]
PLACEMENTS = {
    "resident": dict(limits=LIMITS),
    "host": dict(limits=LIMITS, policy=HOST, schedule="zigzag", cpu_attention=False),
    "host attends": dict(limits=LIMITS, policy=HOST, schedule="zigzag"),
    "thirds": dict(limits=LIMITS, policy=THIRDS, schedule="zigzag", cpu_attention=False),
    "disk": dict(limits=LIMITS, policy=DISK, schedule="zigzag"),
}
DTYPES, FEW = ("float16", "bfloat16", "float32"), ("opt", "llama", "gemma2")
CYCLES = 1_500_000  # 0.8 ms of a GPU


@pytest.mark.parametrize(
    "variant, dtype, placement",
    [
        *(
            (variant, "float16", placement)
            for variant in VARIANTS
            for placement in ("resident", "thirds")
        ),
        *(
            (variant, "float16", placement)
            for variant in FEW
            for placement in ("host", "host attends", "disk")
        ),
        *((variant, dtype, "resident") for variant in ("mixtral", "bloom") for dtype in DTYPES[1:]),
        *((variant, dtype, "thirds") for variant in FEW for dtype in DTYPES[1:]),
    ],
)
def test_scores_equal_transformers(tiny, tmp_path, variant, dtype, placement):
    model, dtype = tiny(variant), getattr(torch, dtype)
    results, _ = run(
        model.path, requests(9, 70, 6), dtype, offload_dir=tmp_path, **PLACEMENTS[placement]
    )
    assert_close(model, results, dtype)


@pytest.mark.parametrize("placement", ["resident", "thirds"])
@pytest.mark.parametrize("name", ["CohereForCausalLM", "GptOssForCausalLM"])
def test_modules_of_transformers_have_its_scores(tmp_path, name, placement):
    """Mixtures by modules take a later release than a machine may have."""
    if name == "GptOssForCausalLM" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip(f"transformers {transformers.__version__} has no experts that can be offloaded")
    model = TinyModel(tmp_path / "model", saved(name, tmp_path / "model"))
    settings = {**PLACEMENTS[placement], "offload_dir": tmp_path / "tiers"}
    results, _ = run(model.path, requests(6, 30, 4, tokens=60), torch.float16, **settings)
    assert_close(model, results, torch.float16)


def late_products(patch):
    """The computing stream is behind the copies."""

    def late(compute, *_):
        torch.cuda._sleep(CYCLES)
        try:
            return compute()
        finally:
            torch.cuda._sleep(CYCLES)

    replace_layers(patch, late)


def late_copies(patch):
    """Each copy is behind the computing stream, and its thread behind it."""
    copy = CudaCopyEngine._copy

    def late(self, *arguments):
        with torch.cuda.stream(self._stream()):
            torch.cuda._sleep(CYCLES)
        time.sleep(1e-3)
        return copy(self, *arguments)

    patch.setattr(CudaCopyEngine, "_copy", late)


@pytest.mark.parametrize(
    "delay", [lambda patch: None, late_products, late_copies], ids=["none", "products", "copies"]
)
@pytest.mark.parametrize(
    "placement, precision",
    [*((name, None) for name in PLACEMENTS), ("thirds", "4bit"), ("host", "4bit-s")],
)
def test_a_delay_changes_no_bit(tiny, tmp_path, monkeypatch, placement, precision, delay):
    """An order that is missing shows as another number. Without a delay: equal runs are equal."""

    def answer():
        settings = {**PLACEMENTS[placement], "precision": precision, "offload_dir": tmp_path}
        results, _ = run(tiny("llama").path, requests(7, 60, 5), torch.float16, **settings)
        return [
            (result.prompt_logprobs, [c.logprobs for c in result.completions]) for result in results
        ]

    expected = answer()
    delay(monkeypatch)
    assert answer() == expected
