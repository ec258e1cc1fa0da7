"""The weight prefetcher: every use gets the bytes, each is fetched as often as promised, and nothing hangs."""

from __future__ import annotations

import random
import threading
import time
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.offload.prefetcher import StagedMatrix, WeightPrefetcher, staged_bytes
from flexgen_helm.offload.staging import ALIGNMENT, StagingRing
from flexgen_helm.offload.transfer_stats import TransferStats
from tests.helpers.threads import in_thread

WAIT_S = 20.0


class Source:
    """Matrices of known bytes, and a count of what was fetched of each; with delays and failures."""

    def __init__(self, seed: int = 0, slowest: float = 0.0) -> None:
        self._random, self._slowest = random.Random(seed), slowest
        self._lock = threading.Lock()
        self.fetched: dict[str, int] = {}
        self.content: dict[str, torch.Tensor] = {}
        self.fail_at: int | None = None  # number of the fetch that fails
        self.fetches = 0

    def matrix(self, stage: str, name: str, rows: int, row_bytes: int, tile_rows: int) -> StagedMatrix:
        full = f"{stage}.{name}"
        generator = torch.Generator().manual_seed(zlib.crc32(f"{full} {rows}".encode()))
        content = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)
        self.content[full] = content
        self.fetched[full] = 0

        def fetch(first: int, count: int, staging: torch.Tensor) -> torch.Tensor:
            with self._lock:
                number, self.fetches = self.fetches, self.fetches + 1
                self.fetched[full] += count * row_bytes
                pause = self._random.random() * self._slowest
            time.sleep(pause)
            if number == self.fail_at:
                raise OSError("the disk is gone")
            rows_in_staging = staging[: count * row_bytes].view(count, row_bytes)
            return rows_in_staging.copy_(content[first : first + count])

        return StagedMatrix(name, rows, row_bytes, tile_rows, fetch)


def use(prefetcher: WeightPrefetcher, source: Source, stage: str, names: list[str], slow: float = 0.0) -> None:
    """One use of a stage, in which every byte that arrives is compared."""
    with prefetcher.using(stage) as rows:
        for name in names:
            expected, at = source.content[f"{stage}.{name}"], 0
            for first, tile in rows(name):
                assert first == at and bool((tile == expected[first : first + len(tile)]).all())
                at += len(tile)
                time.sleep(slow)
                # Still there when the product that reads it ends.
                assert bool((tile == expected[first : first + len(tile)]).all())
            assert at == len(expected)


def within(seconds: float, work):
    """The work's result; a test that would hang fails."""
    thread, results = in_thread(work)
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@st.composite
def passes(draw):
    """Stages with their matrices (rows, bytes a row, rows a tile), and how often each is used in a pass."""
    stages = {}
    for number in range(draw(st.integers(1, 5))):
        stages[f"s{number}"] = [
            (f"m{i}", draw(st.integers(1, 30)), draw(st.integers(1, 900)), draw(st.integers(1, 30)))
            for i in range(draw(st.integers(1, 4)))
        ]
    uses = {stage: draw(st.integers(1, 3)) for stage in stages}
    return stages, uses


@settings(max_examples=60, deadline=None)
@given(
    drawn=passes(),
    extra_pages=st.integers(0, 40),
    repeats=st.integers(1, 3),
    overlap=st.booleans(),
    ahead=st.booleans(),
    slowest=st.sampled_from([0.0, 0.0, 0.001]),
    skip=st.sampled_from([0.0, 0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_every_use_gets_the_bytes_and_each_is_fetched_as_promised(
    drawn, extra_pages, repeats, overlap, ahead, slowest, skip, seed
):
    stages, uses = drawn
    source, choice = Source(seed, slowest), random.Random(seed)
    matrices = {stage: [source.matrix(stage, *shape) for shape in shapes] for stage, shapes in stages.items()}
    units = {stage: [size for m in staged for size in m.unit_bytes()] for stage, staged in matrices.items()}
    capacity = max(size for sizes in units.values() for size in sizes) + extra_pages * ALIGNMENT
    keeps = {stage: sum(sizes) + max(sizes) <= capacity for stage, sizes in units.items()}
    ring = StagingRing(capacity)
    promised: dict[str, int] = dict.fromkeys(source.fetched, 0)  # bytes to fetch

    def run():
        prefetcher = WeightPrefetcher(ring, TransferStats(), overlap)
        for number in range(repeats):
            for stage in stages:
                assert prefetcher.start(stage, matrices[stage], uses[stage])
            if ahead and number + 1 < repeats and not prefetcher.has_expected:
                for stage in stages:  # as `TieredWeights.prefetch` announces a pass that is certain to follow
                    assert prefetcher.start(stage, matrices[stage], None) == keeps[stage]
                    if not keeps[stage]:
                        break
            for stage in stages:
                wanted: set[str] = set()
                for _ in range(uses[stage]):
                    names = [m.name for m in matrices[stage] if choice.random() >= skip]
                    use(prefetcher, source, stage, names)
                    wanted.update(names)
                    if not keeps[stage]:
                        for name in names:
                            promised[f"{stage}.{name}"] += source.content[f"{stage}.{name}"].numel()
                if keeps[stage]:
                    for name in wanted:
                        promised[f"{stage}.{name}"] += source.content[f"{stage}.{name}"].numel()
        prefetcher.close()

    within(WAIT_S, run)
    assert ring.in_use == 0
    if skip and overlap:  # what nobody wants may have been on its way already, but never more than once a round
        for name, size in promised.items():
            stage = name.partition(".")[0]
            most = repeats * (1 if keeps[stage] else uses[stage]) * source.content[name].numel()
            assert size <= source.fetched[name] <= most
    else:
        assert source.fetched == promised


@settings(max_examples=30, deadline=None)
@given(drawn=passes(), extra_pages=st.integers(0, 20), overlap=st.booleans(), fail_at=st.integers(0, 12))
def test_an_error_of_a_fetch_surfaces_at_the_use_and_the_prefetcher_goes_on(drawn, extra_pages, overlap, fail_at):
    stages, uses = drawn
    source = Source()
    matrices = {stage: [source.matrix(stage, *shape) for shape in shapes] for stage, shapes in stages.items()}
    largest = max(size for staged in matrices.values() for m in staged for size in m.unit_bytes())
    ring = StagingRing(largest + extra_pages * ALIGNMENT)
    source.fail_at = fail_at

    def one_pass(prefetcher):
        for stage in stages:
            prefetcher.start(stage, matrices[stage], uses[stage])
        for stage in stages:
            for _ in range(uses[stage]):
                use(prefetcher, source, stage, [m.name for m in matrices[stage]])

    def run():
        prefetcher = WeightPrefetcher(ring, TransferStats(), overlap)
        try:
            one_pass(prefetcher)
            failed = False
        except OSError:
            failed = True
        assert failed == (source.fetches > fail_at)
        prefetcher.cancel()
        assert ring.in_use == 0
        source.fail_at = None
        one_pass(prefetcher)
        prefetcher.close()

    within(WAIT_S, run)
    assert ring.in_use == 0


@settings(max_examples=30, deadline=None)
@given(
    drawn=passes(), extra_pages=st.integers(0, 20), overlap=st.booleans(), stop=st.integers(0, 20), closes=st.booleans()
)
def test_a_pass_that_is_broken_off_anywhere_leaves_an_empty_ring(drawn, extra_pages, overlap, stop, closes):
    """Also where computing on a row tile fails, as it does when memory runs out."""
    stages, uses = drawn
    source = Source(seed=stop, slowest=0.001)
    matrices = {stage: [source.matrix(stage, *shape) for shape in shapes] for stage, shapes in stages.items()}
    largest = max(size for staged in matrices.values() for m in staged for size in m.unit_bytes())
    ring = StagingRing(largest + extra_pages * ALIGNMENT)
    left = stop

    def broken_pass(prefetcher):
        nonlocal left
        for stage in stages:
            prefetcher.start(stage, matrices[stage], uses[stage])
        for stage in stages:
            for _ in range(uses[stage]):
                with prefetcher.using(stage) as rows:
                    for matrix in matrices[stage]:
                        for _ in rows(matrix.name):
                            left -= 1
                            if left < 0:
                                raise MemoryError

    def run():
        prefetcher = WeightPrefetcher(ring, TransferStats(), overlap)
        try:
            broken_pass(prefetcher)
        except MemoryError as error:
            caught = error  # with its traceback, so that the collector frees nothing
            assert caught is not None
            if closes:
                prefetcher.close()
            else:
                prefetcher.cancel()
            assert ring.in_use == 0
        if not closes:
            for stage in stages:
                prefetcher.start(stage, matrices[stage], 1)
            for stage in stages:
                use(prefetcher, source, stage, [m.name for m in matrices[stage]])
        prefetcher.close()

    within(WAIT_S, run)
    assert ring.in_use == 0


def test_loading_goes_on_while_a_stage_is_used():
    """The next stage arrives during the use of this one; without overlap it does not."""
    for overlap in (True, False):
        source = Source()
        matrices = {s: [source.matrix(s, "m", 4, 500, 2)] for s in ("a", "b")}
        prefetcher = WeightPrefetcher(StagingRing(16 * ALIGNMENT), TransferStats(), overlap)
        for stage in matrices:
            prefetcher.start(stage, matrices[stage], 1)
        with prefetcher.using("a") as rows:
            deadline = time.monotonic() + (5.0 if overlap else 0.1)
            while source.fetched["b.m"] < 2000 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert (source.fetched["b.m"] == 2000) == overlap
            assert len(list(rows("m"))) == 2
        use(prefetcher, source, "b", ["m"])
        prefetcher.close()


def test_a_pass_that_is_expected_is_loaded_before_its_uses_are_known():
    source = Source()
    matrix = source.matrix("a", "m", 4, 500, 4)
    prefetcher = WeightPrefetcher(StagingRing(16 * ALIGNMENT), TransferStats(), True)
    assert prefetcher.start("a", [matrix], None) and prefetcher.has_expected
    deadline = time.monotonic() + 5.0
    while not source.fetched["a.m"] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert prefetcher.start("a", [matrix], 2) and not prefetcher.has_expected
    use(prefetcher, source, "a", ["m"])
    use(prefetcher, source, "a", ["m"])
    assert source.fetched == {"a.m": 2000}
    prefetcher.start("a", [matrix], None)
    with pytest.raises(AssertionError, match="was expected next"):
        prefetcher.start("b", [matrix], 1)
    prefetcher.close()


def test_a_unit_beyond_the_ring_surfaces_instead_of_hanging():
    source = Source()
    matrix = source.matrix("a", "m", 1, 5 * ALIGNMENT, 1)
    prefetcher = WeightPrefetcher(StagingRing(2 * ALIGNMENT), TransferStats(), True)
    prefetcher.start("a", [matrix], 1)
    with pytest.raises(AssertionError, match="in a ring of"):
        within(WAIT_S, lambda: use(prefetcher, source, "a", ["m"]))
    within(WAIT_S, prefetcher.close)


def test_waiting_and_loading_are_timed_separately():
    source = Source(slowest=0.05)
    matrix = source.matrix("a", "m", 8, 500, 1)
    stats = TransferStats()
    prefetcher = WeightPrefetcher(StagingRing(16 * ALIGNMENT), stats, True)
    prefetcher.start("a", [matrix], 1)
    use(prefetcher, source, "a", ["m"])
    prefetcher.close()
    spent = stats.seconds()
    assert 0 < spent["wait_weights"] <= spent["load_weights"]


def test_the_byte_count_would_notice_a_matrix_that_is_fetched_again():
    """The guard's inverse: a stage that does not fit is fetched for each use, one that fits once."""
    fetched = []
    for pages in (4, 64):
        source = Source()
        matrix = source.matrix("a", "m", 4, 500, 1)
        assert staged_bytes(1, 500) == 3 * ALIGNMENT
        prefetcher = WeightPrefetcher(StagingRing(pages * ALIGNMENT), TransferStats(), True)
        prefetcher.start("a", [matrix], 3)
        for _ in range(3):
            use(prefetcher, source, "a", ["m"])
        prefetcher.close()
        fetched.append(source.fetched["a.m"])
    assert fetched == [6000, 2000]
