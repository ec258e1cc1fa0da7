"""The Triton kernels through Triton's own launches and compiler, for GPUs from the T4 to the H100, without one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import PRECISIONS

triton = pytest.importorskip("triton")

from flexgen_helm.quant import triton_launches  # noqa: E402
from tests.helpers.shares import share  # noqa: E402
from tests.helpers.triton_driver import SHARED_MEMORY, instructions, recording_driver, resources  # noqa: E402
from tests.helpers.triton_stand_in import run  # noqa: E402

OURS, PAPER = PRECISIONS["4bit"].weights, PRECISIONS["paper-4bit"].weights
EIGHT, EIGHT_IN = PRECISIONS["8bit"].weights, PRECISIONS["8bit"].tables
ALONG_WORDS, ALONG_PAIRS = GroupFormat(4, 32, "in", "word", "error"), GroupFormat(4, 64, "in")
ROWS, WIDTH = 1024, 4096
TOKENS = (0, 1, 2, 8, 16, 32, 64)  # 0 dequantizes
ALL = [
    (capability, fmt, tokens, dtype)
    for capability in SHARED_MEMORY
    for fmt in (OURS, PAPER, ALONG_WORDS, ALONG_PAIRS, EIGHT, EIGHT_IN)
    for tokens in TOKENS
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    if (capability >= 80 or dtype != torch.bfloat16) and (fmt.axis == "out" or not tokens)
]
# Each kernel once for every GPU, and what takes the most registers.
QUICK = [(capability, OURS, tokens, torch.float16) for capability in SHARED_MEMORY for tokens in (0, 1, 8)]
QUICK += [
    (75, PAPER, 0, torch.float16),
    (75, PAPER, 1, torch.float16),
    (80, OURS, 64, torch.float16),
    (75, OURS, 64, torch.float16),
    (75, EIGHT, 1, torch.float16),
    (80, EIGHT, 64, torch.float16),
    (80, EIGHT_IN, 0, torch.float16),
]


def launch(monkeypatch, capability, fmt, tokens, dtype, rows=ROWS, width=WIDTH):
    """Launch on a GPU that is not there; returns the launches."""
    device = triton_launches.Device(processors=8, has_tensor_cores=capability >= 80)
    monkeypatch.setattr(triton_launches, "_describe", lambda _: device)
    packed = torch.zeros(fmt.num_stripes(rows), fmt.stripe_bytes(width), dtype=torch.uint8)
    with recording_driver(capability) as driver:
        if tokens:
            triton_launches.matmul(torch.zeros(tokens, width, dtype=dtype), packed, fmt, rows)
        else:
            triton_launches.dequantize_into(packed, fmt, torch.zeros(rows, width, dtype=dtype))
    return driver.launched


def check(monkeypatch, tmp_path, capability, fmt, tokens, dtype, width=WIDTH):
    launched = launch(monkeypatch, capability, fmt, tokens, dtype, width=width)
    tensor_cores = capability >= 80 and dtype != torch.float32
    # A product may join partial sums; nothing else is launched, however large the matrix is.
    assert len(launched) == 1 or (tokens and [one.kernel.name for one in launched[1:]] == ["join"])
    kernel = launched[0].kernel
    # Codes are loaded from 8 a load on, none byte by byte.
    loads = instructions(kernel, r"ld\.global|cp\.async\.c[ag]")
    assert loads and not any(name.endswith(("b8", "u8", "s8")) for name in loads)
    # One by one are read only scales: of groups along a row, which lie apart, and where a thread has one of a tile.
    narrow = sum(count for name, count in loads.items() if name.endswith(".b16"))
    assert narrow <= sum(loads.values()) * (1 / 4 if fmt.axis == "out" else 2 / 3)
    found = resources(kernel, tmp_path)
    # Triton 3.8 keeps two registers of one loop in float32 on the stack, on GPUs that would take float16.
    allowed = 8 if capability == 90 and dtype == torch.float32 else 0
    assert found.stack_bytes <= allowed and found.registers <= 255
    if tokens > 2 and tensor_cores:
        assert instructions(kernel, r"mma\.sync|wgmma\.mma_async")
    if not tokens:  # whole lines are written
        assert set(instructions(kernel, r"st\.global")) == {"st.global.v4.b32"}
        assert not instructions(kernel, r"fma\."), "a fused multiply-add has other bits than plain torch"


@pytest.mark.fast(6)
@pytest.mark.parametrize("capability, fmt, tokens, dtype", QUICK, ids=str)
def test_kernels_compile_without_spills_and_with_wide_loads(monkeypatch, tmp_path, capability, fmt, tokens, dtype):
    check(monkeypatch, tmp_path, capability, fmt, tokens, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("capability, fmt, tokens, dtype", share(ALL, 5), ids=str)
def test_all_kernels_compile_without_spills_and_with_wide_loads(monkeypatch, tmp_path, capability, fmt, tokens, dtype):
    check(monkeypatch, tmp_path, capability, fmt, tokens, dtype)


@triton.jit
def annotated(packed: Any, block: triton.language.constexpr) -> None:
    triton.language.store(packed, 0)


def test_an_annotation_that_the_compiler_does_not_know_is_noticed():
    """The defect that no interpreter shows: Triton resolves annotations as it compiles."""
    with recording_driver(80), pytest.raises(triton.CompilationError, match="Any"):
        annotated[(1,)](torch.zeros(1, dtype=torch.uint8), block=1)


def test_spilled_registers_are_noticed(monkeypatch, tmp_path):
    run = triton_launches.Launch.run

    def with_few_registers(self, *arguments, fused):
        run(replace(self, constants={**self.constants, "maxnreg": 40}), *arguments, fused=fused)

    monkeypatch.setattr(triton_launches.Launch, "run", with_few_registers)
    with pytest.raises(AssertionError, match="stack_bytes"):
        check(monkeypatch, tmp_path, 80, OURS, 1, torch.float16)


def test_narrow_loads_are_noticed(monkeypatch, tmp_path):
    """Rows of an odd number of bytes can only be loaded byte by byte."""
    with pytest.raises(AssertionError, match="b8"):
        check(monkeypatch, tmp_path, 80, OURS, 1, torch.float16, width=WIDTH - 1)


def test_a_matrix_of_a_large_model_is_dequantized_by_one_launch(monkeypatch):
    """As many programs as it has stripes, times its width over 1,024."""
    (whole,) = launch(monkeypatch, 90, OURS, 0, torch.float16, rows=28672, width=1024)
    assert whole.grid == (28672 // 32, 1, 1)


@pytest.fixture
def undescribed_devices():
    """The description of a device is kept for the process, and other tests have had theirs."""
    triton_launches._describe.cache_clear()
    yield
    triton_launches._describe.cache_clear()


def test_launches_are_made_on_the_tensors_device(monkeypatch, undescribed_devices):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device))
    rates = dict(clock_rate=1_590_000, memory_clock_rate=5_001_000, memory_bus_width=256)
    properties = (
        SimpleNamespace(multi_processor_count=40, major=7, minor=5, **rates),
        SimpleNamespace(multi_processor_count=132, major=9, minor=0, **{**rates, "clock_rate": 0}),
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    second = torch.device("cuda:1")
    triton_launches._on_device(SimpleNamespace(is_cuda=True, device=second))
    assert entered == [second]
    assert triton_launches._describe(torch.device("cuda:0")) == triton_launches.Device(40, False, 32, 128)
    assert triton_launches._describe(second) == triton_launches.Device(132, has_tensor_cores=True), "it does not say"


@pytest.mark.parametrize("fmt", [OURS, PAPER], ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_stand_in_for_other_devices_computes_what_kernels_do(monkeypatch, fmt, tokens):
    """It takes the place of a launch on devices in host memory, so that all host code of the kernels runs there."""
    rows, width = 70, 2200
    packed, x = quantize(torch.randn(rows, width) * 0.3, fmt), torch.randn(tokens, width)
    weights, bias = dequantize(packed, fmt, rows, width), torch.randn(rows)
    launches = []
    monkeypatch.setattr(
        triton_launches.Launch, "run", lambda self, *a, **k: launches.append(self) or run(self, *a, **k)
    )
    assert torch.equal(triton_launches.dequantize_into(packed, fmt, torch.empty(rows, width)), weights)
    for processors in (1, 1000):
        device = triton_launches.Device(processors, has_tensor_cores=False)
        monkeypatch.setattr(triton_launches, "_describe", lambda _, device=device: device)
        y = triton_launches.matmul(x, packed, fmt, rows, bias)
        assert torch.allclose(y, x @ weights.t() + bias, atol=1e-4)
    # The columns of the second product are split, unless the bound on partial sums forbids it.
    joined = launches[-1].kernel is triton_launches.join
    assert joined == (launches[2].grid[1] > 1) and (joined or tokens > 1)


def test_products_with_no_rows_and_with_many(monkeypatch):
    device = triton_launches.Device(8, has_tensor_cores=False, rows_16_bits=32, rows_float32=192)
    monkeypatch.setattr(triton_launches, "_describe", lambda _: device)
    launches = []
    monkeypatch.setattr(
        triton_launches.Launch, "run", lambda self, *a, **k: launches.append(self) or run(self, *a, **k)
    )
    packed, x = quantize(torch.randn(64, 64), OURS), torch.randn(192, 64)
    assert triton_launches.matmul(x[:0], packed, OURS, 64).shape == (0, 64) and not launches
    assert triton_launches.matmul(x[:33].half(), packed, OURS, 64) is None, "dequantizing is faster"
    assert triton_launches.matmul(torch.zeros(193, 64), packed, OURS, 64) is None
    bias = torch.randn(64)
    y = triton_launches.matmul(x[:150], packed, OURS, 64, bias)
    assert torch.allclose(y, x[:150] @ dequantize(packed, OURS, 64, 64).t() + bias, atol=1e-4)
    assert [one.constants["padded_tokens"] for one in launches if one.kernel is not triton_launches.join] == [
        64,
        64,
        32,
    ]
