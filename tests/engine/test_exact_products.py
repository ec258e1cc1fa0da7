"""An engine computes the same whatever a program has set of PyTorch's process state, or refuses by
name.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from flexgen_helm import Engine, FlexgenError, GenerationRequest
from flexgen_helm.hardware.exact_products import exact_products
from flexgen_helm.models.decoder import alibi_slopes, inverse_frequencies
from flexgen_helm.models.decoder_config import RopeConfig
from tests.helpers.parity import assert_equals_reference

REQUEST = GenerationRequest(
    prompt_token_ids=[5, 9, 33, 120], max_tokens=4, echo_logprobs=True, ignore_eos=True
)


@contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


STATES = {
    "float64": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "bfloat16": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "medium": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "mkldnn alone": lambda: setting(
        lambda: "none", partial(setattr, torch.backends.mkldnn.matmul, "fp32_precision"), "bf16"
    ),
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
}


def process_state():
    try:
        level = torch.get_float32_matmul_precision()
    except RuntimeError:  # it is not that of all libraries
        level = "mixed"
    return (
        torch.get_default_dtype(),
        level,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_default_device(),
    )


@pytest.mark.parametrize("state", STATES)
def test_results_do_not_depend_on_what_the_program_has_set(tiny, state):
    """Opened and run inside, and run outside what was opened inside; the program's setting is as it
    was.
    """
    model = tiny("llama")
    with STATES[state]():
        before = process_state()
        engine = Engine.from_pretrained(model.path)
        inside = engine.run([REQUEST])[0]
        assert before == process_state()
    with engine:
        outside = engine.run([REQUEST])[0]
    for result in (inside, outside):
        assert result.error is None
        assert_equals_reference(model, REQUEST.prompt_token_ids, REQUEST, result)


def test_tables_do_not_follow_a_default_dtype_that_another_thread_sets():
    rope = RopeConfig(10000.0, "factors", factors=(1.1, 2.3))

    def tables():
        return [alibi_slopes(12), inverse_frequencies(rope, 4)]

    expected = tables()
    with STATES["bfloat16"]():
        found = tables()
    assert all(
        torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found, expected, strict=True)
    )


def test_engines_in_threads_of_their_own_keep_products_exact_until_the_last_one_ends():
    """Neither ends a setting under which another one computes, in whatever order they end."""
    settings = torch.get_float32_matmul_precision, torch.get_default_dtype
    with STATES["medium"](), STATES["bfloat16"]():
        first, second = exact_products(), exact_products()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(first.__enter__).result()
            with second:
                thread.submit(first.__exit__, None, None, None).result()
                assert [get() for get in settings] == ["highest", torch.float32]
            assert [get() for get in settings] == ["medium", torch.bfloat16]


def test_sums_and_convolutions_of_a_device_are_exact_meanwhile():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    names = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"

    def settings():
        return [getattr(matmul, name) for name in names], conv.fp32_precision

    before = settings()
    assert before == ([True, True], "tf32"), "PyTorch's own"
    with exact_products():
        assert settings() == ([False, False], "ieee")
    assert settings() == before


def test_a_forked_child_is_refused_by_name(tiny):
    with Engine.from_pretrained(tiny("llama").path) as engine:
        if (child := os.fork()) == 0:
            try:
                engine.run([REQUEST])
            except FlexgenError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.fast(1)
@pytest.mark.parametrize("variables", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "TRUE"}])
def test_products_are_right_where_openmp_gives_fewer_threads(variables):
    """oneDNN's are not, where PyTorch asks for more."""
    program = (
        "import torch; torch.set_num_threads(2); from flexgen_helm.kernels import products\n"
        "x, w = (torch.randn(70, 512, generator=torch.Generator().manual_seed(i)) for i in (1, "
        "2))\n"
        "y = products.linear(x, w, None)\n"
        "assert (y - (x.double() @ w.double().T)).abs().max() < 1e-3"
    )
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, check=True, timeout=120
    )
