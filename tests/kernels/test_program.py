"""Programs run recorded calls in order, each behind the other on all threads, and read and write where they did."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm.kernels import layer_rows, team
from flexgen_helm.kernels.decode_attention import Row, RowTable, attend_rows
from flexgen_helm.kernels.few_rows import few_rows_matmul
from flexgen_helm.kernels.program import Program, is_whole, recorded

compiled = pytest.importorskip("flexgen_helm.kernels.compiled")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def memory(num_bytes: int = 1 << 20) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_long_chain(threads: int) -> None:
    """Each call reads what others have written on all threads: without a barrier some would come too early."""
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 64, generator=draw), torch.randn(64, 64, generator=draw).div(8).bfloat16()

    def part() -> list[torch.Tensor]:
        y = x
        for _ in range(40):
            product = few_rows_matmul(y, weight)
            assert product is not None
            y = layer_rows.rms_norm(layer_rows.add(product, x), None, 1e-5, False)
            assert y is not None
        return [y]

    program, results = recorded(part, memory())
    assert len(program.functions) == 120
    expected = part()[0]
    assert torch.equal(results[0], expected)
    for scale in (0.5, 2.0, 1.0):
        x.mul_(scale)
        for _ in range(20):
            program.run()
            assert torch.equal(results[0], part()[0])
    assert is_whole(program, part, [x], results)


def test_what_is_no_compiled_function_is_missed() -> None:
    x = torch.ones(4, 32)

    def part() -> list[torch.Tensor]:
        y = layer_rows.rms_norm(x, None, 1e-5, False)
        assert y is not None
        return [layer_rows.add(y.mul_(3.0), x)]

    program, results = recorded(part, memory())
    kept = x.clone()
    assert not is_whole(program, part, [x], results)
    assert torch.equal(x, kept)


def test_memory_that_does_not_suffice_is_said() -> None:
    with pytest.raises(MemoryError, match="500 bytes"):
        recorded(lambda: layer_rows.rms_norm(torch.ones(8, 32), None, 1e-5, False), memory(500))
    assert team.recording() is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_joined_programs_run_one_behind_the_other(threads: int) -> None:
    torch.set_num_threads(threads)
    x, y = torch.randn(7, 64), torch.zeros(7, 64)
    sums = [recorded(lambda: layer_rows.add(y, x), memory(), computes=False)[0] for _ in range(3)]
    assert not y.any()
    joined = Program.joined([*sums, recorded(lambda: layer_rows.add(y, y), memory(), computes=False)[0]])
    assert len(joined.functions) == 4
    joined.run()
    assert torch.equal(y, (x + x + x) + (x + x + x))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_attention_that_is_recorded_before_its_queries_are_known(threads: int) -> None:
    """It has memory for all threads, however little there is to do."""
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    sizes = (3, 4, 32), (3, 2, 700, 32), (3, 2, 700, 32)
    q, k, v = (torch.randn(size, generator=draw) for size in sizes)
    rows = [Row(0, 3), Row(5, 640), Row(0, 690)]
    expected, _ = attend_rows(RowTable.of(rows), q, k, v, 0.2)
    known = q.clone()
    q.zero_()
    # The table is the recording's alone, which keeps it.
    program, (out, _) = recorded(lambda: attend_rows(RowTable.of(rows), q, k, v, 0.2), memory(), computes=False)
    q.copy_(known)
    for _ in range(3):
        out.zero_()
        program.run()
        assert torch.equal(out, expected)


def test_scratch_memory_is_shared_and_results_are_not() -> None:
    with team.Recording(memory(1000)) as own:
        first, second = own.scratch(100), own.scratch(64)
        results = [own.take(64) for _ in range(3)]
        larger = own.scratch(300)
        with pytest.raises(MemoryError):
            own.scratch(600)
    assert first.data_ptr() == second.data_ptr() != larger.data_ptr()
    places = sorted(part.data_ptr() for part in (first, *results, larger))
    assert [behind - before for before, behind in zip(places, places[1:])] == [128, 64, 64, 64]


def test_nothing_is_recorded_meanwhile() -> None:
    x = torch.ones(4, 32)
    with team.Recording(memory()) as own:
        with team.not_recorded():
            layer_rows.rms_norm(x, None, 1e-5, False)
        assert not own.calls
        layer_rows.rms_norm(x, None, 1e-5, False)
        assert len(own.calls) == 1
