"""Compiled loops, whatever they compute: errors reach the caller, and what cannot be compiled is
left to PyTorch.
"""

import json
import os
import subprocess
from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flexgen_helm.errors import LoopError
from flexgen_helm.kernels import attention, layer_rows, team
from flexgen_helm.kernels.trial import loops_in_use
from flexgen_helm.quant import block_products, kernels, packing
from flexgen_helm.quant.formats import BLOCK_FORMATS
from tests.helpers.forks import python
from tests.helpers.paths import ROOT

pytest.importorskip("flexgen_helm.kernels.emit")
from flexgen_helm.kernels import attention_loop, layer_loop
from flexgen_helm.kernels.emit import Loop
from flexgen_helm.quant import numba_kernels, packing_loop


@partial(Loop, namedtuple("Row", "x"))
def fails_in_the_last_part(given, part, parts):
    if part == parts - 1:
        raise ValueError("on purpose")


@pytest.fixture(params=["openmp", "alone"])
def threads(request, monkeypatch):
    """Three threads, and one where PyTorch's OpenMP has no entry that we know."""
    if request.param == "alone":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    torch.set_num_threads(3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("most_threads", [1, 2, 3])
def test_an_error_in_a_loop_reaches_its_caller(threads, most_threads):
    with pytest.raises(LoopError, match="FLEXGEN_HELM_LOOPS=0"):
        team.run_on_threads(fails_in_the_last_part, [0], most_threads)


def test_a_row_of_zeros_without_eps_is_divided_as_ieee_says(threads):
    """As a padding token's embedding may be: its row is no number, and the rows behind it are as
    they were.
    """
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    y = layer_rows.rms_norm(x, torch.ones(64), 0.0, False)
    expected = F.rms_norm(x, (64,), torch.ones(64), 0.0)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert y[2].isnan().all() and y[3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_memory_of_loops_does_not_follow_the_default_dtype(threads, dtype):
    """`from_pretrained(dtype=...)` sets it for the whole process, in any thread."""
    x, weight = torch.randn(40, 96), torch.randn(96)
    expected = layer_rows.rms_norm(x, weight, 1e-5, False)
    layer_rows._ones.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        results = (
            layer_rows.rms_norm(x, weight, 1e-5, False),
            layer_rows.rms_norm(x, None, 1e-5, False),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(results[0], expected)
    torch.testing.assert_close(results[1], F.rms_norm(x, (96,), None, 1e-5))


@partial(Loop, namedtuple("Row", "x"))
def writes_nothing(given, part, parts):
    pass


TRIED = [
    (attention.loops, attention_loop, "attend"),
    *((layer_rows.loops, layer_loop, f"{name}_rows") for name in ("norm", "rotate", "gate", "put")),
    *(
        (kernels.loops, numba_kernels, name)
        for name in ("dequantize_rows", "dequantize_columns", "matmul_columns")
    ),
    (packing.loops, packing_loop, "pack_columns"),
    (block_products.loops(BLOCK_FORMATS["Q6_K"]), block_products, "run_on_threads"),
]


@pytest.mark.parametrize(("loops", "owner", "name"), TRIED)
def test_a_loop_that_writes_nothing_is_not_used(monkeypatch, loops, owner, name):
    """As on a processor that we do not know. `test_vector_products.py` has other faults, and what
    is said.
    """
    module, honest = loops(), torch.empty

    def empty(*shape, **options):
        """Never with the results of an earlier trial."""
        memory = honest(*shape, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory.fill_(85)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(
            owner, name, (lambda *given: None) if name == "run_on_threads" else writes_nothing
        )
        loops.forget()
        assert loops() is None and "it computes wrong numbers" in loops_in_use.values()
    loops.forget()
    assert loops() is module


# A product, and what the record says of its loop.
TRIALS = """
import json, sys
{first}
import torch
from flexgen_helm.kernels import trial, vector_products
from flexgen_helm.progress import observed_by
messages, x = [], torch.ones(3, 32)
with observed_by(lambda event: messages.append(getattr(event, "text", ""))):
    y = vector_products.vector_matmul(x, x.bfloat16())
assert y is None or y.eq(32).all()
print(json.dumps([trial.loops_in_use, messages]))
"""


def tried(cache, first="", **variables):
    done = subprocess.run(
        [*python("all"), "-c", TRIALS.format(first=first)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    in_use, messages = json.loads(done.stdout)
    assert len(in_use) == 1
    return set(in_use.values()), [text for text in messages if text]


def test_a_variable_switches_all_loops_off(tmp_path):
    assert tried(tmp_path, FLEXGEN_HELM_LOOPS="0") == ({"FLEXGEN_HELM_LOOPS=0"}, [])


def test_whatever_numba_raises_when_it_is_imported_leaves_the_work_to_pytorch(tmp_path):
    """Python code in the place of numba raises what it raises where no writable memory may be
    executed.
    """
    (tmp_path / "numba.py").write_text("raise PermissionError(1, 'Operation not permitted')")
    reasons, messages = tried(tmp_path, f"sys.path.insert(0, {str(tmp_path)!r})")
    assert reasons == {"PermissionError: [Errno 1] Operation not permitted"} and len(messages) == 1


def test_a_system_that_forbids_writable_executable_memory(tmp_path):
    """Linux 6.3 and later refuse it for this process (PR_SET_MDWE), as systemd's
    MemoryDenyWriteExecute does.
    """
    forbid = "import ctypes, torch; torch.ones(64, 64) @ torch.ones(64, 64)\n" + (
        'if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): print(\'[{"a": ""}, []]\'); sys.exit()'
    )
    reasons, _ = tried(tmp_path, forbid)
    if reasons == {""}:
        pytest.skip("this kernel cannot forbid it")
    assert not any(reason == "compiled" for reason in reasons)


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_again_and_named(tmp_path):
    assert tried(tmp_path) == ({"compiled"}, [])
    for suffix in (".nbi", ".nbc"):
        for path in tmp_path.rglob(f"*{suffix}"):
            path.write_bytes(path.read_bytes()[:-100])
        reasons, messages = tried(tmp_path)
        assert (
            reasons == {"compiled"} and messages and all(str(tmp_path) in text for text in messages)
        ), suffix
        assert tried(tmp_path) == ({"compiled"}, []), suffix


def test_loops_work_where_numba_can_write_nowhere(tmp_path):
    nowhere = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []"
    assert tried(tmp_path, nowhere) == ({"compiled"}, [])


def test_another_system_is_refused_in_a_sentence(tmp_path):
    """Commands and the engine; help and the version are for everybody."""
    program = (
        "import platform, sys; platform.system = lambda: 'Darwin'; from flexgen_helm.cli import "
        "main; sys.exit(main())"
    )
    for argument, code, text in (
        ("models", 2, "runs on Linux, and this is Darwin"),
        ("--version", 0, ""),
    ):
        command = [*python("all"), "-c", program, argument]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr
