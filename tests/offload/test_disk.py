"""The disk tier: what is written is read, directly or not; what breaks is one clear sentence; dead
runs are swept.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.errors import MemoryLimitError, OffloadError
from flexgen_helm.offload import disk, offload_directory
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.matrices import DiskMatrix
from flexgen_helm.offload.offload_directory import OffloadDirectory, WeightFiles
from flexgen_helm.offload.pages import pages
from flexgen_helm.progress import observed_by
from flexgen_helm.shared_sizes import ALIGNMENT, aligned
from flexgen_helm.system_errors import GIVEN_FOLDERS, explain
from tests.helpers.forks import python
from tests.helpers.offload import tiers_of
from tests.helpers.parity import assert_same
from tests.helpers.paths import ROOT
from tests.helpers.small_disks import small_disk


def page(*values):
    """Aligned bytes, a page for each value."""
    buffer = pages(len(values) * ALIGNMENT)
    for i, value in enumerate(values):
        buffer[i * ALIGNMENT : (i + 1) * ALIGNMENT] = value
    return buffer


def without_direct_io(monkeypatch):
    """As a file system that refuses direct I/O, which creates the file all the same."""
    honest = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            os.close(honest(path, flags & ~os.O_DIRECT, *rest, **named))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return honest(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


@pytest.fixture(params=["direct", "through the cache"])
def mode(request, monkeypatch):
    if request.param != "direct":
        without_direct_io(monkeypatch)
    return request.param


def test_what_is_written_is_read_and_lies_in_the_file(tmp_path, mode):
    path = tmp_path / "f"
    file = DirectFile(path, 5 * ALIGNMENT - 7, create=True)
    if mode != "direct":
        assert not file.direct
    assert path.stat().st_size == 5 * ALIGNMENT == path.stat().st_blocks * 512, (
        "blocks are not set aside"
    )
    file.write(ALIGNMENT, page(3, 4))
    file.write(0, page(1))
    buffer = page(9, 9, 9)
    file.read(0, buffer)
    assert torch.equal(buffer, page(1, 3, 4))
    # Independent of our reading.
    assert path.read_bytes() == bytes(page(1, 3, 4, 0, 0).numpy())
    file.close()
    reopened = DirectFile(path, 5 * ALIGNMENT - 7, create=False)
    reopened.read(2 * ALIGNMENT, buffer[:ALIGNMENT])
    assert int(buffer[0]) == 4
    reopened.close(delete=True)
    assert not path.exists()


@settings(max_examples=30)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(0, 255)), max_size=12
    )
)
def test_any_order_of_writes_leaves_the_last_of_each_page(tmp_path, mode, monkeypatch, writes):
    monkeypatch.setattr(disk, "CHUNK_BYTES", 2 * ALIGNMENT)
    path = tmp_path / f"f{time.monotonic_ns()}"
    file = DirectFile(path, 8 * ALIGNMENT, create=True)
    expected = torch.zeros(8 * ALIGNMENT, dtype=torch.uint8)
    for first, count, value in writes:
        count = min(count, 8 - first)
        file.write(first * ALIGNMENT, page(*[value] * count))
        expected[first * ALIGNMENT : (first + count) * ALIGNMENT] = value
    buffer = page(*range(8))
    file.read(0, buffer)
    file.close(delete=True)
    assert torch.equal(buffer, expected)


def test_a_file_cut_short_is_named_when_opened_and_when_read(tmp_path, mode):
    path = tmp_path / "f"
    file = DirectFile(path, 4 * ALIGNMENT, create=True)
    for size in (2 * ALIGNMENT, 2 * ALIGNMENT + 100, 0):
        os.truncate(path, size)
        with pytest.raises(OffloadError, match=r"f ends \d+ bytes early; delete it and run again"):
            file.read(0, page(0, 0, 0, 0))
    file.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OffloadError, match=r"shorter than its 16 KiB \(16,384 bytes\); delete it"):
        DirectFile(path, 4 * ALIGNMENT, create=False)
    with pytest.raises(OffloadError, match="absent cannot be used: No such file"):
        DirectFile(tmp_path / "absent", 1, create=False)
    with pytest.raises(OffloadError, match="File exists"):
        DirectFile(path, 1, create=True)
    assert path.exists(), "another's file was deleted"
    assert len(os.listdir("/proc/self/fd")) == before


HOLDER = """
import sys
from pathlib import Path
import torch
from flexgen_helm.offload.offload_directory import OffloadDirectory
from flexgen_helm.offload.pages import pages
where = OffloadDirectory(Path(sys.argv[1]))
file = where.scratch("cache-1", 8192)
mine = pages(8192)
mine.fill_(int(sys.argv[2]))
print(where.run.name, flush=True)
for line in sys.stdin:
    file.write(0, mine)
    buffer = pages(8192)
    file.read(0, buffer)
    print(torch.equal(buffer, mine), flush=True)
file.close(delete=True)
where.close()
"""


def holder(folder, value=1):
    """A process that holds a run in the directory, and the run's name."""
    process = subprocess.Popen(
        [*python("all"), "-c", HOLDER, str(folder), str(value)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=ROOT,
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def names(folder):
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def test_a_dead_run_is_swept_away_and_a_living_one_stays(tmp_path):
    dead, dead_run = holder(tmp_path)
    living, living_run = holder(tmp_path, 2)
    dead.send_signal(signal.SIGKILL)
    # until the fork, too, has been killed; an end of its input would let it clean up
    dead.stdout.read()
    dead.communicate(timeout=30)
    assert names(tmp_path) >= {dead_run, f"{dead_run}.lock"}
    (tmp_path / "run-1-0").mkdir()  # its lock was lost: nobody holds it
    mine = OffloadDirectory(tmp_path)
    assert names(tmp_path) == {
        mine.run.name,
        f"{mine.run.name}.lock",
        living_run,
        f"{living_run}.lock",
    }
    assert (tmp_path / living_run / "cache-1").stat().st_size == 8192
    out, _ = living.communicate("x\n", timeout=30)
    assert out.split() == ["True"] and living.returncode == 0
    mine.close()
    assert names(tmp_path) == set()


def test_a_name_that_another_container_holds_is_passed_over(tmp_path, monkeypatch):
    """Two containers over one directory can give two processes the same number."""
    numbers = iter([7, 7, 8])
    monkeypatch.setattr(offload_directory, "_serials", numbers)
    first, second = OffloadDirectory(tmp_path), OffloadDirectory(tmp_path)
    assert {first.run.name, second.run.name} == {f"run-{os.getpid()}-7", f"run-{os.getpid()}-8"}
    second.close()
    first.close()


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch):
    """Commands add what helps, to the folder of this option."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    monkeypatch.setitem(GIVEN_FOLDERS, "--offload-dir", folder)
    with pytest.raises(OffloadError) as raised:
        OffloadDirectory(folder)
    assert explain(raised.value) == (
        f"the offload directory {folder} cannot be used: Not a directory; name another folder "
        "with --offload-dir"
    )


def test_packed_weights_that_cannot_be_kept_are_packed_in_memory(tiny, tmp_path, monkeypatch):
    """A home on a read-only file system; here a file is in the way."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    request = GenerationRequest(prompt_token_ids=[5, 9, 7], max_tokens=2, echo_logprobs=True)
    results, events = [], []
    for _ in range(2):
        with (
            observed_by(events.append),
            Engine.from_pretrained(tiny("mixtral").path, precision="4bit") as engine,
        ):
            results.append(engine.run([request])[0])
        shutil.rmtree(tmp_path / "offload", ignore_errors=True)
        (tmp_path / "offload").write_text("")
    assert_same(results[:1], results[1:], 1e-6)
    assert (
        sum("packed again by the next run" in getattr(event, "text", "") for event in events) == 1
    )


# Weights files.


def matrix(seed, size=3000):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).half()


class Tiles:
    """Tiles of a tensor that know whether they were read."""

    def __init__(self, tensor, cut=1000):
        self.tensor, self.cut, self.was_read = tensor, cut, False

    def __iter__(self):
        self.was_read = True
        yield from self.tensor.split(self.cut)


def ensured(folder, tiles):
    """The tensor that the file holds, through `WeightFiles` alone."""
    files = WeightFiles(folder)
    size = tiles.tensor.numel() * 2
    file = files.ensure("a.weight", size, tiles)
    buffer = pages(aligned(size))
    file.read(0, buffer)
    file.close()
    return buffer[:size].view(torch.float16)


def test_weights_are_written_once_and_reused(tmp_path, monkeypatch, mode):
    for module in (disk, offload_directory):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2 * ALIGNMENT)
    first, second = Tiles(matrix(1, 20_000), 999), Tiles(matrix(1, 20_000))
    assert torch.equal(ensured(tmp_path, first), first.tensor) and first.was_read
    assert torch.equal(ensured(tmp_path, second), first.tensor) and not second.was_read
    assert {path.name for path in tmp_path.iterdir()} == {"a.weight", ".lock"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, ALIGNMENT),
        lambda path: os.truncate(path, 3 * ALIGNMENT),
        Path.unlink,
    ],
    ids=["cut short", "longer", "gone"],
)
def test_a_file_of_another_size_is_written_again(tmp_path, damage):
    ensured(tmp_path, Tiles(matrix(1)))
    damage(tmp_path / "a.weight")
    rewritten = Tiles(matrix(2))  # another content shows whose bytes are read
    assert torch.equal(ensured(tmp_path, rewritten), rewritten.tensor) and rewritten.was_read


def test_a_writer_that_fails_leaves_nothing_and_what_a_killed_one_left_goes(tmp_path):
    class Failing:
        def __iter__(self):
            yield matrix(1)[:1000]
            raise RuntimeError("the checkpoint is gone")

    files = WeightFiles(tmp_path)
    with pytest.raises(RuntimeError):
        files.ensure("a.weight", 6000, Failing())
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    for left in ("a.weight.part", "b.weight.part"):
        (tmp_path / left).write_bytes(b"x")
    ensured(tmp_path, Tiles(matrix(1)))
    assert {path.name for path in tmp_path.iterdir()} == {"a.weight", ".lock"}


WRITER = """
import sys
from pathlib import Path
import torch
from flexgen_helm.offload.offload_directory import WeightFiles
generator = torch.Generator().manual_seed(1)
tensor = torch.randn(200_000, generator=generator).half()
files = WeightFiles(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for i in range(6):
    file = files.ensure(f"m{i}", 400_000, tensor.split(5000))
    assert torch.equal(file.read_tensor(0, tensor.shape, tensor.dtype), tensor)
    file.close()
"""


def test_two_writers_of_the_same_weights_do_not_disturb_each_other(tmp_path):
    writers = [
        subprocess.Popen([*python("all"), "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True, cwd=ROOT)
        for _ in range(2)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert names(tmp_path) == {f"m{i}" for i in range(6)}


# A disk that is really full.

ENGINE = """
import resource, sys
from flexgen_helm import Engine, FlexgenError, GenerationRequest, MemoryLimits, Policy
model, folder, limit, policy, precision = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    with Engine.from_pretrained(model, policy=policy, schedule="zigzag", offload_dir=folder, precision=precision,
                                limits=MemoryLimits(cpu=64 << 20, disk=256 << 20)) as engine:
        requests = [GenerationRequest(prompt_token_ids=[5 + i] * 60, max_tokens=20) for i in range(8)]
        print([result.completions[0].token_ids for result in engine.run(requests)])
except FlexgenError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""
# All weights, or the whole cache on the disk.
ON_DISK = {"weights": "4x2,0,0,0,100,0,100", "cache": "4x2,0,100,0,0,0,100"}


def run_engine(model, folder, limit, policy, precision="fp16"):
    return subprocess.run(
        [*python("all"), "-c", ENGINE, str(model), str(folder), str(limit), policy, precision], capture_output=True,
        text=True, timeout=120, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def answers(tiny, folder, on_disk, precision="fp16"):
    """What the engine draws, here in this process."""
    policy, limits = (
        ON_DISK[on_disk] if on_disk else "auto",
        MemoryLimits(cpu=64 << 20, disk=256 << 20),
    )
    options = dict(policy=policy, offload_dir=folder, limits=limits, precision=precision)
    with Engine.from_pretrained(tiny("llama").path, **options) as engine:
        requests = [
            GenerationRequest(prompt_token_ids=[5 + i] * 60, max_tokens=20) for i in range(8)
        ]
        return [result.completions[0].token_ids for result in engine.run(requests)]


def test_a_file_limit_is_an_error_of_its_own_and_nothing_is_left(tiny, tmp_path):
    """By `ulimit -f`, which every system has: the first file that grows too large is refused."""
    done = run_engine(tiny("llama").path, tmp_path, 4096, ON_DISK["weights"], "8bit")
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert (
        done.stdout.startswith("DiskFullError")
        and "ulimit -f" in done.stdout
        and done.stdout.count("\n") == 1
    )
    (weights,) = names(tmp_path)
    assert not [
        path for path in (tmp_path / weights).iterdir() if path.name.endswith((".part", ".tmp"))
    ]
    # The same directory serves once there is room.
    assert answers(tiny, tmp_path, "weights", "8bit") == answers(
        tiny, tmp_path / "other", None, "8bit"
    )


@pytest.fixture(name="small_disk")
def small_disk_(tmp_path):
    with small_disk(tmp_path / "small", 256 << 10) as folder:
        yield folder


@pytest.mark.parametrize(
    "limits", [MemoryLimits(cpu=60 << 20), MemoryLimits(cpu=60 << 20, disk=1 << 30)]
)
def test_a_disk_without_room_for_weights_is_told_before_anything_is_measured(
    small_disk, limits, monkeypatch
):
    monkeypatch.setattr(
        "flexgen_helm.planner.planner.Planner._rates", lambda *arguments: pytest.fail("measured")
    )
    told = (
        rf"^{small_disk} has 256 KiB free, and weights need \d\d\d MiB there: make room, name "
        r"another folder"
    )
    with pytest.raises(MemoryLimitError, match=told):
        Engine.from_pretrained(
            "opt-125m", weights="dummy", device="cpu", limits=limits, offload_dir=small_disk
        )


@pytest.mark.parametrize("kind", ["weights", "cache"])
def test_a_full_disk_ends_the_run_with_one_sentence(tiny, small_disk, kind):
    (small_disk / "ballast").write_bytes(bytes(150_000))
    done = run_engine(tiny("llama").path, small_disk, 0, ON_DISK[kind])
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert (
        done.stdout.startswith("DiskFullError")
        and re.search(r"bytes\)? free", done.stdout)
        and done.stdout.count("\n") == 1
    )
    left = [
        path
        for path in small_disk.rglob("*")
        if path.name.startswith("run-") or path.suffix in (".part", ".tmp")
    ]
    assert left == []


def test_files_that_cannot_be_deleted_any_more_end_no_run(tmp_path, monkeypatch):
    """A disk that became read-only: the next run deletes them."""
    folder = OffloadDirectory(tmp_path)
    file = DirectFile(folder.run / "cache", 4096, create=True)

    def refuse(*given, **named):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", refuse)
        file.close(delete=True)
        folder.close()
    assert [path.suffix for path in tmp_path.glob("run-*")]
    OffloadDirectory(tmp_path).close()
    assert not [*tmp_path.glob("run-*")]


@pytest.mark.parametrize(
    "columns", [3, 96, 40_000], ids=["several rows a page", "a few", "rows of many pages"]
)
def test_looked_up_rows_are_the_tables_and_far_ones_are_read_alone(tmp_path, columns):
    table = torch.randn(12_000_000 // columns, columns).to(torch.float16)
    file = DirectFile(tmp_path / "table", aligned(8 + table.nbytes), create=True)
    padded = pages(8 + table.nbytes)
    padded[8 : 8 + table.nbytes] = table.flatten().view(torch.uint8)
    file.write(0, padded)
    tiers = tiers_of(tmp_path / "offload")
    matrix = DiskMatrix(tiers, file, tuple(table.shape), table.dtype, offset=8)
    few = torch.tensor([len(table) - 1, 0, len(table) // 2, 0])
    for rows in (
        few,
        torch.randint(len(table), (2_000,)),
        torch.arange(len(table) - 5, len(table)),
    ):
        assert torch.equal(matrix.gather(rows), table[rows])
    tiers.stats.reset()
    matrix.gather(few)
    assert tiers.stats.bytes()["disk_to_cpu"]["weights"] == 3 * columns * 2
