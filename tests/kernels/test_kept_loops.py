"""What numba keeps of loops for different formats is loaded into one process, and stays apart."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from flexgen_helm.kernels.trial import loops_in_use
from flexgen_helm.quant.block_products import loops
from flexgen_helm.quant.block_formats import BLOCK_FORMATS

for name in sys.argv[1:]:
    loops(BLOCK_FORMATS[name])()
print(*loops_in_use.values(), sep="|")
"""


@pytest.mark.slow
def test_loops_that_earlier_processes_compiled_do_not_call_each_other(tmp_path):
    """One process compiles each, so numba numbers their helpers alike; the third loads both."""
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for names in (["Q4_0"], ["Q8_0"], ["Q4_0", "Q8_0"]):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *names], env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "|".join(["compiled"] * len(names)) + "\n", done.stdout
