"""The Triton kernels through Triton's own launches and compiler, for GPUs from the T4 to the H100,
without one.
"""

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


# Capability, format, dtype: no bfloat16 before Ampere.
TYPES = [
    (capability, dtype)
    for capability in SHARED_MEMORY
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    if capability >= 80 or dtype != torch.bfloat16
]
FEW = [
    (75, PAPER, torch.float16),
    (80, EIGHT_IN, torch.float16),
    *((c, OURS, torch.float16) for c in SHARED_MEMORY),
]
ALL = [
    (c, fmt, dtype)
    for c, dtype in TYPES
    for fmt in (OURS, PAPER, ALONG_WORDS, ALONG_PAIRS, EIGHT, EIGHT_IN)
]
BLOCKS = [(capability, fmt, dtype) for capability, dtype in TYPES for fmt in EVERY_FORMAT]


def launch(capability, fmt, dtype, rows=ROWS, width=WIDTH):
    """Dequantize on a GPU that is not there; return the launches."""
    packed = torch.zeros(fmt.num_stripes(rows), fmt.stripe_bytes(width), dtype=torch.uint8)
    with recording_driver(capability) as driver:
        triton_launches.dequantize_into(packed, fmt, torch.zeros(rows, width, dtype=dtype))
    return driver.launched


@pytest.mark.parametrize(
    "capability, fmt, dtype",
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in share(ALL, 5))],
    ids=str,
)
def test_kernels_compile_without_spills_and_with_wide_loads(tmp_path, capability, fmt, dtype):
    (launched,) = launch(capability, fmt, dtype)
    kernel = launched.kernel
    # Codes are loaded from 8 a load on, none byte by byte.
    loads = instructions(kernel, r"ld\.global|cp\.async\.c[ag]")
    assert loads and not any(name.endswith(("b8", "u8", "s8")) for name in loads)
    # One by one are read only scales: of groups along a row, which lie apart.
    narrow = sum(count for name, count in loads.items() if name.endswith(".b16"))
    assert narrow <= sum(loads.values()) * (1 / 4 if fmt.axis == "out" else 2 / 3)
    assert_fits(kernel, tmp_path, 255)


def assert_fits(kernel, folder, registers):
    """No register is spilled, and whole lines are written; a fused multiply-add has other bits than
    plain torch.
    """
    found = resources(kernel, folder)
    assert not found.stack_bytes and found.registers <= registers
    assert set(instructions(kernel, r"st\.global")) == {"st.global.v4.b32"}
    assert not instructions(kernel, r"fma\.")


@pytest.mark.fast(12)
@pytest.mark.parametrize(
    "capability, fmt, dtype", share(BLOCKS, 3), ids=lambda x: getattr(x, "name", str(x))
)
def test_one_kernel_compiles_for_all_published_formats(tmp_path, capability, fmt, dtype):
    (launched,) = launch(capability, fmt, dtype, rows=63)
    kernel, values = launched.kernel, 63 * WIDTH / launched.grid[0] / 128  # of a thread
    assert_fits(kernel, tmp_path, 80)
    assert ".ftz" not in kernel.asm["ptx"], "other bits than plain torch"
    # A byte or two of codes, what they mean, and a share of positions and scales.
    assert sum(instructions(kernel, r"ld\.global").values()) <= 6.25 * values
    assert dtype != torch.bfloat16 or instructions(kernel, r"cvt\.rn\.bf16")


@pytest.mark.parametrize("fmt", [OURS, PAPER, EIGHT, EIGHT_IN, *EVERY_FORMAT], ids=str)
def test_the_stand_in_for_other_devices_computes_what_kernels_do(monkeypatch, fmt):
    """It takes the place of a launch on devices in host memory, so that all host code of the
    kernels runs there.
    """
    rows, width = (70, 2200) if isinstance(fmt, GroupFormat) else (5, 3 * fmt.block_values)
    packed = (
        quantize(torch.randn(rows, width) * 0.3, fmt)
        if rows == 70
        else drawn_blocks(fmt, rows, width)
    )
    expected = dequantize(packed, fmt, rows, width) if rows == 70 else decode(packed, fmt)
    monkeypatch.setattr(triton_launches.Launch, "run", run)
    assert torch.equal(
        triton_launches.dequantize_into(packed, fmt, torch.empty(rows, width)), expected
    )


def test_a_matrix_of_a_large_model_is_dequantized_by_one_launch():
    """As many programs as it has stripes, times its width over 1,024."""
    (whole,) = launch(90, OURS, torch.float16, rows=28672, width=1024)
    assert whole.grid == (28672 // 32, 1, 1)
