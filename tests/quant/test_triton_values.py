"""Numbers and memory traffic of the Triton kernels without a GPU, by its interpreter."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.blocks import EVERY_FORMAT
from tests.helpers.paths import ROOT

pytest.importorskip("triton")


def interpreted(*names):
    command = [sys.executable, "-m", "tests.helpers.triton_interpreter", *names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found():
    return interpreted("values", "blocks", "bytes")


def test_kernels_give_the_bits_of_plain_torch(found):
    """All formats along both axes, odd and tiny matrices, in 16 bits and in float32."""
    assert found["values"] == 44


def test_one_kernel_gives_the_bits_of_all_published_formats(found):
    """Those of GGUF files and of folders, in float16 and float32: Triton's interpreter does not
    round to bfloat16.
    """
    assert found["blocks"] == 2 * len(EVERY_FORMAT) == 72


def test_each_packed_byte_is_read_once(found):
    counts = found["bytes"]
    assert len(counts) == 6 and all(case["least"] == case["most"] == 1 for case in counts), counts
