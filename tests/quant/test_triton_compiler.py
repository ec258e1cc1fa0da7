"""The Triton kernels through Triton's own launches and compiler, for GPUs from the T4 to the H100, without one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import PRECISIONS

triton = pytest.importorskip("triton")

from flexgen_helm.quant import triton_launches  # noqa: E402
from tests.helpers.blocks import EVERY_FORMAT, drawn_blocks  # noqa: E402
from tests.helpers.shares import share  # noqa: E402
from tests.helpers.triton_driver import SHARED_MEMORY, instructions, recording_driver, resources  # noqa: E402
from tests.helpers.triton_stand_in import run  # noqa: E402

OURS, PAPER = PRECISIONS["4bit"].weights, PRECISIONS["paper-4bit"].weights
EIGHT, EIGHT_IN = PRECISIONS["8bit"].weights, PRECISIONS["8bit"].tables
ALONG_WORDS, ALONG_PAIRS = GroupFormat(4, 32, "in", "word", "error"), GroupFormat(4, 64, "in")
ROWS, WIDTH = 1024, 4096
ALL = [
    (capability, fmt, dtype)
    for capability in SHARED_MEMORY
    for fmt in (OURS, PAPER, ALONG_WORDS, ALONG_PAIRS, EIGHT, EIGHT_IN)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    if capability >= 80 or dtype != torch.bfloat16
]
QUICK = [(75, PAPER, torch.float16), (80, EIGHT_IN, torch.float16)]
QUICK += [(capability, OURS, torch.float16) for capability in SHARED_MEMORY]
BLOCKS = [
    (capability, fmt, dtype)
    for capability in SHARED_MEMORY
    for fmt in EVERY_FORMAT
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    if capability >= 80 or dtype != torch.bfloat16
]


def launch(capability, fmt, dtype, rows=ROWS, width=WIDTH):
    """Dequantize on a GPU that is not there; return the launches."""
    packed = torch.zeros(fmt.num_stripes(rows), fmt.stripe_bytes(width), dtype=torch.uint8)
    with recording_driver(capability) as driver:
        triton_launches.dequantize_into(packed, fmt, torch.zeros(rows, width, dtype=dtype))
    return driver.launched


def check(tmp_path, capability, fmt, dtype, width=WIDTH):
    (launched,) = launch(capability, fmt, dtype, width=width)
    kernel = launched.kernel
    # Codes are loaded from 8 a load on, none byte by byte.
    loads = instructions(kernel, r"ld\.global|cp\.async\.c[ag]")
    assert loads and not any(name.endswith(("b8", "u8", "s8")) for name in loads)
    # One by one are read only scales: of groups along a row, which lie apart.
    narrow = sum(count for name, count in loads.items() if name.endswith(".b16"))
    assert narrow <= sum(loads.values()) * (1 / 4 if fmt.axis == "out" else 2 / 3)
    found = resources(kernel, tmp_path)
    assert not found.stack_bytes and found.registers <= 255
    # Whole lines are written.
    assert set(instructions(kernel, r"st\.global")) == {"st.global.v4.b32"}
    assert not instructions(kernel, r"fma\."), "a fused multiply-add has other bits than plain torch"


@pytest.mark.fast(6)
@pytest.mark.parametrize("capability, fmt, dtype", QUICK, ids=str)
def test_kernels_compile_without_spills_and_with_wide_loads(tmp_path, capability, fmt, dtype):
    check(tmp_path, capability, fmt, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("capability, fmt, dtype", share(ALL, 5), ids=str)
def test_all_kernels_compile_without_spills_and_with_wide_loads(tmp_path, capability, fmt, dtype):
    check(tmp_path, capability, fmt, dtype)


def check_blocks(tmp_path, capability, fmt, dtype):
    (launched,) = launch(capability, fmt, dtype, rows=63)
    kernel = launched.kernel
    values = triton_launches._BLOCKS_VALUES.value // 128  # of a thread
    assert launched.grid == (-(-63 * WIDTH // triton_launches._BLOCKS_VALUES.value), 1, 1)
    found = resources(kernel, tmp_path)
    assert not found.stack_bytes and found.registers <= 80
    # A byte or two of codes, what they mean, and a share of positions and scales.
    assert sum(instructions(kernel, r"ld\.global").values()) <= 6.25 * values
    assert set(instructions(kernel, r"st\.global")) == {"st.global.v4.b32"}
    assert not instructions(kernel, r"fma\.") and ".ftz" not in kernel.asm["ptx"], "other bits than plain torch"
    assert dtype != torch.bfloat16 or instructions(kernel, r"cvt\.rn\.bf16")


@pytest.mark.fast(12)
@pytest.mark.parametrize("capability, fmt, dtype", share(BLOCKS, 3), ids=lambda x: getattr(x, "name", str(x)))
def test_one_kernel_compiles_for_all_published_formats(tmp_path, capability, fmt, dtype):
    check_blocks(tmp_path, capability, fmt, dtype)


@triton.jit
def annotated(packed: Any, block: triton.language.constexpr) -> None:
    triton.language.store(packed, 0)


def test_an_annotation_that_the_compiler_does_not_know_is_noticed():
    """The defect that no interpreter shows: Triton resolves annotations as it compiles."""
    with recording_driver(80), pytest.raises(triton.CompilationError, match="Any"):
        annotated[(1,)](torch.zeros(1, dtype=torch.uint8), block=1)


def test_spilled_registers_are_noticed(monkeypatch, tmp_path):
    run = triton_launches.Launch.run

    def with_few_registers(self, *arguments):
        run(replace(self, constants={**self.constants, "maxnreg": 16}), *arguments)

    monkeypatch.setattr(triton_launches.Launch, "run", with_few_registers)
    with pytest.raises(AssertionError, match="stack_bytes"):
        check(tmp_path, 80, OURS, torch.float16)


def test_narrow_loads_are_noticed(tmp_path):
    """Rows of an odd number of bytes can only be loaded byte by byte."""
    with pytest.raises(AssertionError, match="b8"):
        check(tmp_path, 80, OURS, torch.float16, width=WIDTH - 1)


def test_a_matrix_of_a_large_model_is_dequantized_by_one_launch():
    """As many programs as it has stripes, times its width over 1,024."""
    (whole,) = launch(90, OURS, torch.float16, rows=28672, width=1024)
    assert whole.grid == (28672 // 32, 1, 1)


def test_launches_are_made_on_the_tensors_device(monkeypatch):
    entered, second = [], torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    triton_launches._on_device(SimpleNamespace(is_cuda=True, device=second))
    assert entered == [second]


@pytest.mark.parametrize("fmt", [OURS, PAPER, EIGHT, EIGHT_IN], ids=str)
def test_the_stand_in_for_other_devices_computes_what_kernels_do(monkeypatch, fmt):
    """It takes the place of a launch on devices in host memory, so that all host code of the kernels runs there."""
    rows, width = 70, 2200
    packed = quantize(torch.randn(rows, width) * 0.3, fmt)
    monkeypatch.setattr(triton_launches.Launch, "run", run)
    found = triton_launches.dequantize_into(packed, fmt, torch.empty(rows, width))
    assert torch.equal(found, dequantize(packed, fmt, rows, width))


@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda fmt: fmt.name)
def test_the_stand_in_decodes_what_a_launch_describes(monkeypatch, fmt):
    width = 3 * fmt.block_values
    packed = drawn_blocks(fmt, 5, width)
    monkeypatch.setattr(triton_launches.Launch, "run", run)
    found = triton_launches.dequantize_into(packed, fmt, torch.empty(5, width))
    assert torch.equal(found, decode(packed, fmt))
