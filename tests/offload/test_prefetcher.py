"""The weight prefetcher: every use gets the bytes, each is fetched as often as promised, and
nothing hangs.
"""

import random
import threading
import time
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.prefetcher import StagingRing, StreamedMatrix, WeightPrefetcher
from flexgen_helm.shared_sizes import ALIGNMENT
from tests.helpers.offload import tiers_of, within


def staging_ring(capacity):
    """A ring in host memory."""
    return StagingRing(capacity, pages(capacity))


class Source:
    """Matrices of known bytes, and a count of what was fetched of each; with delays and
    failures.
    """

    def __init__(self, seed=0, slowest=0.0):
        self._random, self._slowest = random.Random(seed), slowest
        self._lock = threading.Lock()
        self.fetched = {}
        self.content = {}
        self.fail_at = None  # number of the fetch that fails
        self.fetches = 0

    def matrix(self, stage, name, rows, row_bytes, tile_rows):
        full = f"{stage}.{name}"
        generator = torch.Generator().manual_seed(zlib.crc32(f"{full} {rows}".encode()))
        content = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)
        self.content[full] = content
        self.fetched[full] = 0

        def fetch(first, count, staging):
            with self._lock:
                number, self.fetches = self.fetches, self.fetches + 1
                self.fetched[full] += count * row_bytes
                pause = self._random.random() * self._slowest
            time.sleep(pause)
            if number == self.fail_at:
                raise OSError("the disk is gone")
            rows_in_staging = staging[: count * row_bytes].view(count, row_bytes)
            return rows_in_staging.copy_(content[first : first + count])

        return StreamedMatrix(name, rows, row_bytes, tile_rows, fetch)


def use(prefetcher, source, stage, names, slow=0.0):
    """One use of a stage, in which every byte that arrives is compared."""
    with prefetcher.using(stage) as rows:
        for name in names:
            expected, at = source.content[f"{stage}.{name}"], 0
            for first, tile in rows(name):
                for pause in (slow, 0.0):  # still there when the product that reads it ends
                    assert first == at and bool((tile == expected[first : first + len(tile)]).all())
                    time.sleep(pause)
                at += len(tile)
            assert at == len(expected)


@st.composite
def passes(draw):
    """Stages with their matrices (rows, bytes a row, rows a tile), how often each is used in a
    pass, and a ring.
    """
    stages = {}
    for number in range(draw(st.integers(1, 5))):
        stages[f"s{number}"] = [
            (f"m{i}", draw(st.integers(1, 30)), draw(st.integers(1, 900)), draw(st.integers(1, 30)))
            for i in range(draw(st.integers(1, 4)))
        ]
    return (
        stages,
        {stage: draw(st.integers(1, 3)) for stage in stages},
        draw(st.integers(0, 40)) * ALIGNMENT,
    )


@settings(max_examples=60)
@given(
    drawn=passes(), overlap=st.booleans(), slowest=st.sampled_from([0.0, 0.0, 0.001]),
    skip=st.sampled_from([0.0, 0.0, 0.4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_use_gets_the_bytes_and_each_is_fetched_as_promised(
    tmp_path, drawn, overlap, slowest, skip, seed
):
    """Two passes; the second is announced as far as it fits while the first is under way, as a run
    does.
    """
    stages, uses, more = drawn
    source, choice = Source(seed, slowest), random.Random(seed)
    matrices = {
        stage: [source.matrix(stage, *shape) for shape in shapes]
        for stage, shapes in stages.items()
    }
    units = {
        stage: [u.ring_bytes for m in staged for u in m.units()]
        for stage, staged in matrices.items()
    }
    ring = staging_ring(max(map(max, units.values())) + more)
    keeps = {stage: sum(sizes) + max(sizes) <= ring.capacity for stage, sizes in units.items()}
    promised = dict.fromkeys(source.fetched, 0)  # bytes to fetch
    tiers = tiers_of(tmp_path, overlap)

    def run():
        prefetcher = WeightPrefetcher(ring, tiers)
        for number in range(2):
            for stage in stages:
                assert prefetcher.start(stage, matrices[stage], uses[stage])
            for stage in stages if number == 0 else ():
                assert prefetcher.start(stage, matrices[stage], None) == keeps[stage]
                if not keeps[stage]:
                    break
            for stage in stages:
                wanted = []
                for _ in range(uses[stage]):
                    names = [m.name for m in matrices[stage] if choice.random() >= skip]
                    use(prefetcher, source, stage, names)
                    wanted += names
                for name in set(wanted) if keeps[stage] else wanted:
                    promised[f"{stage}.{name}"] += source.content[f"{stage}.{name}"].numel()
        prefetcher.cancel()

    within(run)
    tiers.close()
    assert ring.in_use == 0
    # what nobody wants may be on its way already, but once a round at most
    for name, size in promised.items():
        stage = name.partition(".")[0]
        most = 2 * (1 if keeps[stage] else uses[stage]) * source.content[name].numel()
        assert size <= source.fetched[name] <= (most if skip else size)


@settings(max_examples=50)
@given(
    drawn=passes(), overlap=st.booleans(), fails=st.sampled_from(["fetch", "product"]),
    at=st.integers(0, 15), closes=st.booleans(),
)  # fmt: skip
def test_a_pass_that_breaks_off_anywhere_leaves_an_empty_ring_and_a_later_one_goes_on(
    tmp_path, drawn, overlap, fails, at, closes
):
    """An error of a fetch surfaces at the use; computing on a tile fails where memory runs out."""
    stages, uses, more = drawn
    source, tiers = Source(at, 0.001), tiers_of(tmp_path, overlap)
    matrices = {
        stage: [source.matrix(stage, *shape) for shape in shapes]
        for stage, shapes in stages.items()
    }
    largest = max(
        unit.ring_bytes for staged in matrices.values() for m in staged for unit in m.units()
    )
    ring = staging_ring(largest + more)
    if fails == "fetch":
        source.fail_at = at

    def one_pass(prefetcher, tiles_left):
        for stage in stages:
            prefetcher.start(stage, matrices[stage], uses[stage])
        for stage in stages:
            for _ in range(uses[stage]):
                with prefetcher.using(stage) as rows:
                    for matrix in matrices[stage]:
                        for _ in rows(matrix.name):
                            tiles_left -= 1
                            if tiles_left < 0:
                                raise MemoryError

    def run():
        prefetcher = WeightPrefetcher(ring, tiers)
        failed = None
        try:
            one_pass(prefetcher, at if fails == "product" else 1 << 30)
        except (OSError, MemoryError) as error:
            failed = error  # with its traceback, so that the collector frees nothing
        if fails == "fetch":
            assert (failed is not None) == (source.fetches > at)
        prefetcher.cancel()
        assert ring.in_use == 0
        source.fail_at = None
        if not closes:
            one_pass(prefetcher, 1 << 30)
        prefetcher.cancel()

    within(run)
    tiers.close()
    assert ring.in_use == 0


def test_loading_goes_on_while_a_stage_is_used(tmp_path):
    """The first unit of a stage is held up until the last one of the next has arrived; both are
    timed.
    """
    source, tiers = Source(slowest=0.02), tiers_of(tmp_path)
    matrices = {stage: [source.matrix(stage, "m", 4, 500, 2)] for stage in ("a", "b")}
    prefetcher = WeightPrefetcher(staging_ring(16 * ALIGNMENT), tiers)
    for stage in matrices:
        prefetcher.start(stage, matrices[stage], 1)
    with prefetcher.using("a") as rows:
        deadline = time.monotonic() + 5.0
        assert len(list(rows("m"))) == 2
        while source.fetched["b.m"] < 2000 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert source.fetched["b.m"] == 2000
    use(prefetcher, source, "b", ["m"])
    tiers.close()
    spent = tiers.stats.seconds()
    assert 0 < spent["wait_weights"] <= spent["load_weights"]


def test_a_pass_that_is_expected_is_loaded_before_its_uses_are_known(tmp_path):
    source, tiers = Source(), tiers_of(tmp_path, overlap=False)
    matrix = source.matrix("a", "m", 4, 500, 4)
    prefetcher = WeightPrefetcher(staging_ring(16 * ALIGNMENT), tiers)
    assert (
        prefetcher.start("a", [matrix], None) and prefetcher.has_expected and source.fetched["a.m"]
    )
    assert prefetcher.start("a", [matrix], 2) and not prefetcher.has_expected
    use(prefetcher, source, "a", ["m"])
    use(prefetcher, source, "a", ["m"])
    assert source.fetched == {"a.m": 2000}
    prefetcher.start("a", [matrix], None)
    with pytest.raises(AssertionError, match="was expected next"):
        prefetcher.start("b", [matrix], 1)
