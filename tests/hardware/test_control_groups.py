"""Memory limits of containers and jobs, in files as the kernel writes them, and in a real control
group.
"""

import subprocess
import sys

import psutil
import pytest

from flexgen_helm.benchmarks.process import GroupUnavailable, memory_group
from flexgen_helm.hardware.host_memory import host_memory

MIB = 1 << 20


def group(folder, version, limit, usage, droppable=0):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    names = names if version == 1 else ("memory.max", "memory.current", "inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"cache 5\n{names[2]} {droppable}\n")


def files(tmp_path, version, path):
    mount = (
        f"cgroup {tmp_path}/v1 cgroup rw,memory 0 0\n"
        if version == 1
        else f"c {tmp_path}/v2 cgroup2 rw 0 0\n"
    )
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n" + mount)
    (tmp_path / "own").write_text(
        f"3:memory:{path}\n2:pids:/x\n" if version == 1 else f"0::{path}\n"
    )
    return tmp_path / "mounts", tmp_path / "own"


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_with_the_least_room_counts(tmp_path, version):
    """Here it is the one around the process's own. Files that the kernel can drop are room."""
    root = tmp_path / f"v{version}"
    group(root, version, 9223372036854771712 if version == 1 else "max", 900 * MIB)
    group(root / "job", version, 100 * MIB, 70 * MIB, droppable=20 * MIB)
    group(root / "job" / "step", version, 90 * MIB, 10 * MIB)
    found = host_memory(*files(tmp_path, version, "/job/step"))
    assert (found.total, found.available, found.group_limit) == (90 * MIB, 50 * MIB, 100 * MIB)
    most = psutil.virtual_memory().total - MIB  # more than is free
    group(tmp_path / f"v{version}" / "large", version, most, 0)
    found = host_memory(*files(tmp_path, version, "/large"))
    assert (found.total, found.group_limit) == (most, most) and found.available < most
    found = host_memory(*files(tmp_path, version, "/"))
    assert found.total == psutil.virtual_memory().total and found.group_limit is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_as_the_root(tmp_path, version):
    group(tmp_path / f"v{version}", version, 64 * MIB, 100 * MIB)
    found = host_memory(*files(tmp_path, version, "/docker/0123456789"))
    assert (found.total, found.available) == (64 * MIB, 0), "more than the limit is in use"


def test_without_groups_it_is_the_machines(tmp_path):
    found = host_memory(tmp_path / "none", tmp_path / "none")
    assert found.total == psutil.virtual_memory().total and found.group_limit is None


def test_an_engine_in_a_group_plans_with_the_groups_memory():
    code = (
        "from pathlib import Path\nfrom flexgen_helm.engine.placing import tier_capacities\n"
        "from flexgen_helm.tiers import MemoryLimits\n"
        "print(tier_capacities(MemoryLimits(), Path('.'))['cpu'])"
    )
    try:
        with memory_group(3 << 30) as inside:
            command = inside([sys.executable, "-c", code])
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except GroupUnavailable as error:
        pytest.skip(str(error))
    assert 0 < int(done.stdout) < 2 << 30, "3 GiB less the process itself and a margin of 1 GiB"
