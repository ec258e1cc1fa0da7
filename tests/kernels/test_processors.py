"""The compiled loops as numba makes them for other processors: fewer registers, narrower vectors,
no 16-bit numbers.
"""

import os
import platform
import subprocess

import pytest

from tests.helpers.forks import python
from tests.helpers.paths import ROOT

SSE = "+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+popcnt"
PROCESSORS = {"avx2": f"{SSE},+avx,+avx2,+fma,+f16c", "sse": SSE, "generic": ""}
TRIALS = """
from flexgen_helm.kernels import attention, emit, layer_rows, vector_products
from flexgen_helm.quant import block_products, dequantization
from flexgen_helm.quant.block_formats import BLOCK_FORMATS
blocks = (block_products.loops(BLOCK_FORMATS[name]) for name in ("MXFP4", "Q4_K", "Q6_K"))
modules = attention, layer_rows, vector_products, dequantization
print(emit.LANES, emit.CONVERTS_HALVES, *(module.loops() is not None for module in modules))
print(*(loops() is not None for loops in blocks))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("name", PROCESSORS)
def test_trials_on_a_lesser_processor(tmp_path, name):
    variables = {
        "NUMBA_CPU_NAME": "haswell" if name == "avx2" else "generic",
        "NUMBA_CPU_FEATURES": PROCESSORS[name],
    }
    done = subprocess.run(
        [*python("all"), "-c", TRIALS], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, **variables, "NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    halves = str(name == "avx2")
    assert done.stdout.split() == ["8", halves, *["True"] * 5, halves, halves]


def test_loops_work_where_what_was_compiled_has_no_room(tmp_path):
    """A full disk, or `ulimit -f`: they are compiled in each process, and still used."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n" + (
        "from flexgen_helm.kernels import vector_products; print(vector_products.loops() is not "
        "None)"
    )
    done = subprocess.run(
        [*python("all"), "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert not any(path.stat().st_size > 4096 for path in tmp_path.rglob("*"))
