"""Memory limits of control groups of both versions, from made-up folders and from one that the kernel keeps."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from flexgen_helm.benchmarks.memory_group import GroupUnavailable, MemoryGroup
from flexgen_helm.hardware import control_groups
from flexgen_helm.hardware.control_groups import FILES, HostMemory, host_memory
from tests.helpers.paths import ROOT

GIB = 1 << 30
MACHINE = SimpleNamespace(available=20 * GIB, total=64 * GIB)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(control_groups.psutil, "virtual_memory", lambda: MACHINE)


def group(folder, version, limit, used, page_cache=0):
    files = FILES[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files.limit).write_text(f"{limit}\n")
    (folder / files.usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files.inactive_file} {page_cache}\n")
    return folder


def found(tmp_path, own="4:memory:/outer/mine\n0::/outer/mine\n"):
    """With a hierarchy of each version, of which the test has filled one."""
    (tmp_path / "mounts").write_text(
        f"proc /proc proc rw 0 0\ncgroup {tmp_path}/1 cgroup rw,cpu 0 0\n"
        f"cgroup {tmp_path}/1 cgroup rw,memory 0 0\ncgroup2 {tmp_path}/2 cgroup2 rw 0 0\n"
    )
    (tmp_path / "own").write_text(own)
    return host_memory(tmp_path / "mounts", tmp_path / "own")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_on_the_way_up_limits(tmp_path, version):
    root = tmp_path / str(version)
    outer = group(root / "outer", version, 4 * GIB, 3 * GIB)
    mine = group(root / "outer" / "mine", version, 3 * GIB, GIB)
    assert found(tmp_path) == HostMemory(GIB, 3 * GIB, outer)
    group(outer, version, 8 * GIB, 3 * GIB)
    assert found(tmp_path) == HostMemory(2 * GIB, 3 * GIB, mine)


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_is_freed_first_is_available(tmp_path, version):
    mine = group(tmp_path / str(version) / "outer" / "mine", version, 3 * GIB, 3 * GIB, page_cache=2 * GIB)
    assert found(tmp_path) == HostMemory(2 * GIB, 3 * GIB, mine)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_group_where_the_hierarchy_is_mounted(tmp_path, version):
    root = group(tmp_path / str(version), version, 2 * GIB, GIB)
    assert found(tmp_path, "4:memory:/docker/0123\n0::/docker/0123\n") == HostMemory(GIB, 2 * GIB, root)
    assert found(tmp_path, "4:memory:/\n0::/\n") == HostMemory(GIB, 2 * GIB, root)


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 65 * GIB])
def test_a_group_without_a_limit_below_the_machines_memory_says_nothing(tmp_path, limit):
    for version in (1, 2):
        group(tmp_path / str(version) / "outer" / "mine", version, limit, GIB)
    assert found(tmp_path) == HostMemory(20 * GIB, 64 * GIB)


def test_a_group_that_allows_more_than_is_free_bounds_the_total_alone(tmp_path):
    group(tmp_path / "2" / "outer" / "mine", 2, 32 * GIB, 0)
    assert found(tmp_path) == HostMemory(20 * GIB, 32 * GIB)


def test_a_system_without_control_groups(tmp_path):
    assert host_memory(tmp_path / "absent", tmp_path / "absent") == HostMemory(20 * GIB, 64 * GIB)


def test_a_limit_of_the_kernel_is_seen():
    code = "from flexgen_helm.hardware.control_groups import host_memory as m; print(m().total, m().available)"
    try:
        with MemoryGroup(256 << 20) as own:
            done = subprocess.run(own.enter([sys.executable, "-c", code]), capture_output=True, text=True, cwd=ROOT)
    except GroupUnavailable as error:
        pytest.skip(str(error))
    total, available = map(int, done.stdout.split())
    assert total == 256 << 20 and 0 < available < total
