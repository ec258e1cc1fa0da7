"""Numbers and memory traffic of the Triton kernels without a GPU: by its interpreter, and from their grids."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from flexgen_helm.quant.precisions import PRECISIONS
from tests.helpers.paths import ROOT

pytest.importorskip("triton")

# [rows, width] of the matrices of OPT-30B and of Llama-3-70B.
OPT_30B = [(7168, 7168), (28672, 7168), (7168, 28672)]
LLAMA_70B = [(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)]
PRODUCTS = ["matvec", "tiles"]


def interpreted(*names):
    command = [sys.executable, "-m", "tests.helpers.triton_interpreter", *names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found():
    return interpreted("values", "spoiled", "bytes")


def check_values(counts, dequantized, products):
    assert (counts["dequantized"], counts["products"]) == (dequantized, products)
    assert set(counts["formats"]) == {
        f"{bits} out {group}" for bits, groups in ((4, (8, 24, 32, 64, 128)), (8, (24, 32))) for group in groups
    }
    # Every kernel, alone and with partial sums that another one joins.
    assert set(counts["kernels"]) == {*PRODUCTS, *(f"{name} split" for name in PRODUCTS)}


def test_kernels_give_the_numbers_of_plain_torch(found):
    """Dequantizing bit for bit; products as dequantizing and multiplying in float64, within a sum's rounding."""
    check_values(found["values"], dequantized=44, products=21)


def test_the_comparison_notices_a_single_code(found):
    assert found["spoiled"]


def test_each_packed_byte_is_read_once(found):
    counts = found["bytes"]
    assert len(counts) == 12 and all(case["least"] == case["most"] == 1 for case in counts), counts


@pytest.mark.parametrize("precision", ["4bit", "paper-4bit"])
@pytest.mark.parametrize("processors, has_tensor_cores", [(40, False), (82, True), (132, True)])
def test_a_product_moves_at_most_a_tenth_more_than_its_packed_bytes(processors, has_tensor_cores, precision):
    from flexgen_helm.quant import triton_launches

    fmt, device = PRECISIONS[precision].weights, triton_launches.Device(processors, has_tensor_cores)
    for (rows, width), tokens in itertools.product((*OPT_30B, *LLAMA_70B), (1, 2, 3, 8, 16, 32, 64)):
        launch = triton_launches.plan_product(fmt, tokens, rows, width, torch.float16, False, device)
        check_launch(launch, fmt, rows, width, tokens, processors)


def check_launch(launch, fmt, rows, width, tokens, processors):
    (programs, splits), given = launch.grid, launch.constants
    rows_of_program = fmt.group_size * given.get("block_stripes", 1)
    columns_of_step = given["block"] if "block" in given else given["chunks"] * given["vector"]
    # Programs share out rows and columns without an overlap and without an empty one.
    assert 0 <= programs * rows_of_program - rows < rows_of_program
    assert (splits - 1) * launch.split_steps < width / columns_of_step <= splits * launch.split_steps
    partial = 2 * 4 * splits * tokens * rows if splits > 1 else 0
    assert partial <= 0.1 * fmt.packed_bytes(rows, width)
    # The machine is kept busy, unless the columns or the bound on partial sums end first.
    wanted = processors if "block" in given else 8 * processors // launch.num_warps
    more_splits = 2 * 4 * (splits + 1) * tokens * rows > 0.1 * fmt.packed_bytes(rows, width)
    assert programs * (splits + 1) >= wanted or more_splits or launch.split_steps <= 3


def test_a_grid_without_the_bound_would_move_more(monkeypatch):
    from flexgen_helm.quant import triton_launches

    monkeypatch.setattr(triton_launches, "partial_splits", lambda *sizes: 1 << 30)
    fmt, device = PRECISIONS["4bit"].weights, triton_launches.Device(132, True)
    launch = triton_launches.plan_product(fmt, 64, 1024, 8192, torch.float16, False, device)
    assert 2 * 4 * launch.grid[1] * 64 * 1024 > 0.1 * fmt.packed_bytes(1024, 8192)
